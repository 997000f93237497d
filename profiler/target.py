"""Measurement targets as data: launches with their kernels, and bundles to open.

They are made where the compiler is available (`cases.py`); a phone reads them from a kit (`kit.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray

from flashmem.base.types import TransferMode
from flashmem.program.kernel_text import Source
from flashmem.program.launches import Launch
from flashmem.program.program import Program

T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """One launch to measure. `operator` is the ONNX type of its main node."""

    origin: str  # `SAMPLE`, or the model's name
    case: str
    operator: str
    launch: Launch
    program: Program
    source: Source
    constants: NDArray[Any] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Openings:
    """Bundles to open: `one` has one kernel and layer, `kernels` that many kernels, `layers` that many equal layers."""

    bundles: Mapping[str, Path]
    kernels: int
    layers: int


class Supply(Protocol):
    """Source of the targets of one memory path. `count`: of sampled ones; None if they are unlimited."""

    @property
    def count(self) -> int | None:
        """Number of sampled launches."""
        ...

    def matmul(self, rows: int, depth: int, columns: int) -> Target:
        """The first slice of a plain product."""
        ...

    def elementwise(self, size: int) -> Target:
        """A sum of two activations of `size` elements."""
        ...

    def sampled(self, index: int, seed: int) -> Target | None:
        """A sampled launch; None if the draw gave none."""
        ...

    def openings(self, folder: Path, mode: TransferMode) -> Openings:
        """Bundles to open, in `folder`."""
        ...


class Draw:
    """One point of a low-discrepancy sequence, one coordinate at a time.

    The additive recurrence of M. Roberts ("The unreasonable effectiveness of quasirandom sequences", 2018): powers of the
    generalised golden ratio of 8 dimensions. Few cases need later coordinates, which repeat with other offsets.
    """

    _DIMENSIONS = 8
    _PHI = 1.0850702465535  # the positive root of x**9 = x + 1

    def __init__(self, index: int, seed: int) -> None:
        self._index = index
        self._seed = seed
        self._next = 0

    def unit(self) -> float:
        """A number in [0, 1)."""
        power = self._next % self._DIMENSIONS + 1
        offset = 0.5 + 0.6180339887 * (self._seed + self._next // self._DIMENSIONS * 7)
        self._next += 1
        return (offset + self._index * self._PHI**-power) % 1.0

    def pick(self, options: Sequence[T]) -> T:
        """One of `options`."""
        return options[int(self.unit() * len(options))]

    def size(self, low: int, high: int, multiple: int = 1) -> int:
        """A number between `low` and `high`, uniform in its logarithm, rounded to a multiple."""
        return max(multiple, round(low * math.pow(high / low, self.unit()) / multiple) * multiple)
