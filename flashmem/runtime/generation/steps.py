"""The runs after each token of a generation: of one token, or of several that were drafted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from time import perf_counter

from flashmem.bundle.language import CHECKED_TOKENS
from flashmem.runtime.generation.candidates import Candidates
from flashmem.runtime.generation.language_session import LanguageSession
from flashmem.runtime.generation.speculation import Drafter, Payoff


class Steps:
    """The runs after each token of a generation, some with drafts.

    `nbytes`: weights loaded for the last token; none for a drafted one. `drafted`: tokens of drafts, of which `accepted` were
    right.
    """

    def __init__(self, model: LanguageSession, drafters: Sequence[tuple[Drafter, Payoff]]) -> None:
        """`drafters`: of those that save time, by what was measured, the first that has a draft makes it."""
        self._model = model
        can = CHECKED_TOKENS in model.lengths
        self._sources = [*drafters] if can else []
        self._known = 0  # tokens that the drafters have
        self._waiting: list[tuple[int, Candidates]] = []  # drafted tokens that a run has read, and what follows each
        self._check: tuple[Payoff, float, int] | None = None  # whose draft, seconds of that run, and tokens that it has given
        self._checked: Payoff | None = None  # whose draft the last run checked
        self.nbytes = self.drafted = self.accepted = 0

    def after(self, token: int) -> Candidates:
        """The candidates after a chosen token."""
        if self._waiting and self._waiting[0][0] == token:
            assert self._check is not None
            source, spent, tokens = self._check
            self._check = source, spent, tokens + 1
            self.accepted += 1
            self.nbytes = 0
            self._model.cached.append(token)
            return self._waiting.pop(0)[1]
        self.finish()
        since, start = perf_counter(), len(self._model.cached)
        payoff, draft = self._draft(token)
        made = perf_counter()
        rows = self._model.run([token, *draft], start)
        seconds = perf_counter() - since
        self.nbytes = self._model.loaded()
        before, self._checked = self._checked, payoff
        if payoff is None:
            if before is not None:
                before.returned(perf_counter() - made)
                return rows[-1]
            for _, each in self._sources:
                each.single(perf_counter() - made)
            return rows[-1]
        del self._model.cached[start + 1 :]
        self._check, self.drafted = (payoff, seconds, 1), self.drafted + len(draft)
        self._waiting = list(zip(draft, rows[1:], strict=False))
        return rows[0]

    def finish(self) -> None:
        """Drop what is left of a draft, and learn from it."""
        if self._check is not None:
            payoff, seconds, tokens = self._check
            payoff.checked(seconds, tokens)
        self._check, self._waiting = None, []

    def _is_token(self, token: int) -> bool:
        return token < len(self._model.language.tokens)

    def _draft(self, token: int) -> tuple[Payoff | None, list[int]]:
        """Tokens that may follow, as many as a run checks, and what learns from them; nothing if that is not worth it."""
        cached = self._model.cached
        if len(cached) + CHECKED_TOKENS > self._model.language.max_length:
            return None, []
        new, self._known = [*cached[self._known :], token], len(cached) + 1
        for drafter, _ in self._sources:
            drafter.add(new)
        for drafter, payoff in self._sources:
            if payoff.allows() and (draft := [*takewhile(self._is_token, drafter.draft(CHECKED_TOKENS - 1))]):
                # A run reads as many in any case.
                return payoff, draft + draft[-1:] * (CHECKED_TOKENS - 1 - len(draft))
        return None, []
