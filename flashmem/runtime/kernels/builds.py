"""Builds of kernels in child processes, for the program cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from flashmem.program.program import Program
from flashmem.runtime.checking.trial import Size
from flashmem.runtime.kernels.cache_files import ProgramCache
from flashmem.runtime.kernels.pool import ChildPool, Job, KernelWorker, Rank
from flashmem.runtime.kernels.required import SMALL_GRID, KernelLaunch, RequiredKernel, variant
from flashmem.runtime.kernels.trials import trial_arguments
from flashmem.runtime.opencl.device import Device

LONGEST = 600.0
"""Time limit for one kernel in seconds: hundreds of times what the largest kernels of shipped models need."""

Keep = Callable[[str, bytes], None]
"""Receives the key of a kernel and its binary; called by several threads."""


class BuildJob(Job):
    """Compiles one kernel. A driver that compiles at the first launch is given one for each variant of the code."""

    def __init__(self, key: str, kernel: RequiredKernel, program: Program, device: Device, keep: Keep) -> None:
        self.key = key
        self._keep = keep
        self._name = kernel.name
        launches: list[dict[str, object]] = []
        if device.compiles_at_launch:
            first: dict[str, KernelLaunch] = {}
            for use in kernel.launches:
                first.setdefault(variant(use.size), use)
            launches = [
                {"size": _least_size(use.size), "arguments": [asdict(each) for each in trial_arguments(use, program)]}
                for use in first.values()
            ]
        options = (*program.build_options, *kernel.options)
        self._asked = {"build": kernel.name, "text": kernel.text, "options": options, "launches": launches}
        self.rank = Rank.BUILD, -len(kernel.text) * max(1, len(launches))  # the longest first

    def run(self, worker: KernelWorker) -> str | None:
        """Ask for the binary, and keep it."""
        try:
            answer = worker.ask(self._asked, LONGEST)
        except TimeoutError:
            worker.replace()
            return f"the kernel {self._name} was not built within {LONGEST:.0f} s"
        if answer is None:
            return f"the driver ended the process that built the kernel {self._name}{worker.last_words()}"
        if "error" in answer:
            return f"the kernel {self._name} cannot be built: {answer['error']}"
        try:
            binary = Path(answer["file"]).read_bytes()
        except OSError as error:
            return f"a kernel that was built cannot be read ({error.strerror})"
        self._keep(self.key, binary)
        return None


def _least_size(size: Size) -> Size:
    """The smallest launch of the same variant: one work-group, or the fewest that count as a large grid."""
    whole, group = size
    if group is None:
        return size
    longest = whole.index(max(whole))
    least = list(group)
    if whole[longest] >= SMALL_GRID:
        least[longest] = min(whole[longest], -(-(SMALL_GRID + 1) // group[longest]) * group[longest])
    return tuple(least), group


def build_jobs(wanted: Mapping[str, RequiredKernel], program: Program, device: Device, keep: Keep) -> Iterable[BuildJob]:
    """Jobs for kernels of `program`, by their key in the program cache."""
    return [BuildJob(key, kernel, program, device, keep) for key, kernel in wanted.items()]


def build_apart(
    wanted: Mapping[str, RequiredKernel],
    program: Program,
    device: Device,
    cache: ProgramCache,
    begin: Callable[[ChildPool], None] | None = None,
) -> dict[str, bytes]:
    """Compile kernels of `program` in child processes for a session; the binaries by key. They are written to `cache` if
    possible.

    With `begin` the kernels are not urgent: children run at idle priority, and `begin` receives the pool, which another thread
    may `abandon`.

    Raises:
        RunError: the driver refuses a kernel, ends the process that builds it, or does not finish; or no such process can be
            started.
        UserError: no temporary folder can be written.
    """
    made: dict[str, bytes] = {}
    pool = ChildPool(device, idle=begin is not None)
    try:
        if begin is not None:
            begin(pool)
        pool.submit(build_jobs(wanted, program, device, made.__setitem__))
        while pool.step():
            pass
        pool.check("free memory, or compile elsewhere with --with-binaries; Session(build_apart=False) builds in this process")
    finally:
        pool.close()
    for key, binary in made.items():
        cache.write(key, binary)
    cache.trim()
    return made
