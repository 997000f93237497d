"""Texts that end a generation: what may become one of them is held back."""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """Holds back text that may become one of the stop texts."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self.found = [stop for stop in stops if stop], "", False

    def passed(self, text: str) -> str:
        """The text that can be shown after `text` is there too."""
        held = self._held + text
        ends = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return held[: min(ends)]
        kept = max((size for stop in self._stops for size in range(1, len(stop)) if held.endswith(stop[:size])), default=0)
        self._held = held[len(held) - kept :]
        return held[: len(held) - kept]

    def rest(self, text: str) -> str:
        """What is left at the end."""
        return "" if self.found else self._held + text
