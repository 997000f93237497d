"""Steady launches: selects those that replace launches of the first run in later runs, and finds their new kernels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from flashmem.program.kernel_text import Source, kernel_texts
from flashmem.program.launches import SteadyLaunch
from flashmem.program.program import Program
from flashmem.runtime.kernels.required import KernelLaunch, RequiredKernel, variant
from flashmem.runtime.streaming.interleaved import LayerMoves


def usable_launches(
    program: Program,
    resident: Collection[str],
    moves: Mapping[int, LayerMoves],
    joined: Callable[[str, Sequence[str]], object | None],
) -> tuple[SteadyLaunch, ...]:
    """The steady launches of `program` that later runs can use with the `resident` slices and the kernels' copies `moves`.

    A launch for several others needs all its slices before the first of them. So the slices must be resident and adjacent:
    `joined(name, parts)` returns their buffer. A kernel that copies weights while it computes is not replaced.
    """
    parts = {each.name: each.parts for each in program.joined}
    here = frozenset(resident)

    def fits(each: SteadyLaunch) -> bool:
        if any(layer in moves for layer in range(each.first, each.last + 1)):
            return False
        if not needed_residents(program, [each]) <= here:
            return False
        return all(joined(name, parts[name]) is not None for name in _read(each) if name in parts)

    return tuple(each for each in program.steady if fits(each))


def needed_residents(program: Program, steady: Sequence[SteadyLaunch]) -> frozenset[str]:
    """The slices that must be resident for `steady`: those of launches that replace several.

    Other steady launches wait for the same slices as the launches that they replace.
    """
    parts = {each.name: each.parts for each in program.joined}
    names = [name for each in steady if each.last > each.first for name in _read(each)]
    return frozenset(part for name in names for part in parts.get(name, (name,)))


def _read(each: SteadyLaunch) -> list[str]:
    return [str(arg.value) for arg in each.launch.args if arg.kind == "slice"]


def new_kernels(source: Source, steady: Sequence[SteadyLaunch], known: Sequence[RequiredKernel]) -> tuple[RequiredKernel, ...]:
    """The kernels of `steady` launches that are not among `known`, or that have launches of another variant."""
    uses: dict[str, list[KernelLaunch]] = {}
    for each in steady:
        launch = each.launch
        uses.setdefault(launch.kernel, []).append(KernelLaunch((launch.global_size, launch.local_size), launch.args))
    here = {each.name: {variant(size) for size in each.sizes} for each in known}
    texts = kernel_texts(source.plain)
    return tuple(
        RequiredKernel(name, texts[name], tuple(each))
        for name, each in uses.items()
        if not {variant(use.size) for use in each} <= here.get(name, set())
    )
