"""Processes that build kernels.

Compilers inside of drivers use one processor and hundreds of megabytes, which stay with the process. So each kernel goes to a
child process (`flashmem.runtime.kernel_worker`), which builds it, runs it where the driver compiles at the first launch, and
leaves the binary in a file. Children are in a session of their own, where Ctrl-C does not reach them; they end with their
parent.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flashmem.errors import RunError
from flashmem.interrupts import blocked
from flashmem.paths import no_temporary_folder
from flashmem.program import Program
from flashmem.runtime.devices import Device
from flashmem.runtime.kernel_list import SMALL_GRID, Size, Use, Wanted, variant
from flashmem.runtime.program_cache import ProgramCache

Keep = Callable[[str, bytes], None]
"""Takes the key of a kernel and its binary; called by several threads."""


class Builders:
    """Child processes that build what is submitted, as many as there are processors. `close` ends them."""

    def __init__(self, keep: Keep, advice: str, *, idle: bool = False) -> None:
        """Nothing starts yet. `keep` takes what is built; `advice` ends the sentence of what fails. `idle`: children get what
        time nobody else wants.
        """
        self._keep, self._advice, self._idle = keep, advice, idle
        self.submitted = set[str]()
        self._device: Device | None = None
        self._finished = 0
        self._failure: str | None = None
        self._abandoned = False
        self._waiting: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # why a kernel cannot be built, or None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._children: list[subprocess.Popen[str]] = []
        self._threads: list[threading.Thread] = []

    @property
    def fraction(self) -> float:
        """How much of what was submitted is done."""
        return self._finished / max(1, len(self.submitted))

    def submit(self, wanted: Mapping[str, Wanted], program: Program, device: Device, *, busy: int = 0) -> None:
        """Build kernels of `program`, by key: the longest first, each by a child that is free.

        `busy` processors have something else to do, until `step` waits.

        Raises:
            RunError: no process can be started.
        """
        jobs = [_job(key, each, program, device) for key, each in wanted.items()]
        for job in sorted(jobs, key=lambda job: -len(job["text"]) * max(1, len(job["trials"]))):
            self.submitted.add(job["key"])
            self._waiting.put(job)
        self._device = device
        self._start_children(max(1, _processors() - busy))

    def _start_children(self, most: int) -> None:
        """As many children as jobs wait for, `most` of them in all."""
        assert self._device is not None
        self._folder = self._folder or _folder()
        for _ in range(min(self._waiting.qsize(), most - len(self._children))):
            with blocked():  # an interrupt now would leave a child that nobody knows of
                child = _start(self._device, self._folder.name, self._advice)
                self._children.append(child)
            if self._abandoned:
                child.kill()
            if self._idle:
                _only_when_idle(child.pid)
            thread = threading.Thread(target=_feed, args=(child, self._waiting, self._done, self._keep))
            self._threads.append(thread)
            thread.start()

    def step(self, *, wait: bool = True) -> bool:
        """Take note of one kernel that is done. False where none is left, one has failed, or (not `wait`) none is done now."""
        if self._abandoned:
            self._failure = "nobody wants the kernels any more"
        if self._finished == len(self.submitted) or self._failure is not None:
            return False
        if wait:
            self._start_children(_processors())
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
        """For another thread: who waits for what is built is told that it has failed, now."""
        self._abandoned = True
        for child in list(self._children):
            child.kill()

    def close(self) -> None:
        """End the children, whatever they do."""
        for child in self._children:
            child.kill()
            self._waiting.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        for child in self._children:
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with suppress(OSError):  # what is left of a line that a child did not take
                        pipe.close()
        if self._folder is not None:
            self._folder.cleanup()


def build_apart(
    wanted: Mapping[str, Wanted],
    program: Program,
    device: Device,
    cache: ProgramCache,
    begin: Callable[[Builders], None] | None = None,
) -> dict[str, bytes]:
    """The binaries of kernels of `program`, by key: built by child processes for a session, and left in `cache` if it can be.

    With `begin` they are wanted some time: children get what time nobody else wants. `begin` is given what builds them, which
    another thread may `abandon`.

    Raises:
        RunError: the driver refuses a kernel, or ends the process that builds it; or there can be no such process.
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
    return made


def _job(key: str, wanted: Wanted, program: Program, device: Device) -> dict[str, Any]:
    """What a child needs to know of one kernel: its text, and a launch for each variant."""
    trials: list[dict[str, Any]] = []
    if device.compiles_at_launch:
        first: dict[str, Use] = {}
        for use in wanted.uses:
            first.setdefault(variant(use.size), use)
        trials = [{"size": _trial_size(use.size), "args": _arguments(use, program)} for use in first.values()]
    return {"key": key, "name": wanted.name, "text": wanted.text, "options": program.build_options, "trials": trials}


def _trial_size(size: Size) -> Size:
    """The smallest launch of the same variant: one work-group, or as many in one direction as make a large grid."""
    whole, group = size
    if group is None:
        return size
    longest = whole.index(max(whole))
    least = list(group)
    if whole[longest] >= SMALL_GRID:
        least[longest] = min(whole[longest], -(-(SMALL_GRID + 1) // group[longest]) * group[longest])
    return tuple(least), group


def _arguments(use: Use, program: Program) -> list[list[Any]]:
    """The arguments of a launch as kinds and sizes: memory of these sizes is all that the kernel reaches."""
    tensors = {tensor.name: tensor.nbytes for tensor in program.tensors}
    slices = program.readable()
    found: list[list[Any]] = []
    for arg in use.args:
        if arg.kind == "slice":
            found.append(_memory(slices[str(arg.value)]))
        elif arg.kind in ("tensor", "constant"):
            found.append(["buffer", tensors[str(arg.value)] if arg.kind == "tensor" else arg.nbytes])
        else:
            found.append([arg.kind, arg.value])
    if use.ride is not None:
        found += use.ride.arguments(lambda part: (["buffer", part.file_bytes], 0), _memory, lambda number: ["int", number])
    return found


def _memory(part: Any) -> list[Any]:
    return ["image", part.width, part.height, part.channel] if part.is_image else ["buffer", part.file_bytes]


def _folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="flashmem-build-", ignore_cleanup_errors=True)
    except OSError as error:
        raise no_temporary_folder(error) from error


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(device: Device, folder: str, advice: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "flashmem.runtime.kernel_worker", device.key, folder],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        raise RunError(f"no process that builds kernels can be started ({error.strerror}); {advice}") from error


def _only_when_idle(process: int) -> None:
    """Run a process when a processor has nothing else to do, where the system has such a thing."""
    if hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):
            os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))


def _feed(
    child: subprocess.Popen[str],
    waiting: queue.SimpleQueue[dict[str, Any] | None],
    done: queue.SimpleQueue[str | None],
    keep: Keep,
) -> None:
    """Give one child one job after the other, until there is none but None, and hand what it makes to `keep`."""
    assert child.stdin is not None and child.stdout is not None
    while (job := waiting.get()) is not None:
        try:
            child.stdin.write(json.dumps(job) + "\n")
            child.stdin.flush()
            answer = json.loads(child.stdout.readline() or "null")
            if answer is not None and answer["error"] is None:
                keep(job["key"], Path(answer["file"]).read_bytes())
        except (OSError, ValueError):
            answer = None
        if answer is None:
            done.put(f"the driver ended the process that built the kernel {job['name']}")
            return
        error = answer["error"]
        done.put(None if error is None else f"the kernel {job['name']} cannot be built: {error}")
