"""The tokens of texts in plain Python: special tokens are found first, the rest is byte pairs or SentencePiece's."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Sequence

from flashmem.bundle.language import BYTE, CONTROL, UNKNOWN, UNUSED, USER_DEFINED, Language
from flashmem.runtime.generation.byte_pairs import BytePairs
from flashmem.runtime.generation.sentence_pieces import SentencePieces

SPELLED = "\ufdd0"
"""A character that no text has (a noncharacter of Unicode): the one behind it is part of a text, and of no control token."""

_SPELLED_PARTS = re.compile(f"((?:{SPELLED}[^{SPELLED}])+)", re.DOTALL)


def _cut_at(marks: set[str]) -> re.Pattern[str] | None:
    """Splits a text at each of these tokens, which stay, the longest first; None without tokens."""
    return re.compile(f"({'|'.join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True))})") if marks else None


def composed(text: str) -> str:
    """Unicode's normal form C of `text`. Its marks are sorted first, for which the library's own way takes quadratic time."""
    if text.isascii():
        return text
    parts = list[str]()
    marks = list[str]()
    for character in "".join(unicodedata.normalize("NFD", each) for each in text):
        if unicodedata.combining(character):
            marks.append(character)
        else:
            parts += [*sorted(marks, key=unicodedata.combining), character]
            marks.clear()
    return unicodedata.normalize("NFC", "".join([*parts, *sorted(marks, key=unicodedata.combining)]))


class Tokenizer:
    """The tokens of texts, and the bytes of tokens. `most_characters`: no longer text has so few tokens as the cache holds."""

    def __init__(self, language: Language) -> None:
        self._tokens = language.tokens
        self._types = language.types
        self._space = language.space_prefix
        self._nfc = language.nfc
        self._ids = {token: number for number, token in enumerate(language.tokens)}
        silent, own = (
            {token for token, its in zip(language.tokens, language.types, strict=True) if its == kind and token}
            for kind in (CONTROL, USER_DEFINED)
        )
        self._silent = silent
        self._cut = {False: _cut_at(own), True: _cut_at(own | silent)}
        longest = max(len(token) for token in language.tokens)
        # The longest composition of normal form C makes one character of four.
        self.most_characters = language.max_length * longest * (4 if language.nfc else 1)
        self._model: BytePairs | SentencePieces
        if language.pattern is not None:
            self._model = BytePairs(self._ids, language.merges, language.pattern)
        else:
            ids = {token: number for token, number in self._ids.items() if language.types[number] not in (CONTROL, UNUSED)}
            unknown = next((number for number, its in enumerate(language.types) if its == UNKNOWN), None)
            self._model = SentencePieces(ids, language.scores, unknown)

    def spelled(self, text: str, kept: Collection[str] = ()) -> str:
        """`text` for a template that puts it among control tokens: those in it, but for the tokens `kept`, are spelled.

        `encode_template` reads what the template makes of it.
        """
        text = text.replace(SPELLED, "")
        cut = _cut_at(self._silent - {*kept})
        return text if cut is None else cut.sub(lambda found: "".join(f"{SPELLED}{each}" for each in found[0]), text)

    def encode_template(self, text: str) -> list[int]:
        """The tokens of what a template made: control tokens are recognised where they are not spelled.

        Raises:
            ValueError: the vocabulary lacks a byte of the text.
        """
        parts = enumerate(_SPELLED_PARTS.split(text))
        return self.encode_parts([(part[1::2], False) if at % 2 else (part.replace(SPELLED, ""), True) for at, part in parts])

    def encode(self, text: str, *, control: bool = False) -> list[int]:
        """The tokens of `text`. With `control`, control tokens in it are recognised: for templates, not for a user's text.

        Raises:
            ValueError: the vocabulary lacks a byte of the text.
        """
        return self.encode_parts([(text, control)])

    def encode_parts(self, parts: Sequence[tuple[str, bool]]) -> list[int]:
        """The tokens of a text in parts, of which control tokens are recognised in some (`True`).

        Raises:
            ValueError: the vocabulary lacks a byte of the text.
        """
        plain = ""
        tokens = list[int]()
        for text, control in parts:
            cut = self._cut[control]
            for index, part in enumerate([text] if cut is None else cut.split(text)):
                if index % 2:
                    tokens += [*self._plain(plain, not tokens), self._ids[part]]
                    plain = ""
                else:
                    plain += part
        return tokens + self._plain(plain, not tokens)

    def decode(self, tokens: Sequence[int]) -> bytes:
        """The bytes of tokens, without control tokens. A character may end in a later token.

        Raises:
            ValueError: a number is no token.
        """
        texts = []
        for number in tokens:
            if not 0 <= number < len(self._tokens):
                raise ValueError(f"{number} is no token; there are {len(self._tokens)}")
            text = self._tokens[number]
            its = self._types[number]
            if its == BYTE and (byte := re.fullmatch("<0x([0-9A-F]{2})>", text)):
                texts.append(bytes.fromhex(byte[1]))
            elif text not in self._silent:
                texts.append(text.encode() if its == USER_DEFINED else self._model.decode(text))
        return b"".join(texts)

    def _plain(self, text: str, is_first: bool) -> list[int]:
        """The tokens of a part without control tokens; `is_first`: nothing precedes it."""
        if not text:
            return []
        if self._nfc:
            text = composed(text)
        if self._space == "always" or (self._space == "first" and is_first and not text.startswith((" ", "▁"))):
            text = " " + text
        return self._model.encode(text)
