"""Slicing: the number of slices of a weight, each one launch; as few as memory allows.

Small slices let reading overlap with computing and keep budgets small; a launch of few work-items leaves most of a GPU idle.
So a weight is cut into slices of `least` bytes, and into larger ones where their launches would not fill the device. A GPU is
quicker than the reading: where nothing limits memory, it gets every weight whole. So does a CPU for the sake of later runs, in
which all weights are there and each launch costs.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashmem.compiler.weights.packing import PackedSlice, Packing

LEAST_BYTES = 4 << 20
"""A few slices of this size in flight keep a disk busy, and the smallest budget is not much more than two of them."""

MOST_BYTES = 1 << 30
"""No slice of several panels is larger: kernels count a slice's elements in 32 bits, and the compiler packs one at a time."""

ROUNDS = 4
"""A launch of this many times the device's `parallelism` fills it: only its last round of work-groups may be partly empty."""


@dataclass(frozen=True)
class Slicing:
    """Sizes of slices in bytes, the padding of images included: up to `least` always, and up to `most` where the launch would
    not fill the device.

    `most` None: nothing limits memory; `later`: later runs count, and not the first one.

    A slice has one panel at least, however large that is.
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
        """The most columns of `column_bytes` each that a panel may have, so that a slice is no larger; None: any."""
        return None if self.most is None else max(self.least, self.most) // column_bytes


FINEST = Slicing()
"""The slices of the smallest budgets."""
