"""The kernels required by a session, each with its launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashmem.base.errors import RunError
from flashmem.program.kernel_text import Source, kernel_texts
from flashmem.program.launches import Arg
from flashmem.program.program import Program
from flashmem.runtime.checking.trial import Size
from flashmem.runtime.streaming.interleaved import COPY_GROUP, CopyStream, LayerMoves

SMALL_GRID = 65535
"""Grid size in one direction from which PoCL compiles a kernel again."""


@dataclass(frozen=True)
class KernelLaunch:
    """One launch of a kernel: its sizes, its arguments, and the copies that it makes in its `stream`, if any."""

    size: Size
    args: tuple[Arg, ...]
    stream: CopyStream | None = None


@dataclass(frozen=True)
class RequiredKernel:
    """A kernel with its complete text and its launches. `options`: of its build, in addition to the program's."""

    name: str
    text: str
    launches: tuple[KernelLaunch, ...]
    options: tuple[str, ...] = ()

    @property
    def sizes(self) -> list[Size]:
        """Global and local size of each launch."""
        return [use.size for use in self.launches]


def variant(size: Size) -> str:
    """The properties of a launch for which a driver compiles a kernel separately: the local size, and a small or large grid."""
    whole, group = size
    if group is None:  # the driver chooses a local size
        return f"any {whole}"
    return f"{group} {'small' if max(whole) < SMALL_GRID else 'large'}"


def required_kernels(
    program: Program, source: Source, *runs: Mapping[int, LayerMoves]
) -> tuple[tuple[RequiredKernel, ...], tuple[RequiredKernel, ...]]:
    """The plain kernels and those with an interleaved copy stream, for runs with these copies in kernels.

    Raises:
        RunError: the source lacks a kernel.
    """
    plain: dict[str, list[KernelLaunch]] = {}
    laned: dict[str, list[KernelLaunch]] = {}
    for moves in (runs[0], *(other for other in runs[1:] if other is not runs[0])):
        for layer, launch in enumerate(program.launches, start=1):
            moving = moves.get(layer)
            interleaved = moving.interleaved if moving else None
            uses = plain if interleaved is None else laned
            sizes = launch.global_size, launch.local_size
            uses.setdefault(launch.kernel, []).append(KernelLaunch(sizes, launch.args, interleaved))
            for stream in (*moving.leading, *moving.separate) if moving else ():
                laned.setdefault(stream.copier, []).append(KernelLaunch(((stream.copy_items,), (COPY_GROUP,)), (), stream))
    return _with_texts(plain, source.plain), _with_texts(laned, source.lane) if laned else ()


def _with_texts(launches: Mapping[str, list[KernelLaunch]], text: str) -> tuple[RequiredKernel, ...]:
    texts = kernel_texts(text)
    missing = next((name for name in launches if name not in texts), None)
    if missing is not None:
        raise RunError(f"the bundle lacks the kernel {missing}; compile the model again")
    return tuple(RequiredKernel(name, texts[name], tuple(each)) for name, each in launches.items())
