"""The host tier's slices: the packed weights that a session keeps in pinned host memory, for runs after the first.

Pure functions of plans and slices, without OpenCL. Sessions and the simulator share them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flashmem.base.types import POOL_ALIGNMENT
from flashmem.program.tensors import Slice
from flashmem.schedule.loads import staying
from flashmem.schedule.plan import OverlapPlan

SliceIdentity = tuple[int, int, int]
"""Offset in the weight file, bytes there, and bytes of a row of an image (0 for a buffer)."""


def identity(part: Slice) -> SliceIdentity:
    """The identity of a slice within a weight file. Shape variants share the file, and name its slices in their own ways."""
    return part.offset, part.file_bytes, part.row_pitch if part.is_image else 0


def tier_bytes(part: Slice) -> int:
    """Bytes of a slice's place in the tier: whole pages, so that each read begins at a page."""
    return -(-part.file_bytes // POOL_ALIGNMENT) * POOL_ALIGNMENT


def reloaded(variants: Iterable[tuple[OverlapPlan, Sequence[Slice]]]) -> tuple[Slice, ...]:
    """The slices that each later run loads again, each once, by variant and then by first use."""
    found: dict[SliceIdentity, Slice] = {}
    for plan, slices in variants:
        stays, parts = staying(plan), {part.name: part for part in slices}
        for w in sorted(plan.weights, key=lambda w: w.first_use):
            if w.name not in stays:
                found.setdefault(identity(parts[w.name]), parts[w.name])
    return tuple(found.values())


def tier_slices(slices: Iterable[Slice], nbytes: int) -> tuple[Slice, ...]:
    """The slices to keep within `nbytes`: the first ones that fit, in the given order.

    Each byte kept saves the same time, so the order of use decides. The set is fixed: a run reads its slices in one order, and
    replacing the one used last would lose each slice before its next use.
    """
    kept, left = [], nbytes
    for part in slices:
        if tier_bytes(part) <= left:
            kept.append(part)
            left -= tier_bytes(part)
    return tuple(kept)
