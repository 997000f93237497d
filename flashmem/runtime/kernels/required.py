"""The kernels that a session needs, with the sizes and arguments of their launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashmem.base.errors import RunError
from flashmem.program.kernel_text import Source, kernel_texts
from flashmem.program.launches import Arg
from flashmem.program.program import Program
from flashmem.runtime.streaming.interleaved import COPY_GROUP, LayerMoves, Ride

SMALL_GRID = 65535
"""PoCL compiles a kernel anew for launches of that many work-items or more in a direction."""

Size = tuple[tuple[int, ...], tuple[int, ...] | None]
"""Global and local size of a launch."""


@dataclass(frozen=True)
class KernelLaunch:
    """One launch of a kernel: its sizes, and its arguments; `ride` is what its stream lane moves, if it has one."""

    size: Size
    args: tuple[Arg, ...]
    ride: Ride | None = None


@dataclass(frozen=True)
class Wanted:
    """A kernel, its whole text, and its launches."""

    name: str
    text: str
    uses: tuple[KernelLaunch, ...]

    @property
    def sizes(self) -> list[Size]:
        """Global and local size of each launch."""
        return [use.size for use in self.uses]


def variant(size: Size) -> str:
    """What a driver that compiles at a launch tells launches apart by: local size, and whether the grid is small."""
    whole, group = size
    if group is None:  # the driver chooses one that fits
        return f"any {whole}"
    return f"{group} {'small' if max(whole) < SMALL_GRID else 'large'}"


def wanted_kernels(
    program: Program, source: Source, *runs: Mapping[int, LayerMoves]
) -> tuple[tuple[Wanted, ...], tuple[Wanted, ...]]:
    """The plain kernels, and those with a stream lane, of a session whose runs make these moves by kernels.

    Raises:
        RunError: a kernel is missing.
    """
    plain: dict[str, list[KernelLaunch]] = {}
    laned: dict[str, list[KernelLaunch]] = {}
    for moves in (runs[0], *(other for other in runs[1:] if other is not runs[0])):
        for layer, launch in enumerate(program.launches, start=1):
            moving = moves.get(layer)
            riding = moving.riding if moving else None
            uses = plain if riding is None else laned
            uses.setdefault(launch.kernel, []).append(
                KernelLaunch((launch.global_size, launch.local_size), launch.args, riding)
            )
            for ride in (*moving.leading, *moving.separate) if moving else ():
                laned.setdefault(ride.copier, []).append(KernelLaunch(((ride.copy_items,), (COPY_GROUP,)), (), ride))
    return _with_texts(plain, source.plain), _with_texts(laned, source.lane) if laned else ()


def _with_texts(uses: Mapping[str, list[KernelLaunch]], text: str) -> tuple[Wanted, ...]:
    texts = kernel_texts(text)
    missing = next((name for name in uses if name not in texts), None)
    if missing is not None:
        raise RunError(f"the bundle lacks the kernel {missing}; compile the model again")
    return tuple(Wanted(name, texts[name], tuple(each)) for name, each in uses.items())
