"""Kernels for CPUs with other instruction sets: the same program, over the same packed weights and in the same memory.

All CPUs have one packing of weights (`target.instruction_set.PANEL`), and the tile that is fastest depends on the registers.
So the program is lowered again for each other tile, and compared launch by launch. A launch that computes the same in the
same memory replaces the first program's. The plan stays as it is: layers and slices are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flashmem.compiler.lowering.context import PackedBefore
from flashmem.compiler.lowering.generated import Generated
from flashmem.compiler.lowering.program import lower
from flashmem.compiler.lowering.steady import MatchedPrograms, for_later_runs, pairs, with_steady_of
from flashmem.program.kernel_text import Source, kernel_source, kernel_texts
from flashmem.target.instruction_set import other_tiles


def for_other_instruction_sets(first: Generated, instruction_set: str) -> Mapping[str, Generated]:
    """`first`, which is for `instruction_set`, with the launches of each other tile that differ, by instruction set.

    None for a GPU, whose `instruction_set` is "".
    """
    made = {name: _for_instruction_set(first, name) for name in other_tiles(instruction_set)}
    return {name: each for name, each in made.items() if each.program != first.program}


def _for_instruction_set(first: Generated, name: str) -> Generated:
    """`first` with the launches, for first and later runs, that are faster on a CPU with instruction set `name`."""
    descriptor = first.lowering.descriptor.for_instruction_set(name)
    packed = PackedBefore(first.cuts, joined=False, kept=True)
    selector = first.lowering.selector.on_device(descriptor)
    other = lower(first.placed, replace(first.lowering, descriptor=descriptor, selector=selector, before=packed))
    made = _with_launches_of(first, other)
    return with_steady_of(made, for_later_runs(other, replace(packed, joined=True)))


def _with_launches_of(first: Generated, other: Generated) -> Generated:
    """`first` with the launches of `other` where they differ and read and write the same memory, without steady launches."""
    matched = MatchedPrograms(first, other)
    launches = list(first.program.launches)
    for number, cold, made in pairs(first.program.launches, other.program.launches):
        if len(cold) == 1 and (launch := matched.launch(cold, made)) is not None:
            launches[number - 1] = launch
    kernels = {launch.kernel for launch in launches}
    plain = kernel_texts(other.source.plain) | kernel_texts(first.source.plain)
    lane = kernel_texts(other.source.lane) | kernel_texts(first.source.lane)
    lane = {name: text for name, text in lane.items() if name in kernels or name not in plain}  # also those that only copy
    plain = {name: text for name, text in plain.items() if name in kernels}
    source = Source(kernel_source(plain), kernel_source(lane), tuple(sorted(kernels)))
    program = replace(first.program, launches=tuple(launches), steady=(), joined=())
    return replace(first, program=program, source=source)
