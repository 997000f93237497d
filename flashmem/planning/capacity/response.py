"""Operator classes learned from the measured response to streaming, compared with those of the paper's Table 5.

An operator type's *tolerance* is the amount of streamed bytes, relative to the kernel's own input, at which its latency has
grown by 20 %. This is the marker in the paper's Figure 2. Table 5 orders the classes by tolerance: reusable operators tolerate
most, elemental ones less, hierarchical ones least. So the types of one device are cut into three groups at the widest gaps
between their tolerances, by least squares over logarithms (Fisher's natural breaks).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median
from typing import Final

from flashmem.base.types import OperatorClass

MARKER: Final = 0.20
"""The slowdown that defines tolerance."""

_ORDER: Final[tuple[OperatorClass, ...]] = ("hierarchical", "elemental", "reusable")  # from least tolerance to most
_LEAST: Final = 1e-3


@dataclass(frozen=True)
class LearnedClass:
    """One operator type: its median tolerance over `launches`, the class learned from it and the paper's."""

    operator: str
    tolerance: float
    launches: int
    learned: OperatorClass
    paper: OperatorClass

    @property
    def agrees(self) -> bool:
        """Whether both classes are the same."""
        return self.learned == self.paper


def learn_classes(tolerances: Mapping[str, Sequence[float]], paper: Mapping[str, OperatorClass]) -> list[LearnedClass]:
    """The class of each operator type from the tolerances of its launches, sorted by falling tolerance.

    `paper`: the class of each type in Table 5, which its launches have.

    Fewer than three types of different tolerance cannot be cut: all are called reusable.
    """
    typical = {operator: median(values) for operator, values in tolerances.items() if values}
    ordered = sorted(typical, key=typical.__getitem__)
    classes = _cut([math.log(max(typical[operator], _LEAST)) for operator in ordered])
    found = [
        LearnedClass(operator, typical[operator], len(tolerances[operator]), kind, paper[operator])
        for operator, kind in zip(ordered, classes, strict=True)
    ]
    return found[::-1]


def _cut(values: Sequence[float]) -> list[OperatorClass]:
    """Classes of ascending `values`: the two cuts with the least squared distance to the groups' means."""
    if len(set(values)) < len(_ORDER):
        return [_ORDER[-1]] * len(values)
    best = min(combinations(range(1, len(values)), 2), key=lambda cuts: _scatter(values, (0, *cuts, len(values))))
    return [_ORDER[sum(i >= cut for cut in best)] for i in range(len(values))]


def _scatter(values: Sequence[float], bounds: Sequence[int]) -> float:
    total = 0.0
    for first, end in pairwise(bounds):
        part = values[first:end]
        mean = sum(part) / len(part)
        total += sum((value - mean) ** 2 for value in part)
    return total
