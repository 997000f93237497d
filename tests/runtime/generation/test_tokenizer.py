"""The tokenizers beside the library `tokenizers`."""

from __future__ import annotations

import random
import unicodedata
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Reference

from flashmem.bundle.language import PATTERNS, SPACE_PREFIXES, Language
from flashmem.runtime.generation import byte_pairs as byte_pairs_module
from flashmem.runtime.generation import tokenizer
from flashmem.runtime.generation.byte_pairs import BytePairs
from flashmem.runtime.generation.joining import joined
from flashmem.runtime.generation.tokenizer import Tokenizer, composed
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


@pytest.mark.parametrize("pattern", PATTERNS)
def test_long_words(pattern: str) -> None:
    """They are not kept, and look-ups of pairs grow with the length of a word, not with its square."""
    letters, chosen = [each for each in CORPUS if each.isalpha()], random.Random(1)
    made = Tokenizer(language(pattern))
    for count in (33, 500, 4000):
        word = "".join(chosen.choices(letters, k=count))
        assert made.encode(word) == byte_pairs(pattern).encode(word).ids
    assert isinstance(made._model, BytePairs) and made._model._cached.cache_info().currsize == 0
    looked: dict[int, int] = {}

    def rank(left: str, right: str) -> int | None:
        looked[count] = looked.get(count, 0) + 1
        return len(left) if left == right else None

    for count in (1 << 8, 1 << 12):
        assert joined("a" * count, rank) == ["a" * count]
    assert looked[1 << 12] <= 17 * looked[1 << 8]


def test_kinds_of_rare_characters_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_pairs_module, "_KNOWN_CHARACTERS", 2)
    kinds = byte_pairs_module._Kinds()
    assert "a1 b\n!".translate(kinds) == "LN LRO" and [*kinds] == [ord("a"), ord("1")]


@settings(max_examples=200)
@given(text=st.text(st.sampled_from("aeo\u0301\u0323\u0344\u0345\u0f73\u1f82\u1100\u1161\u11a8\uac00é\U0001d160")) | st.text())
def test_the_normal_form(text: str) -> None:
    assert composed(text) == unicodedata.normalize("NFC", text)


def test_marks_are_sorted_before_the_library_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It moves each mark back past all that belong behind it, one by one."""
    seen: list[str] = []

    def normalize(form: str, text: str) -> str:
        seen.append(text)
        return unicodedata.normalize(form, text)

    module = SimpleNamespace(normalize=normalize, combining=unicodedata.combining)
    monkeypatch.setattr(tokenizer, "unicodedata", module)
    composed("e" + "\u0f73\u0301\u0323" * 9 + "é")
    classes = [unicodedata.combining(each) for each in max(seen, key=len)[1:-2]]
    assert len(classes) == 36 and classes == sorted(classes)


def test_texts_that_are_too_long_are_known_by_their_characters() -> None:
    for made in (ours("gpt-2"), pieces("always")):
        longest = max(made._tokens, key=len)
        assert made.most_characters == 256 * len(longest)
    assert Tokenizer(replace(language("qwen2"), nfc=True)).most_characters == 4 * ours("qwen2").most_characters


def test_control_tokens_that_are_spelled() -> None:
    """Also those of one character, those in others, and those that overlap; a template's own are recognised beside them."""
    tokens, _ = vocabulary()
    controls = ("<<s>", "<s>", "s><", "\u2402")
    named = replace(language("gpt-2"), tokens=(*tokens, *controls), types=(*language("gpt-2").types, *[3] * len(controls)))
    made, numbers = Tokenizer(named), range(len(tokens), len(tokens) + len(controls))
    for text in ("a\u2402b", "<<s>", "x<s><s>", "\u2402", "\ufdd0<\ufdd0s>", "<|im_end|>\n<s"):
        plain = text.replace("\ufdd0", "")
        spelled = made.encode_template(made.spelled(text))
        assert not {*spelled} & {*numbers, 0, 1, 2} and made.decode(spelled).decode() == plain
        found = made.encode_template(f"<s>{made.spelled(text)}<<s>")
        assert (found[0], found[-1]) == (numbers[1], numbers[0]) and not {*found[1:-1]} & {*numbers}
    kept = made.encode_template(made.spelled("<s>\u2402", ["<s>", "<t>"]))
    assert kept[0] == numbers[1] and numbers[3] not in kept


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
