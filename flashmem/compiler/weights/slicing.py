"""Slicing: the number of slices of a weight, each one launch; as few as memory allows.

Small slices let loads overlap with computation and keep budgets small, but a launch of few work-items leaves most of a GPU
idle. So a weight is divided into slices of `least` bytes, and into larger ones if launches of such slices would not fill the
device. A GPU computes faster than weights are read, so without a memory limit it gets every weight whole. So does a CPU if
later runs count: then all weights are resident and each launch costs time.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashmem.compiler.weights.packing import PackedSlice, Packing

LEAST_BYTES = 4 << 20
"""Default size of a slice: a few in flight keep a disk busy."""

SMALLEST_BYTES = 16 << 10
"""The smallest size of a slice, for budgets that nothing larger fits. A read of less costs as much."""

MOST_SLICES = 1024
"""Slices of less than `LEAST_BYTES` are used if a model has at most so many: each is a launch in every run."""

STEP = 4
"""Each size is 1 / STEP of the size before."""

MOST_BYTES = 1 << 30
"""The most bytes of a slice of several panels: kernels count its elements in 32 bits, and the compiler packs one at a time."""

ROUNDS = 4
"""A launch of this many times the device's `parallelism` fills it: only the last round of work-groups may be partly empty."""


@dataclass(frozen=True)
class Slicing:
    """Sizes of slices in bytes, including the padding of images.

    Slices have up to `least` bytes always, and up to `most` if their launch would not fill the device. `most` None: nothing
    limits memory. `later`: later runs count, and not the first one. A slice has at least one panel, of any size.
    """

    least: int = LEAST_BYTES
    most: int | None = LEAST_BYTES
    later: bool = False

    def slices(self, packing: Packing, row_items: int) -> list[PackedSlice]:
        """The slices of a weight whose launches have `row_items` work-items for each panel."""
        device = packing.descriptor
        full = -(-ROUNDS * device.parallelism // row_items)  # panels
        if full >= packing.panels or (self.most is None and (self.later or device.kind == "gpu")):
            wished = MOST_BYTES
        else:
            wished = full * packing.panel_bytes
        return packing.slices(min(max(self.least, min(wished, self.most or wished)), MOST_BYTES))

    def widest(self, column_bytes: int) -> int | None:
        """The widest panel, in columns of `column_bytes`, with which slices stay within these sizes; None for any width."""
        return None if self.most is None else max(self.least, self.most) // column_bytes


DEFAULT = Slicing()
"""Slices of up to `LEAST_BYTES`: the smallest whose launches and reads cost little."""

WHOLE = Slicing(most=None)
"""Slices of any size: the largest that make launches faster."""


def finer(weights_bytes: int) -> list[Slicing]:
    """Slices of less than `LEAST_BYTES`, from coarse to fine, of a model with `weights_bytes` of weights; possibly none."""
    sizes = []
    size = LEAST_BYTES // STEP
    while size >= SMALLEST_BYTES and weights_bytes <= MOST_SLICES * size:
        sizes.append(Slicing(least=size, most=size))
        size //= STEP
    return sizes


def finest(weights_bytes: int) -> Slicing:
    """The slices of the smallest budgets of a model with `weights_bytes` of weights."""
    return [DEFAULT, *finer(weights_bytes)][-1]
