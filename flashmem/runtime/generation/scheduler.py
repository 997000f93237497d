"""Which texts the next run continues. Each has a row of the model's cache, and texts join and leave between two runs."""

from __future__ import annotations

from collections import deque
from time import perf_counter

from flashmem.base.errors import RunError
from flashmem.runtime.generation.candidates import Candidates
from flashmem.runtime.generation.generated_text import GeneratedText
from flashmem.runtime.generation.language_session import LanguageSession, RowPart


class Scheduler:
    """Continues texts run by run: in several rows, or one after the other in a single one.

    A text that waits takes the row whose cache begins in the same way, and reads only the rest of its prompt. While some rows
    read prompts and others do not, both take turns. For one thread at a time; `admit` and `step` may have others in between.
    """

    def __init__(self, model: LanguageSession, bytes_beside: int = 0) -> None:
        """`bytes_beside`: what the budget counts beside the model."""
        self._model = model
        self._bytes_beside = bytes_beside
        self._waiting = deque[GeneratedText]()
        self._rows: list[GeneratedText | None] = [None] * len(model.cached)
        self._length = 1  # tokens that the last run read in a row

    def add(self, text: GeneratedText) -> None:
        """A text that begins when a row is free, after all before it."""
        self._waiting.append(text)

    def admit(self) -> bool:
        """Take rows from texts that were cancelled, and give them to those that wait; returns whether a text has a row."""
        for row, text in enumerate(self._rows):
            if text is not None and text.is_cancelled:
                self._free(row)
        self._waiting = deque(text for text in self._waiting if not text.is_cancelled)
        free = [row for row, text in enumerate(self._rows) if text is None]
        while free and self._waiting:
            text = self._waiting.popleft()
            reusable = {row: self._model.reusable(row, text.tokens) for row in free}
            row = max(free, key=lambda each: (reusable[each], -len(self._model.cached[each])))
            text.reused = reusable[row]
            del self._model.cached[row][text.reused :]
            self._rows[row] = text
            free.remove(row)
        return any(self._rows)

    def step(self) -> None:
        """One run for the texts that have rows, and the tokens that follow.

        Raises:
            RunError: the run failed; the session is closed.
        """
        parts = {row: self._next_part(row, text) for row, text in enumerate(self._rows) if text is not None}
        lengths = {len(part.tokens) for part in parts.values()}
        self._length = min(lengths) if self._length > 1 else max(lengths)
        since = perf_counter()
        found = self._model.run({row: part for row, part in parts.items() if len(part.tokens) == self._length})
        seconds = perf_counter() - since
        for row, candidates in found.items():
            self._follow(row, candidates, seconds)

    def end_all(self, error: Exception) -> None:
        """End all texts with an error."""
        for text in (*self._rows, *self._waiting):
            if text is not None:
                text.fail(error)
        self._rows = [None] * len(self._rows)
        self._waiting.clear()
        for cached in self._model.cached:
            cached.clear()

    def _next_part(self, row: int, text: GeneratedText) -> RowPart:
        text.draft = text.drafts.propose(text.tokens) if text.drafts is not None and text.count else []
        start, tokens = self._model.next_part(row, text.tokens)
        return RowPart(start, tokens + text.draft, text.summed_at)

    def _follow(self, row: int, candidates: list[Candidates], seconds: float) -> None:
        """The tokens of a text after a run: none within its prompt, else one, and those of a draft while it is right."""
        text = self._rows[row]
        run = self._model.session.last_run
        assert text is not None and run is not None
        read = len(text.tokens)
        is_later = text.count > 0
        accepted = 0
        if len(self._model.cached[row]) < read:
            return
        after = candidates[-1 - len(text.draft) :]
        text.peak_bytes = run.memory.peak_bytes + self._bytes_beside
        try:
            text.follow(after[0], run.loaded_bytes)
            while accepted < len(text.draft) and not text.is_over and text.tokens[-1] == text.draft[accepted]:
                accepted += 1
                text.follow(after[accepted], 0)
        except RunError as error:
            text.fail(error)
        del self._model.cached[row][read + accepted :]
        text.drafted += len(text.draft)
        text.accepted += accepted
        if text.drafts is not None and is_later:
            text.drafts.learn(seconds, 1 + accepted)
        if text.is_over or text.is_cancelled:
            self._free(row)

    def _free(self, row: int) -> None:
        text = self._rows[row]
        assert text is not None
        self._rows[row] = None
        self._model.leave(row, text.prompt)
