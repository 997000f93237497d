"""The choice of the next token: from candidates where these decide, else from all logits, with the same result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import RunError, UserError
from flashmem.bundle.language import SUM_ERROR
from flashmem.runtime.generation.candidates import Candidates

Array = NDArray[Any]

_NORMAL = 1e-30, 1e30
"""Temperatures at which a device sums exponentials."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Temperature 0 takes the likeliest token.

    `top_k`: among so many likeliest tokens; 0 for all. `top_p`: among the fewest tokens whose probabilities reach this sum
    (Holtzman et al. 2020). `repetition_penalty`: positive logits of tokens that occurred are divided by it, negative ones
    multiplied (Keskar et al. 2019); 1 changes nothing. Equal seeds choose equally.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raise UserError for a number that is out of range."""
        ranges = (
            ("temperature", self.temperature, 0 <= self.temperature < np.inf, "0 or more"),
            ("top_k", self.top_k, self.top_k >= 0, "0 or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0, and 1 at most"),
            ("repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty < np.inf, "above 0"),
            ("seed", self.seed, self.seed is None or self.seed >= 0, "0 or more"),
        )
        for name, value, right, meant in ranges:
            if not right:
                raise UserError(f"{name} {value} is not possible; give a number that is {meant}")


class Sampler:
    """Chooses tokens one after the other. `summed_at`: the temperature at which the candidates' sums are useful."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._random = np.random.default_rng(sampling.seed)
        least, most = _NORMAL
        self.summed_at = sampling.temperature if least <= sampling.temperature <= most else 1.0

    def choose(self, candidates: Candidates, seen: Iterable[int]) -> int:
        """The next token by `candidates`, after the tokens `seen`.

        Raises:
            RunError: the logits are not numbers; or all of them were read, and that failed.
        """
        how = self._sampling
        if not 0 < candidates.total < np.inf:
            raise RunError(
                "the model's logits are not numbers; its weights are damaged, or --precision fp16 is too small for it"
            )
        if how.repetition_penalty != 1:
            return self._among_all(self._penalised(candidates.read().astype(np.float64), seen), None)
        if how.temperature == 0:
            return int(candidates.tokens[0])
        draw = self._random.random()
        found = self._among(candidates, draw)
        return self._among_all(candidates.read().astype(np.float64), draw) if found is None else found

    def _penalised(self, logits: Array, seen: Iterable[int]) -> Array:
        penalty = self._sampling.repetition_penalty
        before = np.fromiter(set(seen), np.int64)
        scores = logits[before]
        logits[before] = np.where(scores > 0, scores / penalty, scores * penalty)
        return logits

    def _among(self, candidates: Candidates, draw: float) -> int | None:
        """The choice for a number `draw` from 0 to 1, exclusive; None if others than the candidates may be chosen.

        Without `top_k`, all tokens count. Their sum has an error, and the choice must be the same at both ends of its range.
        """
        how = self._sampling
        kept = len(candidates.tokens)
        if 0 < how.top_k <= kept:
            sums = self._sums(candidates.logits[: how.top_k].astype(np.float64))
            totals = [float(sums[-1])]
        elif how.top_k or abs(candidates.temperature - how.temperature) > 1e-6 * how.temperature:
            return None
        else:
            sums = self._sums(candidates.logits.astype(np.float64))
            totals = [candidates.total * (1 - SUM_ERROR), candidates.total * (1 + SUM_ERROR)]
        places = {self._place(sums, total, draw) for total in totals}
        place = places.pop()
        return None if places or place == len(sums) else int(candidates.tokens[place])

    def _among_all(self, logits: Array, draw: float | None) -> int:
        """The choice from all `logits` [vocabulary]; draws a number if it needs one and none is given."""
        if self._sampling.temperature == 0:
            return int(logits.argmax())
        order = np.argsort(-logits, kind="stable")[: self._sampling.top_k or None]
        sums = self._sums(logits[order])
        place = self._place(sums, float(sums[-1]), self._random.random() if draw is None else draw)
        return int(order[place])

    def _sums(self, logits: Array) -> Array:
        """The sum of the weights up to each of `logits`, the largest first."""
        sums: Array = np.exp((logits - logits[0]) / self._sampling.temperature).cumsum()
        return sums

    def _place(self, sums: Array, total: float, draw: float) -> int:
        """The place of the choice, where all weights have the sum `total`; the number of `sums` if it is behind them."""
        top_p = self._sampling.top_p
        if top_p == 1:
            return int(np.searchsorted(sums, draw * total, side="right"))
        last = int(np.searchsorted(sums, top_p * total))
        return int(np.searchsorted(sums[: last + 1], draw * sums[last], side="right")) if last < len(sums) else last
