"""Speculation: drafts of several tokens, checked in one run. Prompt lookup drafts what followed where a text repeats itself.

A summary, a translation of code or a list repeats parts of what was read. A run that reads a draft gives the logits after each
of its tokens, and the sampler chooses from these as it would have from a run for each. Where it chooses another token than the
draft's, the rest of the draft is dropped. So drafts change how long an answer takes, but not how it is chosen.

Prompt lookup: https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from time import perf_counter
from typing import Protocol

from flashmem.bundle.language import CHECKED_TOKENS, Language

_SIZES = (3, 2)
"""So many last tokens must have occurred before, the more the better."""

_PAUSES = (8, 64)
"""The fewest tokens without a draft after one that did not pay: at first, and after several."""

_SHARE = 0.05
"""The most that drafts may cost where they do not pay, as a share of the time."""

_MEMORY = 0.7
"""The weight of what was measured before the last run."""


class Drafter(Protocol):
    """Something that drafts the continuation of a text."""

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""

    def draft(self, most: int) -> list[int]:
        """At most `most` tokens that may follow the text; none without an idea."""


class Lookup:
    """Finds what followed the last tokens of a text where they occurred before."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # by last tokens: the position after their last occurrence

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            for size in _SIZES:
                if len(self._tokens) >= size:
                    self._after[tuple(self._tokens[-size:])] = len(self._tokens)
            self._tokens.append(token)

    def draft(self, most: int) -> list[int]:
        """At most `most` tokens that may follow the text; none if its last tokens are new."""
        for size in _SIZES:
            at = self._after.get(tuple(self._tokens[-size:]))
            if at is not None and len(self._tokens) >= size:
                return self._tokens[at : at + most]
        return []


class Payoff:
    """Decides by what was measured whether drafts save time."""

    def __init__(self) -> None:
        self._single = self._check = 0.0  # seconds of a run for one token, and of one that checks a draft
        self._tokens = 0.0  # that a run with a draft gives
        self._return = 0.0  # what the first run after it takes longer than others
        self._pause = _PAUSES[0]
        self._left = 0

    def allows(self) -> bool:
        """Whether the next run shall check a draft; the time of a run for one token must be known."""
        if self._left:
            self._left -= 1
        return self._single > 0 and not self._left

    def single(self, seconds: float) -> None:
        """A run for one token took so long."""
        self._single = _mixed(self._single, seconds)

    def checked(self, seconds: float, tokens: int) -> None:
        """A run that checked a draft took so long, and gave so many tokens."""
        self._check = _mixed(self._check, seconds)
        self._tokens = _mixed(self._tokens, tokens)
        if self._tokens * self._single >= self._check + self._return:
            self._pause = _PAUSES[0]
        else:
            self._left = max(self._pause, self._tokens_for(seconds - tokens * self._single))
            self._pause = min(2 * self._pause, _PAUSES[1])

    def returned(self, seconds: float) -> None:
        """The first run for one token after a draft took so long: a session may load weights again that it had kept."""
        extra = max(0.0, seconds - self._single)
        self._return = _mixed(self._return, extra)
        if self._left:
            self._left += self._tokens_for(extra)

    def _tokens_for(self, lost: float) -> int:
        """Tokens without a draft, in the time of which the seconds lost are a small share; 0 if their time is not known."""
        return math.ceil(lost / (_SHARE * self._single)) if self._single else 0


def _mixed(before: float, now: float) -> float:
    return _MEMORY * before + (1 - _MEMORY) * now if before else now


class Drafts:
    """The drafts of one text, by drafters that share what they have measured with those of other texts."""

    def __init__(self, language: Language, sources: Sequence[tuple[Drafter, Payoff]]) -> None:
        """`sources`: of those that save time, by what was measured, the first that has a draft makes it."""
        self._language = language
        self._sources = sources
        self._known = 0  # tokens that the drafters have
        self._payoff: Payoff | None = None  # whose draft the last run checked
        self._before: Payoff | None = None  # and the one before
        self._seconds = 0.0  # that the draft took

    def propose(self, tokens: Sequence[int]) -> list[int]:
        """Tokens that may follow a text, as many as a run checks beside its last one; none if that is not worth it."""
        since = perf_counter()
        self._before = self._payoff
        self._payoff = None
        draft = list[int]()
        if len(tokens) - 1 + CHECKED_TOKENS <= self._language.max_length:
            self._payoff, draft = self._made(tokens)
        self._seconds = perf_counter() - since
        return draft

    def learn(self, seconds: float, tokens: int) -> None:
        """The run after `propose` took so long, and gave so many tokens."""
        if self._payoff is not None:
            self._payoff.checked(self._seconds + seconds, tokens)
        elif self._before is not None:
            self._before.returned(seconds)
        else:
            for _, payoff in self._sources:
                payoff.single(seconds)

    def _made(self, tokens: Sequence[int]) -> tuple[Payoff | None, list[int]]:
        new = tokens[self._known :]
        self._known = len(tokens)
        for drafter, _ in self._sources:
            drafter.add(new)
        for drafter, payoff in self._sources:
            if payoff.allows() and (draft := [*takewhile(self._is_token, drafter.draft(CHECKED_TOKENS - 1))]):
                # A run reads as many in any case.
                return payoff, draft + draft[-1:] * (CHECKED_TOKENS - 1 - len(draft))
        return None, []

    def _is_token(self, token: int) -> bool:
        return token < len(self._language.tokens)
