"""Byte-level byte-pair encoding in plain Python, equal to that of the library `tokenizers`.

A text is cut into pieces, and the bytes of each piece are characters of the vocabulary. The neighbours whose merge comes first
in the list are joined until none is left (Radford et al. 2019, GPT-2; Sennrich et al. 2016).
"""

from __future__ import annotations

import re
import reprlib
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from flashmem.bundle.language import Pattern
from flashmem.runtime.generation.joining import joined

_CACHED_PIECES = 1 << 15
_CACHED_LENGTH = 32
"""So many pieces are kept with their tokens, none with more characters."""

_KNOWN_CHARACTERS = 1 << 16

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
        character = chr(code)
        category = unicodedata.category(chr(code))[0]
        if category in "LN":
            kind = category
        elif not character.isspace() or character in _NO_SPACE:
            kind = "O"
        else:
            kind = " " if character == " " else "R" if character in "\r\n" else "S"
        if len(self) < _KNOWN_CHARACTERS:
            self[code] = kind
        return kind


_KINDS = _Kinds()


class BytePairs:
    """The tokens of texts by merges of byte pairs."""

    def __init__(self, ids: Mapping[str, int], merges: Sequence[str], pattern: Pattern) -> None:
        self._ids = ids
        self._pattern = pattern
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self._cached = lru_cache(_CACHED_PIECES)(self._merged)

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`. Raises ValueError if the vocabulary lacks a byte of it."""
        tokens = list[int]()
        for piece in self._pieces(text):
            tokens += self._cached(piece) if len(piece) <= _CACHED_LENGTH else self._merged(piece)
        return tokens

    @staticmethod
    def decode(token: str) -> bytes:
        """The bytes of a token, by its text in the vocabulary."""
        return bytes(_BYTES[each] for each in token) if set(token) <= _BYTES.keys() else token.encode()

    def _pieces(self, text: str) -> Iterator[str]:
        """The pieces of a text, which are encoded one by one."""
        kinds = text.translate(_KINDS)
        pattern = self._pattern
        parts = re.finditer("N|[^N]+" if pattern.digits else "(?s:.+)", kinds)
        for start, end in (part.span() for part in parts):
            while start < end:
                found = pattern.contractions.match(text, start, end) or pattern.kinds.match(kinds, start, end)
                stop = found.end() if found else start + 1
                yield text[start:stop]
                start = stop

    def _rank(self, left: str, right: str) -> int | None:
        return self._ranks.get((left, right))

    def _merged(self, piece: str) -> tuple[int, ...]:
        """The tokens of a piece."""
        symbols = [_CHARACTERS[byte] for byte in piece.encode("utf-8", "replace")]
        if self._pattern.whole and (token := self._ids.get("".join(symbols))) is not None:
            return (token,)
        try:
            return tuple(self._ids[symbol] for symbol in joined(symbols, self._rank))
        except KeyError as error:
            raise ValueError(f"the model's vocabulary has no token for {reprlib.repr(piece)}") from error
