"""Languages read from `tokenizer.json`, beside the library that wrote the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors

from flashmem.base.errors import UserError
from flashmem.bundle.language import PATTERNS, Language
from flashmem.compiler.frontend.language.tokenizer_file import begins_with, tokenizer_fields
from flashmem.runtime.generation.tokenizer import Tokenizer as Ours
from tests.support.gguf_models import CORPUS
from tests.support.reference_tokenizers import byte_pairs, characters

PATH = Path("tokenizer.json")


def copied(made: Tokenizer) -> Tokenizer:
    return Tokenizer.from_str(made.to_str())


def composed() -> Tokenizer:
    made = copied(byte_pairs("qwen2"))
    made.normalizer = normalizers.NFC()
    return made


def with_own_tokens(made: Tokenizer) -> Tokenizer:
    made = copied(made)
    made.add_tokens([AddedToken("token after", normalized=False)])
    made.add_special_tokens([AddedToken("<|own|>", special=True)])
    return made


MADE = {pattern: byte_pairs(pattern) for pattern in PATTERNS}
MADE |= {f"characters, {prefix}": characters(prefix) for prefix in ("always", "first", "never")}
MADE |= {"composed": composed(), "own tokens": with_own_tokens(byte_pairs("smollm"))}
MADE["own tokens of characters"] = with_own_tokens(characters("always"))


def ours(made: Tokenizer, size: int = 0) -> Ours:
    fields = tokenizer_fields(json.loads(made.to_str()), PATH, size)
    rest: dict[str, Any] = {"begin": None, "ends": [0], "chat": None, "max_length": 64}
    return Ours(Language.from_json(json.dumps({**fields, **rest}).encode()))


READ = {name: ours(made) for name, made in MADE.items()}


@pytest.mark.parametrize("name", MADE)
@settings(max_examples=100)
@given(text=st.text() | st.text(st.sampled_from("reads one token after ▁'sTL 12\n\xa0.東éé🙂"), max_size=60))
@example(text=CORPUS)
@example(text="e\u0301 token after token after 12")
def test_any_text(name: str, text: str) -> None:
    assert READ[name].encode(text) == MADE[name].encode(text, add_special_tokens=False).ids


def test_more_logits_than_tokens() -> None:
    made = byte_pairs("smollm")
    read = ours(made, made.get_vocab_size() + 9)
    assert read.encode(CORPUS) == made.encode(CORPUS).ids
    assert read.decode([made.get_vocab_size() + 8]).startswith(b"<unused")


def test_the_first_token_of_a_text() -> None:
    made = with_own_tokens(byte_pairs("smollm"))
    assert begins_with(json.loads(made.to_str())) is None
    number = made.token_to_id("<|own|>")
    made.post_processor = processors.TemplateProcessing(single="<|own|> $A", special_tokens=[("<|own|>", number)])
    assert begins_with(json.loads(made.to_str())) == "<|own|>"
    assert made.encode("a").ids[0] == number
    made.post_processor = processors.Sequence([processors.ByteLevel(), made.post_processor])
    assert begins_with(json.loads(made.to_str())) == "<|own|>"


def unsupported(**parts: Any) -> dict[str, Any]:
    made = copied(byte_pairs("gpt-2"))
    for name, part in parts.items():
        setattr(made, name, part)
    given: dict[str, Any] = json.loads(made.to_str())
    return given


UNSUPPORTED = {
    "a normalizer Lowercase": unsupported(normalizer=normalizers.Lowercase()),
    "cuts a text by Whitespace": unsupported(pre_tokenizer=pre_tokenizers.Whitespace()),
    "a pattern that is not one of": unsupported(
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(r"\w+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
    ),
    "of the kind 'WordPiece'": {"model": {"type": "WordPiece"}},
}


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_unsupported(message: str) -> None:
    with pytest.raises(UserError, match=message):
        tokenizer_fields(UNSUPPORTED[message], PATH, 0)
