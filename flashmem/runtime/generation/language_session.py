"""A session of a language model, and the tokens in the rows of its cache: runs of some rows, and the candidates after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from flashmem.base.errors import UserError
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.language import BATCH_TOKENS, CANDIDATES, IDS, LOGITS, TEMPERATURE, TOTAL, Language
from flashmem.program.program import Program
from flashmem.request.opening import SessionRequest
from flashmem.runtime.generation.candidates import Array, Candidates, rows_of
from flashmem.runtime.session import Session

_FEW = 4
"""So many last tokens of a prompt are read one by one, and more in a run that reads others again. In a batch only one is."""


class RowPart(NamedTuple):
    """What a run reads in a row: tokens from the position `start` on; `temperature`: of the sums in candidates, above 0."""

    start: int
    tokens: list[int]
    temperature: float = 1.0


class LanguageSession:
    """A language model on a device. A context manager; not for several threads at once.

    A run reads as many tokens in each row of the cache. A row that takes no part in it reads tokens that mean nothing, at
    places behind its own, which it overwrites before it sees them. So what a row computes does not depend on the others.

    Attributes:
        cached: the tokens in the cache of each row.
        lengths: tokens that a run can read in a row, the most first.
    """

    def __init__(self, bundle: Bundle, opening: SessionRequest) -> None:
        """Open a session.

        Raises:
            UserError: no language model; and the errors of `Session`.
            RunError: the device refuses.
        """
        self.bundle = bundle
        self.language = language_of(bundle)
        rows = rows_in(bundle)
        self.cached: list[list[int]] = [[] for _ in range(rows)]
        self.lengths = sorted((_shape(each.program, IDS)[1] for each in bundle.variants), reverse=True)
        self._is_batch = rows > 1
        self._of_rows = _shape(bundle.program, TOTAL)
        self.session = Session(bundle, **opening.of_session)

    def reusable(self, row: int, tokens: Sequence[int]) -> int:
        """How many tokens of a text need not be read in a row; the last one is read anyway, for what follows it.

        In a batch these are whole runs, so that its text is that of a row which reads all.
        """
        shared = shared_prefix(tokens[:-1], self.cached[row])
        return shared // BATCH_TOKENS * BATCH_TOKENS if self._is_batch else shared

    def leave(self, row: int, prompt: int) -> None:
        """A text with a `prompt` of so many tokens leaves a row.

        In a batch it keeps what runs from a multiple of `BATCH_TOKENS` on have read, and no later run: the last one of a prompt
        reads some tokens of the one before again, and generated tokens were read one by one.
        """
        if self._is_batch:
            rest = prompt % BATCH_TOKENS
            whole = prompt - rest - (BATCH_TOKENS if rest > 1 else 0)
            del self.cached[row][max(0, whole) :]

    def next_part(self, row: int, tokens: list[int]) -> tuple[int, list[int]]:
        """What the next run reads of a text, whose first tokens are in the cache of `row`: the place of the first, and those.

        It is as long as the variants permit. The last run of several tokens may begin earlier, and read some again.
        """
        at = len(self.cached[row])
        rest = len(tokens) - at
        length = next(each for each in self.lengths if each <= rest)
        if rest > (1 if self._is_batch else _FEW):  # the shortest run with all of them, or the longest one
            able = [each for each in self.lengths if each <= len(tokens)]
            length = min((each for each in able if each >= rest), default=able[0])
        start = min(at, len(tokens) - length)
        return start, tokens[start : start + length]

    def run(self, parts: Mapping[int, RowPart]) -> dict[int, list[Candidates]]:
        """Read as many tokens in some rows; returns the candidates after the last ones of each.

        Raises:
            RunError: the run failed; the session is closed.
        """
        length = len(next(iter(parts.values())).tokens)
        ids = np.zeros((len(self.cached), length), np.int64)
        totals = np.array([len(each) + length for each in self.cached], np.int32)
        temperatures = np.ones(len(self.cached), np.float32)
        for row, part in parts.items():
            del self.cached[row][part.start :]
            ids[row] = part.tokens
            totals[row] = part.start + length
            temperatures[row] = part.temperature
        given = {IDS: ids, TOTAL: totals.reshape(self._of_rows), TEMPERATURE: temperatures.reshape(self._of_rows)}
        [output] = self.session.run([CANDIDATES], given)
        logits = cache(lambda: self.session.outputs(LOGITS)[LOGITS])

        def logits_in(row: int) -> Array:
            found: Array = logits()[row]
            return found

        for row, part in parts.items():
            self.cached[row] += part.tokens
        return {row: rows_of(output[row], part.temperature, partial(logits_in, row)) for row, part in parts.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.session.close()


def shared_prefix(tokens: Sequence[int], cached: Sequence[int]) -> int:
    """How many of the first tokens of both are equal."""
    pairs = zip(tokens, cached, strict=False)
    return next((at for at, (new, old) in enumerate(pairs) if new != old), min(len(tokens), len(cached)))


def language_of(bundle: Bundle) -> Language:
    """The language part of `bundle`. Raises UserError if it has none."""
    language = bundle.language()
    if language is None:
        raise UserError(
            f"{bundle.path} has no tokenizer; compile a language model from a .gguf file, or from a folder with a "
            "tokenizer.json"
        )
    return language


def rows_in(bundle: Bundle) -> int:
    """The requests that a run of `bundle` answers."""
    return _shape(bundle.program, IDS)[0]


def _shape(program: Program, name: str) -> tuple[int, ...]:
    """The shape of an input of `program`."""
    return next(port.shape for port in program.inputs if port.name == name)
