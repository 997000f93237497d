"""Selection of steady launches: which ones later runs can use, and which kernels these need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flashmem.program.kernel_text import Source, kernel_texts
from flashmem.program.launches import SteadyLaunch
from flashmem.program.program import Program
from flashmem.runtime.engine.executor import Executor, Kernels
from flashmem.runtime.kernels.required import KernelLaunch, RequiredKernel, variant
from flashmem.runtime.opencl.context import Kernel
from flashmem.runtime.streaming.interleaved import LayerMoves


@dataclass(frozen=True)
class Steady:
    """An executor that uses the steady `launches` in place of the layers they replace, while the slices `needs` are
    resident.
    """

    launches: tuple[SteadyLaunch, ...]
    needs: frozenset[str]
    executor: Executor


def playable(
    program: Program,
    resident: Collection[str],
    moves: Mapping[int, LayerMoves],
    joined: Callable[[str, Sequence[str]], object | None],
) -> tuple[SteadyLaunch, ...]:
    """The steady launches of `program` that a later run can use, with the slices `resident` and with `moves` in kernels.

    A launch for several layers needs all its slices before the first of them, so they must be resident, and adjacent:
    `joined(name, parts)` returns their buffer. A kernel that copies weights while it computes is not replaced.
    """
    parts, here = {each.name: each.parts for each in program.joined}, frozenset(resident)

    def fits(each: SteadyLaunch) -> bool:
        if any(layer in moves for layer in range(each.first, each.last + 1)):
            return False
        if not needed_residents(program, [each]) <= here:
            return False
        return all(joined(name, parts[name]) is not None for name in _read(each) if name in parts)

    return tuple(each for each in program.steady if fits(each))


def needed_residents(program: Program, steady: Sequence[SteadyLaunch]) -> frozenset[str]:
    """The slices that must be resident for `steady`: those of launches for several layers.

    Other steady launches wait for the same slices as the layers they replace.
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


class NamedKernels(Kernels, Protocol):
    """A source of kernels that can be tested for a name."""

    def __contains__(self, name: object) -> bool: ...


class Either:
    """The kernels of one source, with another source for the names that it lacks."""

    def __init__(self, one: NamedKernels, other: Kernels) -> None:
        self._one, self._other = one, other

    def kernel(self, name: str, arguments: Sequence[Any]) -> Kernel:
        """A new kernel object with its arguments set. Raises RunError."""
        return (self._one if name in self._one else self._other).kernel(name, arguments)
