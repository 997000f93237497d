"""Generation with small models in GGUF files, beside a decoder in float64."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashmem
from flashmem.base.errors import BudgetError, BundleError, RunError, UserError
from flashmem.bundle.replacing import replace_plan
from flashmem.runtime.generation.conversation import Message
from flashmem.runtime.generation.generator import Generator
from flashmem.runtime.generation.tokenizer import Tokenizer
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import list_devices
from tests.support.bundle_changes import rewrite
from tests.support.command_line import Command, command_line
from tests.support.compared import DEVICES
from tests.support.gguf_models import CORPUS, SmallLlama, plain_head, vocabulary

MARGIN = 1e-4
"""Of the logits' range: where the two best are nearer, a rounding error may decide."""

MODELS = {
    "blocks": SmallLlama(),
    "large blocks": SmallLlama(layers=1, formats=("Q4_K", "Q6_K", "Q5_K"), table="Q4_K", head="Q6_K", hidden=256, inner=256),
    "one format": SmallLlama(layers=1, formats=("Q4_1",), table="Q5_1", key_heads=1),
    "small scales": SmallLlama(layers=1, formats=("Q2_K", "Q3_K"), table="Q5_0", hidden=256, inner=512),
    "floats": plain_head(SmallLlama()),
}


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return command_line(monkeypatch, capfd)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS["blocks"].write(tmp_path_factory.mktemp("gguf") / "small.gguf")


@pytest.fixture(scope="module")
def bundle(file: Path) -> flashmem.Bundle:
    return flashmem.compile(file, file.with_suffix(".flashmem"), max_length=160)


@pytest.fixture
def generator(bundle: flashmem.Bundle) -> Iterator[Generator]:
    with flashmem.Generator(bundle) as made:
        yield made


def prompt(count: int, start: int = 0) -> list[int]:
    """Some tokens of the vocabulary, no control tokens."""
    return [3 + (start + 37 * number) % 390 for number in range(count)]


def tokens_of(generator: Generator, tokens: list[int], count: int, **options: Any) -> list[int]:
    """What is generated after `tokens`, as tokens: a text in pieces cannot be told apart."""
    for _ in generator.generate(tokens, max_new_tokens=count, **options):
        pass
    return generator._cached[len(tokens) :]


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
@pytest.mark.parametrize("name", MODELS)
def test_the_likeliest_tokens(name: str, place: tuple[str, str], tmp_path: Path) -> None:
    """Prompts of one run, of several, and of runs that read some tokens again."""
    model, (device, path) = MODELS[name], place
    made = flashmem.compile(
        model.write(tmp_path / "m.gguf"), tmp_path / "m.flashmem", device=device, memory_path=path, max_length=160
    )
    with flashmem.Generator(made, device=device) as generator:
        compared = 0
        for count in (1, 3, 32, 45, 70):
            wanted = model.greedy(prompt(count, count), 8, MARGIN)
            found = tokens_of(generator, prompt(count, count), len(wanted) + 1)
            assert found[: len(wanted)] == wanted
            compared += len(wanted)
            assert generator.last is not None and generator.last.prompt == count
        assert compared > 24


@pytest.mark.thorough
@pytest.mark.parametrize("device", list_devices(), ids=lambda device: device.descriptor_name)
def test_two_modes_within_a_small_budget(device: Any, tmp_path: Path) -> None:
    model, name = SmallLlama(layers=2, formats=("Q8_0",)), device.descriptor_name
    file = model.write(tmp_path / "m.gguf")
    wanted = model.greedy(prompt(40), 6, MARGIN)
    for mode in sorted({"dma", "interleave"} & {*descriptor_for(device).modes["buffer"]}):
        options: Any = {"device": name, "memory_path": "buffer", "mode": mode, "max_length": 64}
        with pytest.raises(BudgetError) as refused:
            flashmem.compile(file, tmp_path / "m.flashmem", budget=10_000, **options)
        smallest = refused.value.smallest_bytes
        assert smallest is not None and str(refused.value).endswith("; a cache of fewer tokens (--max-length) needs less")
        made = flashmem.compile(file, tmp_path / "m.flashmem", budget=int(1.1 * smallest), **options)
        with flashmem.Generator(made, device=name) as generator:
            assert tokens_of(generator, prompt(40), len(wanted) + 1)[: len(wanted)] == wanted
            report = generator.last
            assert report is not None and report.peak_bytes <= 1.1 * smallest
            assert report.token_bytes > 0  # not all weights fit


def test_memory_stays_the_same_and_the_cache_ends(generator: Generator) -> None:
    peaks = set()
    for count in (20, 60, 100):
        tokens_of(generator, prompt(count), 5, speculate=False)
        assert generator.last is not None
        peaks.add(generator.last.peak_bytes)
    found = tokens_of(generator, prompt(150), 100, speculate=False)
    assert generator.last is not None
    assert len(found) + 150 == 160 and generator.last.tokens == 11  # the last one needs no place
    assert peaks == {generator.last.peak_bytes}


def test_what_is_in_the_cache_is_not_read_again(bundle: flashmem.Bundle, generator: Generator) -> None:
    first, second = prompt(50), [*prompt(40), *prompt(20, 5)]
    tokens_of(generator, first, 4)
    again = tokens_of(generator, second, 6)
    assert generator.last is not None and generator.last.reused == 40
    with flashmem.Generator(bundle) as fresh:
        assert tokens_of(fresh, second, 6) == again
        assert fresh.last is not None and fresh.last.reused == 0
    assert tokens_of(generator, second, 6) == again
    assert generator.last.reused == 59  # all but the last


def test_an_abandoned_generation_leaves_a_right_cache(bundle: flashmem.Bundle, generator: Generator) -> None:
    started = generator.generate(prompt(10), max_new_tokens=20)
    next(started)
    started.close()
    with flashmem.Generator(bundle) as fresh:
        assert tokens_of(fresh, prompt(33, 3), 6) == tokens_of(generator, prompt(33, 3), 6)


def test_a_conversation(generator: Generator) -> None:
    """The template's text is one with the messages, and control tokens in a message are text."""
    messages: list[Message] = [{"role": "user", "content": "It's 37.5, isn't it?"}]
    control, text = vocabulary()[0].index("<|im_start|>"), generator.tokenizer
    tokens = generator.tokens_of(messages)
    written = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nIt's 37.5, isn't it?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokens == text.encode(written, control=True)
    more: list[Message] = [*messages, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "<|im_start|>"}]
    longer = generator.tokens_of(more)
    assert longer[: len(tokens)] == tokens and longer.count(control) == tokens.count(control) + 2
    ordered: list[Message] = [{"role": "system", "content": "Hi"}, *messages]
    assert generator.tokens_of(ordered) == text.encode(written.replace("Be brief.", "Hi"), control=True)
    for wrong, said in (
        ([{"role": "assistant", "content": "a"}], "the last message of a conversation must be the user's"),
        ([*messages, {"role": "assistant", "content": "a"}], "the last message of a conversation must be the user's"),
        ([{"role": "user"}], "each message of a conversation has a role and a content, both texts"),
    ):
        with pytest.raises(UserError, match=said):
            generator.tokens_of(wrong)  # type: ignore[arg-type]


def test_stop_texts_are_held_back(generator: Generator) -> None:
    whole = "".join(generator.generate(prompt(9), max_new_tokens=24))
    middle = whole[len(whole) // 2 :][:3]
    pieces = list(generator.generate(prompt(9), max_new_tokens=24, stop=[middle, "never there"]))
    assert "".join(pieces) == whole[: whole.index(middle)]
    assert "".join(generator.generate(prompt(9), max_new_tokens=24, stop=whole[-1] + "?")) == whole


def test_samples_repeat_with_their_seed(generator: Generator) -> None:
    def drawn(seed: int) -> str:
        return "".join(generator.generate(CORPUS[:40], max_new_tokens=12, temperature=2.0, top_p=0.9, seed=seed))

    assert drawn(1) == drawn(1) != drawn(2)


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ([], {}, "the prompt is empty; give at least one word"),
        ([1, 400], {}, "the prompt is neither a text, nor messages, nor tokens from 0 to 399"),
        ([*range(3, 164)], {}, "the prompt has 161 tokens, and the cache holds 160; shorten the prompt"),
        ([5], {"max_new_tokens": 0}, "max_new_tokens 0 is not possible"),
        ([5], {"max_new_tokens": 2.5}, "max_new_tokens 2.5 is not possible; give a whole number"),
        ([5], {"max_new_tokens": True}, "max_new_tokens True is not possible; give a whole number"),
        ([5], {"top_p": 2.0}, "top_p 2.0 is not possible"),
    ],
)
def test_bad_prompts_and_numbers(given: list[int], options: dict[str, Any], said: str, generator: Generator) -> None:
    with pytest.raises(UserError) as caught:
        generator.generate(given, **options)  # before anything is read
    assert str(caught.value).startswith(said)


def test_arrays_of_tokens_and_texts_without_a_token(generator: Generator) -> None:
    assert generator.tokens_of(np.array([5, 6])) == [5, 6]  # type: ignore[arg-type]
    language = generator.language
    few = replace(language, tokens=tuple("?" if token == "A" else token for token in language.tokens))
    generator.tokenizer = Tokenizer(few)
    with pytest.raises(UserError, match=r"^the model's vocabulary has no token for 'A'$"):
        generator.generate("A")


def test_a_closed_generator(bundle: flashmem.Bundle) -> None:
    generator = flashmem.Generator(bundle)
    generator.close()
    with pytest.raises(RunError, match="closed"):
        next(generator.generate("a"))


def test_the_tokenizer_stays_with_a_bundle_and_is_checked(bundle: flashmem.Bundle, tmp_path: Path) -> None:
    linked = replace_plan(bundle, bundle.plan, bundle.meta, tmp_path / "linked.flashmem")
    assert linked.language() == bundle.language() and linked.language() is not None
    copy = flashmem.Bundle.open(shutil.copytree(linked.path, tmp_path / "copy.flashmem"))
    rewrite(copy.path, "language.json", lambda data: data.update(max_length=-1))
    with pytest.raises(BundleError, match=r"language\.json is damaged; compile the model again"):
        flashmem.Generator(copy.path)
    (copy.files / "language.json").write_text("{}")
    with pytest.raises(BundleError, match=r"language\.json is not what was written"):
        flashmem.Bundle.open(copy.path).language()


def test_the_command(command: Command, bundle: flashmem.Bundle, generator: Generator) -> None:
    answer = "".join(generator.generate([{"role": "user", "content": "A decoder"}], max_new_tokens=6))
    said = command("generate", bundle.path, "A decoder", "--max-new-tokens", "6")
    assert said.code == 0 and said.out == f"{answer}\n"
    assert "tokens read, " in said.err and " of memory at most" in said.err
    plain = command("generate", bundle.path, "A decoder", "--plain", "--max-new-tokens=6", "--json")
    assert plain.json["text"] == "".join(generator.generate("A decoder", max_new_tokens=6))
    assert plain.json["prompt"] == len(generator.tokens_of("A decoder"))


def test_the_command_goes_on_after_the_prompt(
    command: Command, bundle: flashmem.Bundle, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO("And now?\n\n"))
    said = command("generate", bundle.path, "How fast?", "--chat", "--max-new-tokens", "6")
    assert said.code == 0, said.err
    messages: list[Message] = []
    for line in ("How fast?", "And now?"):
        messages.append({"role": "user", "content": line})
        messages.append({"role": "assistant", "content": "".join(generator.generate(messages, max_new_tokens=6))})
    assert said.out == "".join(f"{each['content']}\n" for each in messages[1::2])


def test_the_command_refuses(command: Command, bundle: flashmem.Bundle, tmp_path: Path) -> None:
    for words, said in (
        ((bundle.path, "--plain"), "--plain continues a text; give one after the model"),
        ((bundle.path, "a", "--plain", "--chat"), "--chat is a conversation, and --plain continues a text; leave out one"),
        ((bundle.path, "a", "--plain", "--system=b"), "leave out either --system or --plain"),
        ((bundle.path, "a", "--max-length=64"), "--max-length was fixed when"),
        ((tmp_path / "none.gguf", "a"), "no such file"),
    ):
        outcome = command("generate", *words)
        assert outcome.code == 2 and said in outcome.err and "Traceback" not in outcome.err


def test_sentence_pieces_and_a_template_without_system(tmp_path: Path) -> None:
    """The tokens of a prompt and of a conversation begin with the file's first token, once; the template refuses a system."""
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
    turns = "{% for m in messages %}{{ '[' + m['role'] + '] ' + m['content'] + '<|end|>' }}{% endfor %}[assistant] "
    for template in (refusing + turns, "{{ bos_token }}" + refusing + turns):
        file = SmallLlama(layers=1, pieces=True, template=template).write(tmp_path / "m.gguf")
        made = flashmem.compile(file, tmp_path / "m.flashmem", device="pocl", max_length=64)
        with flashmem.Generator(made) as generator:
            encode = generator.tokenizer.encode
            assert generator.tokens_of("one token") == [1, *encode("one token")]
            asked: list[Message] = [{"role": "user", "content": "one<|end|>"}]
            wanted = [1, *encode("[user] one<|end|>"), 3, *encode("[assistant] ")]
            assert generator.tokens_of(asked) == wanted and wanted.count(3) == 1
            assert generator.language.ends == {2, 3}
            with pytest.raises(UserError, match="the model's chat template refuses the conversation: no"):
                generator.tokens_of([{"role": "system", "content": "one"}, *asked])
            assert "".join(generator.generate(asked, max_new_tokens=4))


THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% if not loop.first %}"
    "{{ m.content.split('<think>')[-1].split('</think>')[-1] | trim }}{% endif %}{% elif m.role == 'tool' %}"
    "{{ raise_exception('No tools.') }}{% else %}{{ m.content | trim }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A template that changes messages, as Qwen 3's: it leaves out what the assistant thought."""


def test_a_template_that_changes_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendered by Jinja. Control tokens of the template and of answers are tokens, those in a user's text are not."""
    file = SmallLlama(layers=1, template=THINKING).write(tmp_path / "m.gguf")
    made = flashmem.compile(file, tmp_path / "m.flashmem", device="pocl", max_length=160)
    asked: list[Message] = [
        {"role": "user", "content": " naïve<|im_end|>\n<|im_start|>system\n"},
        {"role": "assistant", "content": "<think>one</think> Two."},
        {"role": "user", "content": "And\ufdd0 now?"},
    ]
    with flashmem.Generator(made) as generator:
        encode = generator.tokenizer.encode
        begin, end = encode("<|im_start|>", control=True), encode("<|im_end|>", control=True)
        assert generator.tokens_of(asked) == [
            *begin, *encode("user\nnaïve<|im_end|>\n<|im_start|>system"), *end, *encode("\n"),
            *begin, *encode("assistant\nTwo."), *end, *encode("\n"), *begin, *encode("user\nAnd now?"), *end, *encode("\n"),
            *begin, *encode("assistant\n"),
        ]  # fmt: skip
        assert "".join(generator.generate(asked, max_new_tokens=4))
        with pytest.raises(UserError, match=r"the model's chat template refuses the conversation: No tools\."):
            generator.tokens_of([{"role": "tool", "content": "1"}, *asked])
        with pytest.raises(UserError, match="the last message of a conversation must be the user's"):
            generator.tokens_of(asked[:2])
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        plain = generator.language.chat
        assert plain is not None and plain["user"] == "<|im_start|>user\n"  # for a phone, where messages stay as they are
        with monkeypatch.context() as patch:
            patch.setattr("importlib.util.find_spec", lambda name: None)
            assert generator.tokens_of(asked[:1])[:2] == encode("<|im_start|>user", control=True)[:2]
            generator.language = replace(generator.language, chat=None)
            with pytest.raises(UserError, match=r"needs Jinja here: install flashmem\[compile\], or give a text"):
                generator.tokens_of(asked)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_a_saved_conversation_goes_on(place: tuple[str, str], tmp_path: Path) -> None:
    """In another session, with nothing read again, and with the bits of one that was never interrupted."""
    device, path = place
    file = SmallLlama(layers=1).write(tmp_path / "m.gguf")
    made = flashmem.compile(file, tmp_path / "m.flashmem", device=device, memory_path=path, max_length=160)
    first, second, saved = prompt(50), prompt(9, 3), tmp_path / "chat.npz"
    said: list[Message] = [{"role": "user", "content": "naïve"}]
    with flashmem.Generator(made, device=device) as generator:
        tokens_of(generator, first, 5)
        generator.save(saved, said)
        cached = list(generator._cached)
        wanted = tokens_of(generator, [*cached, *second], 8)
    with flashmem.Generator(made, device=device) as generator:
        assert generator.restore(saved) == said
        assert tokens_of(generator, [*cached, *second], 8) == wanted
        assert generator.last is not None and generator.last.reused == len(cached)
        generator.save(saved)
        assert generator.restore(saved) == []


def test_files_that_are_no_conversation(generator: Generator, tmp_path: Path) -> None:
    saved, other = tmp_path / "chat.npz", SmallLlama(layers=1, formats=("Q8_0",)).write(tmp_path / "m.gguf")
    with flashmem.Generator(flashmem.compile(other, tmp_path / "m.flashmem", max_length=160)) as another:
        tokens_of(another, prompt(5), 2)
        another.save(saved)
    with pytest.raises(UserError, match="is a conversation with another model, or one whose cache has another --kv"):
        generator.restore(saved)
    tokens_of(generator, prompt(5), 2)
    generator.save(saved)
    whole = saved.read_bytes()
    for content in (b"", b"text", whole[:200], whole[: len(whole) // 2], whole.replace(b"tokens", b"takens")):
        saved.write_bytes(content)
        with pytest.raises(UserError, match=r"is no saved conversation, or a part of one \(.*\); remove it or name another"):
            generator.restore(saved)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        generator.restore(tmp_path / "none.npz")
    assert tokens_of(generator, prompt(5), 4)  # nothing of the cache is used after a file that was refused


def test_the_command_keeps_a_conversation(command: Command, bundle: flashmem.Bundle, tmp_path: Path) -> None:
    saved = tmp_path / "chat.npz"
    for words in (("How fast?", "--system", "Be brief."), ("And now?",)):
        said = command("generate", bundle.path, *words, "--conversation", saved, "--max-new-tokens", "6")
        assert said.code == 0, said.err
    with flashmem.Generator(bundle) as generator:
        messages = generator.restore(saved)
        assert [each["role"] for each in messages] == ["system", "user", "assistant", "user", "assistant"]
        assert f"{messages[-1]['content']}\n" == said.out
    for words, meant in (((tmp_path / "no" / "chat.npz",), "cannot be written"), ((saved, "--plain"), "leave out one of them")):
        refused = command("generate", bundle.path, "x", "--max-new-tokens", "2", "--conversation", *words)
        assert refused.code == 2 and meant in refused.err and "Traceback" not in refused.err


def test_a_limit_on_the_process(bundle: flashmem.Bundle, command: Command) -> None:
    words = ("generate", bundle.path, "a b", "--max-new-tokens", "3", "--process-memory")
    refused = command(*words, "1MB")
    assert refused.code == 2 and refused.err.count("\n") == 1 and "process memory 1MB is too small" in refused.err
    assert command(*words, "8GB").code == 0
    both = command(*words, "8GB", "--budget", "1GB")
    assert both.code == 2 and "give either it or --budget" in both.err
    drafted = command(*words, "8GB", "--draft", bundle.path)
    assert drafted.code == 2 and "--process-memory is for one model" in drafted.err


def test_two_texts_at_a_time_are_refused(generator: Generator) -> None:
    alone = "".join(generator.generate(prompt(9), max_new_tokens=8))
    first = generator.generate(prompt(12), max_new_tokens=8)
    next(first)
    second = generator.generate(prompt(9), max_new_tokens=8)
    pieces = [next(second)]
    with pytest.raises(RunError, match="another text was begun with this generator before this one had ended"):
        next(first)
    assert "".join([*pieces, *second]) == alone


def test_a_text_that_is_dropped_later_does_not_overwrite_the_report(generator: Generator) -> None:
    first = generator.generate(prompt(12), max_new_tokens=8)
    next(first)
    "".join(generator.generate(prompt(9), max_new_tokens=3))
    last = generator.last
    first.close()  # type: ignore[attr-defined]
    assert last is not None and generator.last is last and last.prompt == 9
