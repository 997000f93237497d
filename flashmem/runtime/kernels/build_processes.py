"""Child processes that compile kernels.

Compilers in drivers use one processor and hundreds of megabytes, which the process keeps. So each kernel is compiled in a child
process (`flashmem.runtime.kernels.build_worker`). The child builds it, runs it if the driver compiles at the first launch, and
writes the binary to a file. Children have a session of their own, where Ctrl-C does not reach them. They end with their parent,
or when a build takes longer than `LONGEST`. The output of compilers is read only when a child fails.

Each child is started by the thread that sends it jobs, not by the caller's: Linux ends a child with the thread that started it
(`child_processes.end_with`).
"""

from __future__ import annotations

import fcntl
import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flashmem.base.errors import RunError
from flashmem.base.interrupts import held_back
from flashmem.base.paths import no_temporary_folder, temporary_parent
from flashmem.base.threads import Thread, started
from flashmem.bundle.version_directories import held
from flashmem.program.program import Program
from flashmem.runtime.kernels.cache_files import ProgramCache
from flashmem.runtime.kernels.children import Child, processors
from flashmem.runtime.kernels.required import SMALL_GRID, KernelLaunch, RequiredKernel, Size, variant
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.pocl import ROOM_BYTES

LONGEST = 600.0
"""Time limit for one kernel in seconds: hundreds of times what the largest kernels of shipped models need."""
_LEFT_OVER = 60.0
"""Age in seconds at which a folder without a lock belongs to a killed process."""
_PREFIX = "flashmem-build-"

Keep = Callable[[str, bytes], None]
"""Receives the key of a kernel and its binary; called by several threads."""


class Builders:
    """A pool of child processes that compile submitted kernels, one for each processor. `close` ends them."""

    def __init__(self, keep: Keep, advice: str, *, idle: bool = False) -> None:
        """Create a pool without starting anything.

        `keep` receives each binary. `advice` ends the message of a failed build. With `idle`, children run at idle priority.
        """
        self._keep, self._advice, self._idle = keep, advice, idle
        self.submitted = set[str]()
        self._device: Device | None = None
        self._finished = 0
        self._failure: str | None = None
        self._abandoned = False
        self._waiting: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None for a built kernel, or why it cannot be built
        self._folder: WorkFolder | None = None
        self._lock = threading.Lock()  # guards the following
        self._children: list[Child] = []
        self._ended = False  # children are to stop
        self._threads: list[Thread] = []

    @property
    def fraction(self) -> float:
        """The fraction of the submitted kernels that is done."""
        return self._finished / max(1, len(self.submitted))

    def submit(self, wanted: Mapping[str, RequiredKernel], program: Program, device: Device, *, busy: int = 0) -> None:
        """Submit kernels of `program`, by key. The longest are built first, each by a free child.

        `busy` processors are left free until `step` waits.

        Raises:
            UserError: no temporary folder can be written.
            RunError: the system has no more threads.
        """
        self._folder = self._folder or WorkFolder()
        jobs = [_job(key, each, program, device) for key, each in wanted.items()]
        for job in sorted(jobs, key=lambda job: -len(job["text"]) * max(1, len(job["trials"]))):
            self.submitted.add(job["key"])
            self._waiting.put(job)
        self._device = device
        self._start_children(max(1, processors() - busy))

    def _start_children(self, most: int) -> None:
        """Start a child for each waiting job, up to `most` children in all."""
        for _ in range(min(self._waiting.qsize(), most - len(self._threads))):
            with held_back():
                self._threads.append(started(self._feed, "flashmem-build"))

    def _feed(self) -> None:
        """Start one child, give it jobs until the queue ends with None, and keep its binaries."""
        assert self._device is not None and self._folder is not None
        child = None
        try:
            errors = Path(self._folder.name, f"{threading.get_ident()}.txt")
            child = Child("flashmem.runtime.kernels.build_worker", self._device, Path(self._folder.name), errors)
            with self._lock:
                self._children.append(child)
                if self._ended:
                    child.kill()
            if self._idle:
                child.only_when_idle()
            while (job := self._waiting.get()) is not None:
                try:
                    answer = child.ask(job, LONGEST)
                except TimeoutError:
                    self._done.put(f"the kernel {job['name']} was not built within {LONGEST:.0f} s")
                    continue
                if answer is None:
                    self._done.put(f"the driver ended the process that built the kernel {job['name']}{child.last_line()}")
                    return
                elif answer["error"] is not None:
                    self._done.put(f"the kernel {job['name']} cannot be built: {answer['error']}")
                else:
                    self._keep(job["key"], Path(answer["file"]).read_bytes())
                    self._done.put(None)
        except OSError as error:
            what = (
                "no process that builds kernels can be started" if child is None else "a kernel that was built cannot be read"
            )
            self._done.put(f"{what} ({error.strerror})")
        except BaseException as error:  # any failure is passed to the waiting thread
            self._done.put(f"kernels cannot be built: {type(error).__name__}: {error}")
        finally:
            if child is not None:
                child.kill()

    def step(self, *, wait: bool = True) -> bool:
        """Process the completion of one kernel.

        Returns False if none is left or one has failed; without `wait`, also if none has completed yet.
        """
        if self._abandoned:
            self._failure = "the kernels are no longer needed"
        if self._finished == len(self.submitted) or self._failure is not None:
            return False
        if wait:
            self._start_children(processors())
        try:
            self._failure = self._done.get(block=wait)
        except queue.Empty:
            return False
        self._finished += 1
        return True

    def check(self) -> None:
        """Raise RunError if a kernel could not be built."""
        if self._failure is not None:
            raise RunError(f"{self._failure}; {self._advice}")

    def abandon(self) -> None:
        """Make a waiting thread fail now; another thread calls it."""
        self._abandoned = True
        self._end_children()

    def _end_children(self) -> None:
        with self._lock:
            self._ended = True
            for child in self._children:
                child.kill()

    def close(self) -> None:
        """End the children immediately."""
        self._end_children()
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()
        for child in self._children:
            child.close()
        if self._folder is not None:
            self._folder.remove()


def build_apart(
    wanted: Mapping[str, RequiredKernel],
    program: Program,
    device: Device,
    cache: ProgramCache,
    begin: Callable[[Builders], None] | None = None,
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
    advice = "free memory, or compile elsewhere with --with-binaries; Session(build_apart=False) builds in this process"
    builders = Builders(made.__setitem__, advice, idle=begin is not None)
    try:
        if begin is not None:
            begin(builders)
        builders.submit(wanted, program, device)
        while builders.step():
            pass
        builders.check()
    finally:
        builders.close()
    for key, binary in made.items():
        cache.write(key, binary)
    cache.trim()
    return made


def _job(key: str, wanted: RequiredKernel, program: Program, device: Device) -> dict[str, Any]:
    """The job for a child: the text of one kernel, and one launch for each variant of the compiled code."""
    trials: list[dict[str, Any]] = []
    if device.compiles_at_launch:
        first: dict[str, KernelLaunch] = {}
        for use in wanted.launches:
            first.setdefault(variant(use.size), use)
        trials = [{"size": _trial_size(use.size), "args": _arguments(use, program)} for use in first.values()]
    options = (*program.build_options, *wanted.options)
    return {"key": key, "name": wanted.name, "text": wanted.text, "options": options, "trials": trials}


def _trial_size(size: Size) -> Size:
    """The smallest launch of the same variant: one work-group, or the fewest that count as a large grid."""
    whole, group = size
    if group is None:
        return size
    longest = whole.index(max(whole))
    least = list(group)
    if whole[longest] >= SMALL_GRID:
        least[longest] = min(whole[longest], -(-(SMALL_GRID + 1) // group[longest]) * group[longest])
    return tuple(least), group


def _arguments(use: KernelLaunch, program: Program) -> list[list[Any]]:
    """The arguments of a launch as kinds and sizes; the kernel accesses no memory beyond these sizes."""
    tensors = {tensor.name: tensor.nbytes for tensor in program.tensors}
    wholes = {"arena": program.arena_bytes, "states": program.states_bytes, "constants": program.constants_bytes}
    slices = program.readable()
    found: list[list[Any]] = []
    for arg in use.args:
        if arg.kind == "slice":
            found.append(_memory(slices[str(arg.value)]))
        elif arg.kind in ("tensor", "constant"):
            found.append(["buffer", tensors[str(arg.value)] if arg.kind == "tensor" else arg.nbytes])
        elif arg.kind == "whole":
            found.append(["buffer", wholes[str(arg.value)]])
        else:
            found.append([arg.kind, arg.value])
    if use.stream is not None:
        found += use.stream.arguments(lambda part: ["buffer", part.file_bytes], _memory, lambda number: ["int", number])
    return found


def _memory(part: Any) -> list[Any]:
    return ["image", part.width, part.height, part.channel] if part.is_image else ["buffer", part.file_bytes]


class WorkFolder:
    """A temporary folder with a lock of this process, which is emptied when it is no longer needed."""

    def __init__(self) -> None:
        """Create the folder, and remove folders of killed processes.

        Raises:
            UserError: no temporary folder can be written.
        """
        try:
            self.name = tempfile.mkdtemp(prefix=_PREFIX, dir=temporary_parent(ROOM_BYTES))
            self._lock = os.open(self.name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise no_temporary_folder(error) from error
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for other in Path(self.name).parent.glob(f"{_PREFIX}*"):
            _remove_left_over(other)

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.name, ignore_errors=True)
        os.close(self._lock)


def _remove_left_over(folder: Path) -> None:
    try:
        status = folder.lstat()
    except OSError:
        return
    if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _LEFT_OVER:
        with held(folder) as mine:
            if mine:
                shutil.rmtree(folder, ignore_errors=True)
