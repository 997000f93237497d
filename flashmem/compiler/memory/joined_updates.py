"""Joined updates: new keys and values are written into their caches by one launch.

Two scatters into two tensors by the same indices become one group, at the place of the second. Rotary positions right before
it, whose rows are the new keys, become part of it too, if there are few. This depends on where tensors are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.memory.buffers import BufferAssignment
from flashmem.compiler.memory.placement import PlacedGraph
from flashmem.compiler.operators.vector import STORED

_SEPARATE = ("update", "update_step", "update_start")
"""Attributes in which two scatters of one launch may differ."""

_MOST_STEPS = 64
"""The most elements of a cache that a work-item writes, one after the other: one for each head of keys and each token."""


def join_updates(placed: PlacedGraph) -> PlacedGraph:
    """`placed`, in which updates of two caches, and rotary positions before them, are one group."""
    joined = _join_scatters(placed.launched, placed.buffers)
    return replace(placed, launched=tuple(_join_rotary(joined, placed.buffers)))


def _join_scatters(groups: Sequence[FusionGroup], buffers: BufferAssignment) -> list[FusionGroup]:
    """`groups`, in which pairs of scatters are one group, at the place of the second."""
    earlier: dict[FusionGroup, FusionGroup] = {}
    for at, group in enumerate(groups):
        later = None if group in earlier else _partner(group, groups[at + 1 :], buffers)
        if later is not None and later not in earlier:
            earlier[later] = group
    gone = set(earlier.values())
    pairs = {later: replace(group, joined=(later,)) for later, group in earlier.items()}
    return [pairs.get(group, group) for group in groups if group not in gone]


def _partner(group: FusionGroup, later: Sequence[FusionGroup], buffers: BufferAssignment) -> FusionGroup | None:
    """The scatter of the `later` groups in whose launch the scatter `group` can be; None if there is none.

    Groups between must not read the result of `group`, or overwrite its updates.
    """
    if group.main.op not in ("ScatterAt", "ScatterQuantised"):
        return None
    made = buffers.base(group.output)
    updates = buffers.base(group.main.input(2))
    for other in later:
        if _together(group, other, buffers):
            return other
        gone = buffers.overwritten.get(other.main)
        if made in map(buffers.base, other.read()) or (gone is not None and buffers.base(gone) is updates):
            return None
    return None


def _together(one: FusionGroup, two: FusionGroup, buffers: BufferAssignment) -> bool:
    """Whether one launch can compute both scatters: into two tensors in place, by the same indices, as new keys and values."""
    first = one.main
    second = two.main
    if first.op != second.op or first.input(1) is not second.input(1) or one.output in second.inputs:
        return False
    alike = all(value == second.attributes[name] for name, value in first.attributes.items() if name not in _SEPARATE)
    return alike and _types(one, buffers) == _types(two, buffers) and _in_place(one, buffers) and _in_place(two, buffers)


def _types(group: FusionGroup, buffers: BufferAssignment) -> list[str]:
    """The types of a scatter's updates and result in OpenCL C."""
    return [STORED[buffers.storage(value)] for value in (group.main.input(2), group.output)]


def _in_place(group: FusionGroup, buffers: BufferAssignment) -> bool:
    """Whether the data of a scatter is in its result, and remains in part."""
    return not group.main.attributes["covered"] and buffers.holds(group.output, group.main.input(0), 0)


def _join_rotary(groups: Sequence[FusionGroup], buffers: BufferAssignment) -> list[FusionGroup]:
    """`groups`, in which Rotary before two joined scatters is one group with both."""
    made: list[FusionGroup] = []
    for group in groups:
        scatters = (group, *group.joined)
        if made and len(scatters) == 2 and _writes_cache(made[-1], scatters, buffers):
            made[-1] = replace(made[-1], joined=(replace(group, joined=()), *group.joined))
        else:
            made.append(group)
    return made


def _writes_cache(group: FusionGroup, scatters: Sequence[FusionGroup], buffers: BufferAssignment) -> bool:
    """Whether the launch of a Rotary can write its rows, as keys, into one of two caches, and values into the other."""
    if group.main.op != "Rotary" or group.epilogue or buffers.overwritten.get(group.main) is group.main.input(0):
        return False
    given = scatters[0].main.attributes
    if scatters[0].main.op != "ScatterAt" or given["steps"] > _MOST_STEPS or given["reduction"] != "none":
        return False
    return [buffers.holds(group.output, each.main.input(2), 0) for each in scatters].count(True) == 1
