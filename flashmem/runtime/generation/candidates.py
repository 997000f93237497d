"""What a run says about the next token: the tokens of the largest logits, and all logits where these are not enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Candidates:
    """The output candidates of a language model (`flashmem.bundle.language`) after one token.

    Attributes:
        tokens: those of the largest logits, in order.
        logits: their logits in float32.
        total: the sum of exp((logit - the largest) / temperature) over all logits, up to a relative error of `SUM_ERROR`; NaN
            or 0 if the logits are not numbers.
        temperature: of that sum.
        read: returns all logits [vocabulary] in float32; until the next run.
    """

    tokens: Array
    logits: Array
    total: float
    temperature: float
    read: Callable[[], Array]


def rows_of(output: Array, temperature: float, read: Callable[[], Array]) -> list[Candidates]:
    """The candidates in the rows of `output`, int32 [rows, 2 k + 1], whose sums have this temperature.

    `read` returns all logits [rows, vocabulary].
    """
    kept = output.shape[1] // 2

    def row(number: int) -> Candidates:
        numbers = output[number, kept:].view(np.float32)
        return Candidates(output[number, :kept], numbers[:-1], float(numbers[-1]), temperature, lambda: read()[number])

    return [row(number) for number in range(len(output))]
