"""SentencePiece's byte-pair encoding in plain Python, as Llama 2, Mistral, Phi-3 and Gemma use it.

Spaces are characters of the vocabulary, "▁". Of all neighbours whose join is a token, those with the highest score are joined
first (Kudo and Richardson 2018). What is no token then becomes the tokens of its bytes.
"""

from __future__ import annotations

import reprlib
from array import array
from collections.abc import Mapping, Sequence

from flashmem.runtime.generation.joining import joined

_SPACE = "▁"


class SentencePieces:
    """The tokens of texts by scores. `ids` has no control tokens; `unknown` is for a byte that the vocabulary lacks."""

    def __init__(self, ids: Mapping[str, int], scores: Sequence[float], unknown: int | None) -> None:
        self._ids = ids
        self._unknown = unknown
        order = {score: rank for rank, score in enumerate(sorted(set(scores), reverse=True))}
        self._ranks = array("q", (order[score] for score in scores))

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`. Raises ValueError if the vocabulary lacks a byte of it, and has no token for that."""
        parts = joined(list(text.replace(" ", _SPACE)), self._rank)
        return [token for part in parts for token in self._tokens(part)]

    @staticmethod
    def decode(token: str) -> bytes:
        """The bytes of a token that is not a byte, by its text in the vocabulary."""
        return token.replace(_SPACE, " ").encode()

    def _rank(self, left: str, right: str) -> int | None:
        """The place of the score that the join of two parts has; None if it is no token."""
        number = self._ids.get(left + right)
        return None if number is None else self._ranks[number]

    def _tokens(self, part: str) -> list[int]:
        if (token := self._ids.get(part)) is not None:
            return [token]
        tokens = [self._ids.get(f"<0x{byte:02X}>", self._unknown) for byte in part.encode("utf-8", "replace")]
        known = [token for token in tokens if token is not None]
        if len(known) < len(tokens):
            raise ValueError(f"the model's vocabulary has no token for {reprlib.repr(part)}")
        return known
