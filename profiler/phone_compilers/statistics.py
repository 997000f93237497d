"""Instruction statistics of a compiled kernel, parsed from the output of both compilers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LoopStatistics:
    """One pass through a loop, for one work-item, without the loops inside it.

    `slots` are issue slots: a repeated instruction counts each time, and so do the slots that it waits. `macs` are
    multiply-adds of floats; each element of a vector of halves counts. `half_macs` are those of halves that take a slot
    each, as floats do. `load_bytes` are read from buffers, not through
    textures. `stack` counts loads and stores of scratch memory: spilled registers, and arrays that are not in registers.
    `branches` counts branches and jumps; a plain loop has two, its condition and its way back. Not counted on Mali.
    """

    instructions: int
    slots: int
    macs: int
    load_bytes: int
    loads: int
    textures: int
    local: int
    stack: int
    half_macs: int = 0
    branches: int = 0

    @property
    def slots_per_mac(self) -> float | None:
        """Issue slots for each multiply-add; None if the loop has no multiply-add."""
        return self.slots / self.macs if self.macs else None


@dataclass(frozen=True)
class KernelStatistics:
    """The code of one kernel on one GPU.

    `registers`: registers of 32 bits for each work-item. `threads`: on Adreno, waves that a core holds, of at most 16. On Mali,
    2 if a core holds its full number of threads, 1 if registers leave half of them. `spills` are instructions that access
    scratch memory. `emulated` are instructions that count leading zeros. Software for a fused multiply-add, a division of 64
    bits, or the range of `sin` and `cos` has two for each. `main_loop` is the loop with the most multiply-adds, or the longest
    one, of those without a loop inside; None if the kernel has no loop. `around`: the loops around it, one pass through each
    without the loops inside; there is the interleaved copy stream of a kernel that has one. None if no loop is around it.
    """

    kernel: str
    instructions: int
    slots: int
    registers: int
    spills: int
    emulated: int
    threads: int
    work_group: int
    local_bytes: int
    private_bytes: int
    seconds: float
    loops: int
    main_loop: LoopStatistics | None
    around: LoopStatistics | None


def bodies(loops: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The indices of each loop, without those of the loops inside it.

    `loops` are first and last indices; loops with the same first index are merged.
    """
    ends: dict[int, int] = {}
    for first, last in loops:
        ends[first] = max(last, ends.get(first, last))
    whole = {first: set(range(first, last + 1)) for first, last in ends.items()}
    return [
        sorted(own.difference(*(other for head, other in whole.items() if head != first and other < own)))
        for first, own in whole.items()
    ]


def main_loop(
    loops: Sequence[list[int]], counted: Callable[[Sequence[int]], LoopStatistics]
) -> tuple[LoopStatistics | None, LoopStatistics | None]:
    """`main_loop` and `around` of `KernelStatistics`, of loops as `bodies` returns them; `counted` counts at these indices."""
    innermost = [own for own in loops if len(own) == own[-1] - own[0] + 1]  # others have gaps
    if not innermost:
        return None, None
    main = max(innermost, key=lambda own: (counted(own).macs, counted(own).slots))
    around = [at for own in loops if own[0] < main[0] and main[-1] < own[-1] for at in own]
    return counted(main), counted(around) if around else None
