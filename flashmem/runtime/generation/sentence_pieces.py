"""SentencePiece's byte-pair encoding in plain Python, as Llama 2, Mistral, Phi-3 and Gemma use it.

Spaces are characters of the vocabulary, "▁". Of all neighbours whose join is a token, those with the highest score are joined
first (Kudo and Richardson 2018). What is no token then becomes the tokens of its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

_SPACE = "▁"


class SentencePieces:
    """The tokens of texts by scores. `ids` has no control tokens; `unknown` is for a byte that the vocabulary lacks."""

    def __init__(self, ids: Mapping[str, int], scores: Sequence[float], unknown: int | None) -> None:
        self._ids, self._scores, self._unknown = ids, scores, unknown

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`. Raises ValueError if the vocabulary lacks a byte of it, and has no token for that."""
        parts = self._joined(list(text.replace(" ", _SPACE)))
        return [token for part in parts for token in self._tokens(part)]

    @staticmethod
    def decode(token: str) -> bytes:
        """The bytes of a token that is not a byte, by its text in the vocabulary."""
        return token.replace(_SPACE, " ").encode()

    def _joined(self, parts: list[str]) -> list[str]:
        """Neighbours joined. `parts` is changed: a joined part becomes empty."""
        before, after = list(range(-1, len(parts) - 1)), list(range(1, len(parts) + 1))
        found = [each for at in range(len(parts) - 1) if (each := self._pair(parts, at, at + 1)) is not None]
        heapify(found)
        while found:
            _, left, right, text = heappop(found)
            if parts[left] + parts[right] != text or not parts[left] or after[left] != right:
                continue  # one of them was joined to another
            parts[left], parts[right] = text, ""
            after[left] = after[right]
            if after[left] < len(parts):
                before[after[left]] = left
            for pair in ((before[left], left), (left, after[left])):
                if pair[0] >= 0 and pair[1] < len(parts) and (new := self._pair(parts, *pair)) is not None:
                    heappush(found, new)
        return [part for part in parts if part]

    def _pair(self, parts: list[str], left: int, right: int) -> tuple[float, int, int, str] | None:
        """Two neighbours in the order of joining: the highest score, then the first; None if they are no token together."""
        text = parts[left] + parts[right]
        token = self._ids.get(text)
        return None if token is None else (-self._scores[token], left, right, text)

    def _tokens(self, part: str) -> list[int]:
        if (token := self._ids.get(part)) is not None:
            return [token]
        tokens = [self._ids.get(f"<0x{byte:02X}>", self._unknown) for byte in part.encode("utf-8", "replace")]
        known = [token for token in tokens if token is not None]
        if len(known) < len(tokens):
            raise ValueError(f"the model's vocabulary has no token for {part!r}")
        return known
