"""Byte-level byte-pair encoding in plain Python, equal to that of the library `tokenizers`.

A text is cut into pieces, and the bytes of each piece are characters of the vocabulary. The neighbours whose merge comes first
in the list are joined until none is left (Radford et al. 2019, GPT-2; Sennrich et al. 2016).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count, pairwise

from flashmem.bundle.language import CONTROL, USER_DEFINED, Language

_CACHED_PIECES = 1 << 15
_NO_SPACE = frozenset("\x1c\x1d\x1e\x1f")
"""White space for `str.isspace`, and not for regular expressions of other languages."""


def _byte_characters() -> dict[int, str]:
    """The character of each byte in a vocabulary: itself if it can be printed, else one from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}


_CHARACTERS = _byte_characters()
_BYTES = {character: byte for byte, character in _CHARACTERS.items()}


class _Kinds(dict[int, str]):
    """The kind of each character, as `bundle.language.Pattern` names them; computed when it is first seen."""

    def __missing__(self, code: int) -> str:
        character, category = chr(code), unicodedata.category(chr(code))[0]
        if category in "LN":
            kind = category
        elif not character.isspace() or character in _NO_SPACE:
            kind = "O"
        else:
            kind = " " if character == " " else "R" if character in "\r\n" else "S"
        self[code] = kind
        return kind


_KINDS = _Kinds()


def _cut_at(marks: set[str]) -> re.Pattern[str] | None:
    """Splits a text at each of these tokens, which stay, the longest first; None without tokens."""
    return re.compile(f"({'|'.join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True))})") if marks else None


class Tokenizer:
    """The tokens of texts, and the bytes of tokens."""

    def __init__(self, language: Language) -> None:
        self._pattern, self._tokens = language.pattern, language.tokens
        self._ids = {token: number for number, token in enumerate(language.tokens)}
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(language.merges)}
        silent, own = (
            {token for token, its in zip(language.tokens, language.types, strict=True) if its == kind and token}
            for kind in (CONTROL, USER_DEFINED)
        )
        self._silent, self._cut = silent, {False: _cut_at(own), True: _cut_at(own | silent)}
        self._of_piece = lru_cache(_CACHED_PIECES)(self._merged)

    def encode(self, text: str, *, control: bool = False) -> list[int]:
        """The tokens of `text`. With `control`, control tokens in it are recognised: for templates, not for a user's text.

        Raises:
            ValueError: the vocabulary lacks a byte of the text.
        """
        cut, tokens = self._cut[control], list[int]()
        for index, part in enumerate([text] if cut is None else cut.split(text)):
            tokens += [self._ids[part]] if index % 2 else self._plain(part)
        return tokens

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
            if text not in self._silent:
                texts.append(bytes(_BYTES[each] for each in text) if set(text) <= _BYTES.keys() else text.encode())
        return b"".join(texts)

    def _plain(self, text: str) -> list[int]:
        return [token for piece in self._pieces(text) for token in self._of_piece(piece)]

    def _pieces(self, text: str) -> Iterator[str]:
        """The pieces of a text, which are encoded one by one."""
        kinds, pattern = text.translate(_KINDS), self._pattern
        parts = re.finditer("N|[^N]+" if pattern.digits else "(?s:.+)", kinds)
        for start, end in (part.span() for part in parts):
            while start < end:
                found = pattern.contractions.match(text, start, end) or pattern.kinds.match(kinds, start, end)
                stop = found.end() if found else start + 1
                yield text[start:stop]
                start = stop

    def _merged(self, piece: str) -> tuple[int, ...]:
        """The tokens of a piece."""
        symbols = [_CHARACTERS[byte] for byte in piece.encode("utf-8", "replace")]
        if self._pattern.whole and (token := self._ids.get("".join(symbols))) is not None:
            return (token,)
        while len(symbols) > 1:
            ranks = (self._ranks.get(pair, len(self._ranks)) for pair in pairwise(symbols))
            rank, at = min(zip(ranks, count(), strict=False))
            if rank == len(self._ranks):
                break
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        try:
            return tuple(self._ids[symbol] for symbol in symbols)
        except KeyError as error:
            raise ValueError(f"the model's vocabulary has no token for {piece!r}") from error
