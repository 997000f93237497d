"""The choice of the next token from logits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import RunError, UserError


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
    """Chooses tokens one after the other."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling, self._random = sampling, np.random.default_rng(sampling.seed)

    def choose(self, logits: NDArray[Any], seen: Iterable[int]) -> int:
        """The next token by `logits` [vocabulary], after the tokens `seen`.

        Raises:
            RunError: the logits are not numbers.
        """
        how, logits = self._sampling, logits.astype(np.float64)
        if not np.isfinite(logits.max()):
            raise RunError(
                "the model's logits are not numbers; its weights are damaged, or --precision fp16 is too small for it"
            )
        if how.repetition_penalty != 1:
            before = np.fromiter(set(seen), np.int64)
            scores = logits[before]
            logits[before] = np.where(scores > 0, scores / how.repetition_penalty, scores * how.repetition_penalty)
        if how.temperature == 0:
            return int(logits.argmax())
        order = np.argsort(-logits, kind="stable")[: how.top_k or None]
        weights = np.exp((logits[order] - logits[order[0]]) / how.temperature)
        weights /= weights.sum()
        kept = 1 + int(np.searchsorted(weights.cumsum(), how.top_p)) if how.top_p < 1 else len(weights)
        weights = weights[:kept] / weights[:kept].sum()
        return int(self._random.choice(order[:kept], p=weights))
