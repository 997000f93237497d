"""Allocation limits: each buffer and texture of a bundle must fit one allocation (CL_DEVICE_MAX_MEM_ALLOC_SIZE).

Weights are divided into slices below that limit (compiler/weights/packing.py). A pool of many slices is one buffer, and so are
all activations.
"""

from __future__ import annotations

from dataclasses import replace

from flashmem.base.errors import UserError
from flashmem.base.types import TransferMode
from flashmem.program.program import Program
from flashmem.schedule.plan import OverlapPlan
from flashmem.target.descriptor import DeviceDescriptor


def within_allocations(program: Program, plan: OverlapPlan, descriptor: DeviceDescriptor, mode: TransferMode) -> OverlapPlan:
    """`plan` without the layouts of modes that the device cannot allocate; `mode` is the plan's own.

    Raises:
        UserError: `mode` is one of them, or the program itself exceeds the limit.
    """
    most = descriptor.max_alloc_bytes
    fixed = (("activations need", program.arena_bytes), ("constants need", program.constants_bytes))
    for what, nbytes in fixed:
        if nbytes > most:
            advice = "name a budget below that with --budget, so that they are computed in patches, or make the input smaller"
            raise _refused(what, nbytes, descriptor, advice)
    for part in program.slices:
        if part.file_bytes > most:
            advice = "no part of it can be loaded alone; compile for a device that allocates more"
            raise _refused(f"weight {part.weight!r} needs", part.file_bytes, descriptor, advice)
    layouts = {}
    for each, layout in plan.layouts.items():
        too_large = layout.larger_than(most)
        if too_large is None:
            layouts[each] = layout
        elif each == mode:
            raise _refused(f"in mode {mode} {too_large[0]}", too_large[1], descriptor, f"name a budget of {most} bytes or less")
    return replace(plan, layouts=layouts)


def _refused(what: str, nbytes: int, descriptor: DeviceDescriptor, advice: str) -> UserError:
    most = descriptor.max_alloc_bytes
    return UserError(f"{what} {nbytes} bytes in one buffer, and {descriptor.name} allocates at most {most} at a time; {advice}")
