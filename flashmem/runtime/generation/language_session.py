"""A session of a language model, and the tokens in its cache: reads further tokens, and gives candidates for the next one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from flashmem.base.errors import UserError
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.language import CANDIDATES, IDS, LOGITS, TEMPERATURE, TOTAL, Language
from flashmem.program.program import Program
from flashmem.request.opening import SessionRequest
from flashmem.runtime.generation.candidates import Candidates, rows_of
from flashmem.runtime.request.models import bundle_for
from flashmem.runtime.session import Session

_FEW = 4
"""So many last tokens of a prompt are read one by one, and more in a run that reads others again."""


class LanguageSession:
    """A language model on a device. A context manager; not for several threads at once.

    `cached`: the tokens in its cache. `temperature`: of the sums in candidates, a normal float32 above 0.
    """

    def __init__(self, bundle: Bundle | str | Path, opening: SessionRequest) -> None:
        """Open a session.

        Raises:
            UserError: no bundle, or one of another model; and the errors of `Session`.
            RunError: the device refuses.
        """
        self.bundle = bundle_for(bundle, opening, build=True)
        self.language = language_of(self.bundle)
        if (rows := rows_in(self.bundle)) > 1:
            raise UserError(
                f"{self.bundle.path} answers {rows} requests at a time; open it with flashmem.BatchGenerator or flashmem "
                "serve, or compile the model without --batch"
            )
        self.cached: list[int] = []
        self.temperature = 1.0
        self.lengths = sorted((_tokens(each.program)[1] for each in self.bundle.variants), reverse=True)
        """Tokens that a run can read, the most first."""
        self.session = Session(self.bundle, **opening.of_session)

    def reusable(self, tokens: Sequence[int]) -> int:
        """How many tokens of a text are in the cache; the last one is read anyway, for what follows it."""
        return shared_prefix(tokens[:-1], self.cached)

    def read(self, tokens: list[int], at: int) -> Candidates:
        """Read a text from token `at` on, in runs as long as the variants permit; returns the candidates after the last token.

        The last run of several tokens may begin earlier, and read some again.
        """
        while True:
            rest = len(tokens) - at
            length = next(each for each in self.lengths if each <= rest)
            if rest > _FEW:  # the shortest run with all of them, or the longest one
                able = [each for each in self.lengths if each <= len(tokens)]
                length = min((each for each in able if each >= rest), default=able[0])
            start = min(at, len(tokens) - length)
            rows = self.run(tokens[start : start + length], start)
            at = start + length
            if at == len(tokens):
                return rows[-1]

    def run(self, tokens: list[int], start: int) -> list[Candidates]:
        """Run the model on tokens at positions from `start` on; returns the candidates after the last ones."""
        del self.cached[start:]
        given = {IDS: np.array([tokens], np.int64), TOTAL: np.array(start + len(tokens), np.int32)}
        temperature = np.array(self.temperature, np.float32)
        [candidates] = self.session.run([CANDIDATES], {**given, TEMPERATURE: temperature})
        self.cached += tokens
        temperatures = [self.temperature] * len(candidates[0])
        return rows_of(candidates[0], temperatures, cache(lambda: self.session.outputs(LOGITS)[LOGITS][0]))

    def loaded(self) -> int:
        """Bytes of weights that the last run loaded."""
        run = self.session.last_run
        return run.loaded_bytes if run is not None else 0

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
    return _tokens(bundle.program)[0]


def _tokens(program: Program) -> tuple[int, ...]:
    """The shape of the tokens that a run of `program` reads."""
    [ids] = [port for port in program.inputs if port.name == IDS]
    return ids.shape
