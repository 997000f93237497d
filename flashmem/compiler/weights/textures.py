"""Texture layout of packed weights: the panels of each texture and its height, with little padding of aligned rows.

Devices that make an image of a buffer require its rows to start at multiples of an alignment, 64 texels on phones. An image of
a few panels is then mostly padding. But its height is free: rows beyond the height continue to the right (a *fold*). If the
number of folds makes its width a multiple of the alignment, nothing is wasted. On such devices, images of all weights also get
the same few heights, `BLOCK` and its doubles. So slices of different weights can occupy one texture in turn.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

GOOD = 0.01
"""Images whose padding is at most this fraction of their elements are equally good."""

BLOCK = 64
"""The most rows that a kernel reads before it computes a new position, or up to the end of a fold."""

_Whole = TypeVar("_Whole", int, NDArray[np.int64])
_Numbers = NDArray[np.int64]

_FOLDS = 256
"""Numbers of folds that are tried, from the fewest on; in addition, all heights up to this number of rows."""


@dataclass(frozen=True)
class Panels:
    """A weight divided into `count` panels of `depth` rows, each `texels` across; folds begin at multiples of `unit` rows."""

    count: int
    depth: int
    texels: int
    texel_bytes: int
    unit: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of one panel."""
        return self.depth * self.texels * self.texel_bytes


@dataclass(frozen=True)
class ImageLimits:
    """Limits of a device's images: texels in both directions; rows start at multiples of `alignment` texels."""

    width: int
    height: int
    alignment: int = 1

    def aligned(self, width: _Whole) -> _Whole:
        """Texels from one row of an image of `width` texels to the next."""
        return -(-width // self.alignment) * self.alignment


@dataclass(frozen=True)
class Images:
    """The slices of a weight as images: `bounds` are the first panel of each and the end of the last; all have `rows` rows."""

    bounds: tuple[int, ...]
    rows: int


@lru_cache(maxsize=4096)
def cut(panels: Panels, limits: ImageLimits, slice_bytes: int) -> Images | None:
    """The fewest images of at most `slice_bytes` bytes each, padding included, or of one panel; None if that is impossible.

    Of the ways to divide a weight into this number, and of the heights, one is preferred by these criteria in order:

    - little padding (`GOOD`);
    - a height that others have;
    - the fewest blocks in which rows are read;
    - the fewest folds;
    - the least padding.

    Without row alignment nothing is folded unless required.
    """
    heights = _heights(panels, limits)
    if not heights.size:
        return None
    folds = -(-panels.depth // heights)
    widest = limits.width // (panels.texels * int(folds.min()))  # panels across the widest image
    if widest == 0:
        return None
    most = max(1, min(slice_bytes // panels.nbytes, widest, panels.count))
    for slices in range(-(-panels.count // most), panels.count + 1):
        found = _best(panels, limits, slice_bytes, slices, heights, folds)
        if found is not None:
            return found
    return None


def _heights(panels: Panels, limits: ImageLimits) -> _Numbers:
    """Heights to try, the tallest first; none if even the lowest fold exceeds the device's image height."""
    units = -(-panels.depth // panels.unit)
    highest = limits.height // panels.unit
    if highest == 0:
        return np.zeros(0, np.int64)
    fewest = -(-units // highest)
    by_folds = -(-units // np.arange(fewest, min(fewest + _FOLDS, units) + 1))
    by_rows = np.arange(1, min(_FOLDS, highest, units) + 1)
    tried = np.unique(np.concatenate((by_folds, by_rows)))[::-1] * panels.unit
    if limits.alignment <= 1:
        tried = tried[:1]
    return np.minimum(tried, panels.depth).astype(np.int64)


def _best(
    panels: Panels,
    limits: ImageLimits,
    slice_bytes: int,
    slices: int,
    heights: _Numbers,
    folds: _Numbers,
) -> Images | None:
    """The best way to divide the weight into `slices` images; None if all exceed a limit."""
    blocks = folds * -(-heights // BLOCK)
    # The lowest height that others have, if any; without row alignment all heights are equal.
    shared = (heights % BLOCK == 0) & (heights & (heights - 1) == 0)
    rank = np.where(shared, heights, np.iinfo(np.int64).max) if limits.alignment > 1 else np.zeros_like(heights)
    best: tuple[tuple[int, ...], Images] | None = None
    for step in (1, 2, 4, 8, 16, 32, 64) if limits.alignment > 1 else (1,):
        bounds = _spread(panels.count, slices, step)
        if bounds is None:
            break
        counts = Counter(end - first for first, end in pairwise(bounds))
        total = np.zeros_like(heights)
        allowed = np.ones(len(heights), bool)
        for count, times in counts.items():
            width = count * panels.texels * folds
            nbytes = heights * limits.aligned(width) * panels.texel_bytes
            allowed &= (width <= limits.width) & ((nbytes <= slice_bytes) | (count == 1))
            total += times * nbytes
        if not allowed.any():
            continue
        too_many = np.maximum(total - int((1 + GOOD) * panels.count * panels.nbytes), 0)
        at = int(min(np.flatnonzero(allowed), key=lambda i: (too_many[i], rank[i], blocks[i], folds[i], total[i])))
        key = tuple(int(column[at]) for column in (too_many, rank, blocks, folds, total))
        if best is None or key < best[0]:
            best = key, Images(bounds, int(heights[at]))
    return None if best is None else best[1]


def _spread(count: int, slices: int, step: int) -> tuple[int, ...] | None:
    """`count` panels divided evenly into `slices`, in whole multiples of `step`; None if these are too few."""
    steps = -(-count // step)
    if steps < slices:
        return None
    return tuple(min(steps * i // slices * step, count) for i in range(slices + 1))
