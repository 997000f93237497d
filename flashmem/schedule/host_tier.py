"""The host tier's slices: the packed weights that a session keeps in pinned host memory, for runs after the first.

Pure functions of plans and slices, without OpenCL. Sessions and the simulator share them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

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
        stays = staying(plan)
        parts = {part.name: part for part in slices}
        for w in sorted(plan.weights, key=lambda w: w.first_use):
            if w.name not in stays:
                found.setdefault(identity(parts[w.name]), parts[w.name])
    return tuple(found.values())


def planned_there(variants: Iterable[tuple[OverlapPlan, Sequence[Slice]]]) -> frozenset[SliceIdentity]:
    """The slices that a plan keeps in pinned memory, as it was made for a host budget."""
    found = set[SliceIdentity]()
    for plan, slices in variants:
        names = {w.name for w in plan.weights if w.pinned}
        found |= {identity(part) for part in slices if part.name in names}
    return frozenset(found)


def tier_slices(slices: Iterable[Slice], nbytes: int, first: Collection[SliceIdentity] = frozenset()) -> tuple[Slice, ...]:
    """The slices to keep within `nbytes`, of `slices` in the order of their use: those of `first` before others.

    Each byte kept saves the same time of reading, but only if another slice is copied while one is read. So the slices kept
    are spread evenly over the run. The set is fixed: a run reads its slices in one order, and replacing the one used last
    would lose each slice before its next use.
    """
    parts = list(slices)
    kept = set[int]()
    left = nbytes
    spaced = spread([tier_bytes(part) for part in parts], nbytes)
    for at in sorted(spaced, key=lambda at: identity(parts[at]) not in first):
        if tier_bytes(parts[at]) <= left:
            kept.add(at)
            left -= tier_bytes(parts[at])
    return tuple(part for at, part in enumerate(parts) if at in kept)


def spread(sizes: Sequence[int], nbytes: int) -> list[int]:
    """The indices of `sizes` (bytes): first those of about `nbytes` bytes, spread evenly over the sequence, then the others.

    One is taken when half of its bytes are due, if each byte before had its share (as J. E. Bresenham draws a line, 1965).
    """
    total = sum(sizes)
    due = 0  # bytes times `total`
    taken = list[int]()
    others = list[int]()
    for at, size in enumerate(sizes):
        due += size * nbytes
        if 2 * due >= size * total:
            due -= size * total
            taken.append(at)
        else:
            others.append(at)
    return taken + others
