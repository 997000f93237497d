"""Which steady launches later runs play instead of their first ones, and which kernels these need: pure functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flashmem.program.kernel_text import Source, kernel_texts
from flashmem.program.launches import SteadyLaunch
from flashmem.program.program import Program
from flashmem.runtime.engine.executor import Executor, Kernels
from flashmem.runtime.kernels.required import KernelLaunch, Wanted, variant
from flashmem.runtime.opencl.context import Kernel
from flashmem.runtime.streaming.interleaved import LayerMoves


@dataclass(frozen=True)
class Steady:
    """All layers, with `launches` instead of some of the first run's. They can be played while the slices `needs` stay."""

    launches: tuple[SteadyLaunch, ...]
    needs: frozenset[str]
    executor: Executor


def playable(
    program: Program,
    resident: Collection[str],
    moves: Mapping[int, LayerMoves],
    joined: Callable[[str, Sequence[str]], object | None],
) -> tuple[SteadyLaunch, ...]:
    """The steady launches of `program` that later runs can play, which find `resident` and make `moves` by kernels.

    A launch that stands for several layers needs all its slices before the first of them, so they must be resident, and side by
    side as `joined(name, parts)` tells. A kernel that moves weights while it computes stays as it is.
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
    """The slices that must be resident for `steady`: those of launches that stand for several layers. Others need none: their
    layers wait for the same slices as before.
    """
    parts = {each.name: each.parts for each in program.joined}
    names = [name for each in steady if each.last > each.first for name in _read(each)]
    return frozenset(part for name in names for part in parts.get(name, (name,)))


def _read(each: SteadyLaunch) -> list[str]:
    return [str(arg.value) for arg in each.launch.args if arg.kind == "slice"]


def new_kernels(source: Source, steady: Sequence[SteadyLaunch], known: Sequence[Wanted]) -> tuple[Wanted, ...]:
    """The kernels of `steady` launches that are none of the `known` ones, or launched in a way that these are not."""
    uses: dict[str, list[KernelLaunch]] = {}
    for each in steady:
        launch = each.launch
        uses.setdefault(launch.kernel, []).append(KernelLaunch((launch.global_size, launch.local_size), launch.args))
    here = {each.name: {variant(size) for size in each.sizes} for each in known}
    texts = kernel_texts(source.plain)
    return tuple(
        Wanted(name, texts[name], tuple(each))
        for name, each in uses.items()
        if not {variant(use.size) for use in each} <= here.get(name, set())
    )


class NamedKernels(Kernels, Protocol):
    """Kernels that say which there are."""

    def __contains__(self, name: object) -> bool: ...


class Either:
    """Kernels of one source, and where it has none of that name, of another one."""

    def __init__(self, one: NamedKernels, other: Kernels) -> None:
        self._one, self._other = one, other

    def kernel(self, name: str, arguments: Sequence[Any]) -> Kernel:
        """A kernel object of its own with its arguments set. Raises RunError."""
        return (self._one if name in self._one else self._other).kernel(name, arguments)
