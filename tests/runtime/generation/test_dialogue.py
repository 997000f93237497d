"""Conversations that are longer than the cache, that are interrupted, and that go on with a larger cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flashmem
from flashmem.base.errors import UserError
from flashmem.bundle.language import PATTERNS, Language
from flashmem.runtime.generation.dialogue import Dialogue
from flashmem.runtime.generation.prompts import tokens_of
from flashmem.runtime.generation.tokenizer import Tokenizer
from tests.support.gguf_models import CONTROLS, SmallLlama, vocabulary

TOKENS, MERGES = vocabulary()
LANGUAGE = Language(
    PATTERNS["gpt-2"],
    tuple(TOKENS),
    tuple(3 if token in CONTROLS else 1 for token in TOKENS),
    tuple(" ".join(pair) for pair in MERGES),
    None,
    frozenset({2}),
    {
        "user": "<|im_start|>", "user assistant": "<|im_end|>", "assistant user": "<|im_end|>",
        "system": "<|im_start|>", "system user": "<|im_end|>",
    },
    100,
)  # fmt: skip


class Echo:
    """Answers each conversation with "Yes." in two pieces; `asked` are the conversations."""

    def __init__(self) -> None:
        self.language, self.asked = LANGUAGE, list[Any]()

    def tokens_of(self, prompt: Any, template_arguments: Any = None) -> list[int]:
        return tokens_of(prompt, LANGUAGE, Tokenizer(LANGUAGE), template_arguments)

    def generate(self, prompt: Any, **_: Any) -> Iterator[str]:
        self.tokens_of(prompt)
        self.asked.append(prompt)
        yield "Ye"
        yield "s."


def contents(messages: Any) -> list[str]:
    return [each["content"] for each in messages]


def test_the_oldest_turns_are_forgotten() -> None:
    """The system's message stays; what is left takes at most half of the cache, for the turns that follow."""
    generator: Any = Echo()
    dialogue = Dialogue(generator, [{"role": "system", "content": "Be brief."}])
    forgotten = []
    for number in range(20):
        assert "".join(dialogue.ask(f"{number} is it?", max_new_tokens=8)) == "Yes."
        forgotten.append(dialogue.forgotten)
        kept = contents(generator.asked[-1])
        assert kept[0] == "Be brief." and kept[-1] == f"{number} is it?"
        tokens = len(generator.tokens_of(generator.asked[-1]))
        assert tokens <= 92 and (not dialogue.forgotten or tokens <= 50)
        assert contents(dialogue.messages) == [*kept, "Yes."]
    assert 1 < sum(each > 0 for each in forgotten) < 5


def test_a_message_that_is_too_long_leaves_the_conversation_as_it_was() -> None:
    generator: Any = Echo()
    dialogue = Dialogue(generator)
    assert "".join(dialogue.ask("One?")) == "Yes."
    before = dialogue.messages
    with pytest.raises(UserError, match=r"the prompt has .* and the cache holds 100; shorten the prompt"):
        list(dialogue.ask("\x00" * 101))
    assert dialogue.messages == before and contents(before) == ["One?", "Yes."]


def test_an_answer_that_is_ended_early_is_kept() -> None:
    generator: Any = Echo()
    dialogue = Dialogue(generator)
    answer = dialogue.ask("One?")
    assert next(answer) == "Ye"
    answer.close()
    assert contents(dialogue.messages) == ["One?", "Ye"]
    begun = dialogue.ask("Two?")
    begun.close()
    assert contents(dialogue.messages) == ["One?", "Ye"]


def test_a_conversation_goes_on_with_a_larger_cache(tmp_path: Path) -> None:
    """Also within another budget: its tokens are not read again, and the answer is that of one session."""
    file, saved = SmallLlama().write(tmp_path / "m.gguf"), tmp_path / "chat.npz"
    small, large = (
        flashmem.compile(file, tmp_path / f"{length}.flashmem", device="pocl", max_length=length, build=False, **given)
        for length, given in ((64, {}), (128, {"budget": "2MB"}))
    )
    with flashmem.Generator(small) as generator:
        dialogue = Dialogue(generator)
        list(dialogue.ask("Hello", max_new_tokens=4))
        generator.save(saved, dialogue.messages)
    with flashmem.Generator(large) as generator:
        dialogue = Dialogue(generator, generator.restore(saved))
        assert contents(dialogue.messages)[0] == "Hello"
        list(dialogue.ask("And?", max_new_tokens=4))
        assert generator.last is not None and generator.last.reused > 8
        generator.save(saved, dialogue.messages)
        list(generator.generate([5] * 70, max_new_tokens=1))
        generator.save(saved)
    with (
        flashmem.Generator(small) as generator,
        pytest.raises(UserError, match=f"^{saved} is a conversation of 70 tokens, and the cache holds 64; compile"),
    ):
        generator.restore(saved)
