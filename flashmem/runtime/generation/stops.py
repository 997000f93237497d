"""Texts that end a generation: what may become one of them is held back."""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """Holds back text that may become one of the stop texts."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [_Stop(stop) for stop in dict.fromkeys(stops) if stop]
        self._held = ""
        self.found = False

    def passed(self, text: str) -> str:
        """The text that can be shown after `text` is there too."""
        held = self._held + text
        known = len(self._held)
        begins = [known + at for stop in self._stops if (at := stop.begin_in(text)) is not None]
        if begins:
            self.found = True
            self._held = ""
            return held[: min(begins)]
        kept = max((stop.matched for stop in self._stops), default=0)
        self._held = held[len(held) - kept :]
        return held[: len(held) - kept]

    def rest(self, text: str) -> str:
        """What is left at the end."""
        return "" if self.found else self._held + text


class _Stop:
    """One stop text, looked for in a text that comes in pieces, each character once (Knuth, Morris and Pratt 1977).

    `matched`: so many of its first characters are the last ones of the text, and not all of it.
    """

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self.matched = 0
        self._shorter = [0]  # by what is matched, less 1: the longest shorter match with the same end
        for character in stop[1:]:
            self._shorter.append(self._longer(self._shorter[-1], character))

    def begin_in(self, text: str) -> int | None:
        """Where the stop text begins, counted from the begin of the next piece `text`; None if it is not found by its end."""
        for at, character in enumerate(text, start=1):
            self.matched = self._longer(self.matched, character)
            if self.matched == len(self._stop):
                return at - self.matched
        return None

    def _longer(self, matched: int, character: str) -> int:
        """What is matched after a further character."""
        while matched and self._stop[matched] != character:
            matched = self._shorter[matched - 1]
        return matched + (self._stop[matched] == character)
