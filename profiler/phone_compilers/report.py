"""Compile kernels for a phone's GPU, several at a time, and report their statistics as a table or JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from flashmem.base.errors import MissingFileError, UserError
from flashmem.bundle.bundle import Bundle
from flashmem.profiler.phone_compilers import adreno, mali
from flashmem.profiler.phone_compilers.compiling import Compiled, Compiler, options_of, root_of
from flashmem.profiler.phone_compilers.gpus import Gpu
from flashmem.profiler.phone_compilers.results import StoredResults
from flashmem.profiler.phone_compilers.statistics import KernelStatistics
from flashmem.program.kernel_text import KERNEL_MARK, kernel_texts

_COLUMNS = (
    "kernel", "instr.", "regs", "spills", "emul.", "threads", "group", "local B", "slots/MAC", "loop slots", "MACs", "load B",
    "tex.", "stack", "around",
)  # fmt: skip
_PARSERS = {"freedreno": adreno.parse, "panfrost": mali.parse}


@dataclass(frozen=True)
class CompilerReport:
    """Statistics of some kernels compiled for a GPU. `failures`: the errors of those that do not compile, by name."""

    gpu: Gpu
    mesa: str
    kernels: tuple[KernelStatistics, ...]
    failures: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        rows = [asdict(each) for each in self.kernels]
        for row, each in zip(rows, self.kernels, strict=True):
            if each.main_loop is not None:
                row["main_loop"]["slots_per_mac"] = each.main_loop.slots_per_mac
        return {"gpu": self.gpu.name, "mesa": self.mesa, "kernels": rows, "failures": dict(self.failures)}

    def table(self) -> str:
        """The report as text, one line for each kernel."""
        rows = [_COLUMNS, *(_row(each) for each in self.kernels)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]
        failed = [f"{name}: {' '.join(error.split())}" for name, error in self.failures.items()]
        return "\n".join([f"{self.gpu.name}, Mesa {self.mesa}", *lines, *failed])


def _row(each: KernelStatistics) -> tuple[str, ...]:
    loop = each.main_loop
    name, *numbers = (
        each.kernel, each.instructions, each.registers, each.spills, each.emulated, each.threads, each.work_group,
        each.local_bytes,
    )  # fmt: skip
    if loop is None:
        return (name, *map(str, numbers), *("-",) * 7)
    ratio = loop.slots_per_mac
    of_loop = (loop.slots, loop.macs, loop.load_bytes, loop.textures, loop.stack)
    return (
        name,
        *map(str, numbers),
        "-" if ratio is None else f"{ratio:.2f}",
        *map(str, of_loop),
        str(each.around.slots) if each.around else "-",
    )


def examine(texts: Mapping[str, str], gpu: Gpu, jobs: int = 0, stored: StoredResults | None = None) -> CompilerReport:
    """Compile kernels, given as one text for each name, `jobs` at a time (0: as many as the machine has processors).

    Texts that are equal are compiled once; those in `stored` are not compiled.

    Raises:
        UserError: the compilers cannot be set up or started on this machine.
    """
    root = root_of(gpu)
    distinct = list(dict.fromkeys(texts.values()))
    processes = jobs or len(os.sched_getaffinity(0))
    idle: SimpleQueue[Compiler] = SimpleQueue()

    def compile_one(text: str) -> Compiled:
        compiler = idle.get()
        try:
            return (stored.compiled if stored else Compiler.compile)(compiler, text, options_of(text))
        finally:
            idle.put(compiler)

    with ExitStack() as compilers, ThreadPoolExecutor(processes) as pool:
        for _ in range(processes):
            idle.put(compilers.enter_context(Compiler(gpu, root)))
        compiled = dict(zip(distinct, pool.map(compile_one, distinct), strict=True))
    made = [_examine(gpu, name, compiled[text]) for name, text in texts.items()]
    kernels = tuple(each for each in made if isinstance(each, KernelStatistics))
    failures = {name: each for name, each in zip(texts, made, strict=True) if isinstance(each, str)}
    return CompilerReport(gpu, root.mesa, kernels, failures)


def _examine(gpu: Gpu, name: str, compiled: Compiled) -> KernelStatistics | str:
    if compiled.error:
        return compiled.error
    return _PARSERS[gpu.driver](name, compiled) or "the compiler printed no code"


def texts_of(path: Path, *, lanes: bool = False) -> dict[str, str]:
    """The kernels in a bundle, or in a file of OpenCL C. `lanes`: those with an interleaved copy stream.

    Raises:
        MissingFileError: the file or folder does not exist.
        UserError: it contains no kernels.
    """
    if path.is_dir():
        found: dict[str, str] = {}
        for variant in Bundle.open(path).variants:
            found |= kernel_texts(variant.source.lane if lanes else variant.source.plain)
    elif path.is_file():
        text = path.read_text(encoding="utf-8")
        found = kernel_texts(text) if text.startswith(KERNEL_MARK) else {path.stem: text}
    else:
        raise MissingFileError(f"{path}: no such bundle or file of OpenCL C")
    if not found:
        raise UserError(f"{path} holds no kernels; name a bundle or a file of OpenCL C")
    return found
