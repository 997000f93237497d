"""The tokenizers beside the library `tokenizers`."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Reference

from flashmem.bundle.language import PATTERNS, SPACE_PREFIXES, Language
from flashmem.runtime.generation.tokenizer import Tokenizer
from tests.support.gguf_models import CONTROLS, CORPUS, sentence_pieces, vocabulary
from tests.support.reference_tokenizers import byte_pairs, characters


def language(pattern: str) -> Language:
    tokens, merges = vocabulary()
    types = tuple(3 if token in CONTROLS else 1 for token in tokens)
    pairs = tuple(" ".join(pair) for pair in merges)
    return Language(PATTERNS[pattern], tuple(tokens), types, pairs, None, frozenset({0}), None, 256)


@cache
def ours(pattern: str) -> Tokenizer:
    return Tokenizer(language(pattern))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_corpus(pattern: str) -> None:
    for text in (CORPUS, *CORPUS.split("\n"), CORPUS.upper(), CORPUS[::-1], CORPUS.replace(" ", "  ").replace("e", "'re")):
        tokens = ours(pattern).encode(text)
        assert tokens == byte_pairs(pattern).encode(text).ids
        assert ours(pattern).decode(tokens) == text.encode()


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=150)
@given(
    text=st.text()
    | st.text(st.sampled_from("ab'sTLl dD1²½Ⅷ٣_-.\t\n\r\x0b\x0c\x1c\x1f\x85\xa0\u2003\u3000\u200b東é\u0301🙂"), max_size=60)
)
def test_any_text(pattern: str, text: str) -> None:
    tokens = ours(pattern).encode(text)
    assert tokens == byte_pairs(pattern).encode(text).ids
    assert ours(pattern).decode(tokens).decode() == text


def test_control_tokens_are_recognised_in_templates_only() -> None:
    text, number = "<|im_start|>user\nHi<|im_end|>", vocabulary()[0].index("<|im_start|>")
    made = Reference.from_str(byte_pairs("smollm").to_str())
    made.add_special_tokens([AddedToken(each, special=True) for each in CONTROLS])
    within = ours("smollm").encode(text, control=True)
    assert within == made.encode(text).ids and within[0] == number
    apart = ours("smollm").encode(text)
    assert number not in apart and apart == byte_pairs("smollm").encode(text).ids
    assert ours("smollm").decode(within) == b"user\nHi"
    assert ours("smollm").decode(apart) == text.encode()


def test_numbers_that_are_no_tokens() -> None:
    with pytest.raises(ValueError, match=r"^400 is no token; there are 400$"):
        ours("smollm").decode([400])


@cache
def pieces(space_prefix: str) -> Tokenizer:
    tokens, scores, types = sentence_pieces()
    given = (None, tuple(tokens), tuple(types), (), 1, frozenset({2}), None, 256, tuple(scores), space_prefix)
    return Tokenizer(Language(*given))


@pytest.mark.parametrize("space_prefix", SPACE_PREFIXES)
@settings(max_examples=300)
@given(text=st.text() | st.text(st.sampled_from("reads one token▁ \n.東é🙂<s>"), max_size=60))
@example(text=CORPUS)
@example(text="reads all again " * 9)
def test_sentence_pieces(space_prefix: str, text: str) -> None:
    tokens = pieces(space_prefix).encode(text)
    assert tokens == characters(space_prefix).encode(text).ids
    spaces = text.replace("▁", " ")
    prefixed = text and (space_prefix == "always" or (space_prefix == "first" and not text.startswith((" ", "▁"))))
    assert pieces(space_prefix).decode(tokens).decode() == f"{' ' if prefixed else ''}{spaces}"


def test_parts_of_a_conversation_are_joined() -> None:
    """A token may have the end of a template's piece and the beginning of a message; control tokens are the template's."""
    made = pieces("always")
    whole = made.encode_parts([("<s>one ", True), ("token</s>", False), ("<|end|>and", True)])
    assert whole == [1, *made.encode("one token</s>"), 3, *made.encode("and")]
    assert 2 not in whole and made.decode(whole) == b" one token</s> and"
