"""Processes that build kernels.

Compilers inside of drivers use one processor and hundreds of megabytes, which stay with the process. So each kernel goes to a
child process (`flashmem.runtime.kernels.build_worker`), which builds it, runs it where the driver compiles at the first
launch, and leaves the binary in a file. Children are in a session of their own, where Ctrl-C does not reach them; they end
with their parent, and when a build takes longer than `LONGEST`. What compilers print is read where a child fails, and nowhere
else.

Each child is started by the thread that feeds it, and not by the one that asks: Linux ends a child with the thread that started
it (`children.end_with`).
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import select
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flashmem.base.child_processes import module_environment, python_module
from flashmem.base.errors import RunError
from flashmem.base.paths import no_temporary_folder, temporary_parent
from flashmem.bundle.version_directories import held
from flashmem.program.program import Program
from flashmem.runtime.kernels.cache_files import ProgramCache
from flashmem.runtime.kernels.required import SMALL_GRID, KernelLaunch, Size, Wanted, variant
from flashmem.runtime.opencl.compile_target import driver_variables
from flashmem.runtime.opencl.devices import Device
from flashmem.runtime.opencl.pocl import ROOM_BYTES

LONGEST = 600.0
"""Seconds that one kernel may take: hundreds of times what compilers take for the largest ones of shipped models."""
_LEFT_OVER = 60.0
"""Seconds after which a folder that nobody holds belongs to a process that was killed."""
_PREFIX = "flashmem-build-"

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
        self._folder: _Folder | None = None
        self._lock = threading.Lock()  # of what follows
        self._children: list[subprocess.Popen[bytes]] = []
        self._ended = False  # no child is wanted any more
        self._threads: list[threading.Thread] = []

    @property
    def fraction(self) -> float:
        """How much of what was submitted is done."""
        return self._finished / max(1, len(self.submitted))

    def submit(self, wanted: Mapping[str, Wanted], program: Program, device: Device, *, busy: int = 0) -> None:
        """Build kernels of `program`, by key: the longest first, each by a child that is free.

        `busy` processors have something else to do, until `step` waits.

        Raises:
            UserError: no temporary folder can be written.
        """
        self._folder = self._folder or _Folder()
        jobs = [_job(key, each, program, device) for key, each in wanted.items()]
        for job in sorted(jobs, key=lambda job: -len(job["text"]) * max(1, len(job["trials"]))):
            self.submitted.add(job["key"])
            self._waiting.put(job)
        self._device = device
        self._start_children(max(1, _processors() - busy))

    def _start_children(self, most: int) -> None:
        """As many children as jobs wait for, `most` of them in all."""
        for _ in range(min(self._waiting.qsize(), most - len(self._threads))):
            thread = threading.Thread(target=self._feed, name="flashmem-build", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _feed(self) -> None:
        """Start one child and give it one job after the other, until there is none but None, and keep what it makes."""
        assert self._device is not None and self._folder is not None
        child = None
        try:
            errors = Path(self._folder.name, f"{threading.get_ident()}.txt")
            child = _start(self._device, self._folder.name, errors)
            with self._lock:
                self._children.append(child)
                if self._ended:
                    child.kill()
            if self._idle:
                _only_when_idle(child.pid)
            while (job := self._waiting.get()) is not None:
                answer = _answer(child, job)
                if isinstance(answer, str):
                    self._done.put(answer)
                elif answer is None:
                    child.wait()  # so that all that it has printed is there
                    self._done.put(f"the driver ended the process that built the kernel {job['name']}{_last_line(errors)}")
                    return
                else:
                    self._keep(job["key"], Path(answer["file"]).read_bytes())
                    self._done.put(None)
        except OSError as error:
            what = (
                "no process that builds kernels can be started" if child is None else "a kernel that was built cannot be read"
            )
            self._done.put(f"{what} ({error.strerror})")
        except BaseException as error:  # whoever waits is told, whatever it was
            self._done.put(f"kernels cannot be built: {type(error).__name__}: {error}")
        finally:
            if child is not None:
                child.kill()

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
        self._end_children()

    def _end_children(self) -> None:
        with self._lock:
            self._ended = True
            for child in self._children:
                child.kill()

    def close(self) -> None:
        """End the children, whatever they do."""
        self._end_children()
        for _ in self._threads:
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
            self._folder.remove()


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
        RunError: the driver refuses a kernel, ends the process that builds it, or does not end the build; or there can be no
            such process.
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


def _job(key: str, wanted: Wanted, program: Program, device: Device) -> dict[str, Any]:
    """What a child needs to know of one kernel: its text, and a launch for each variant."""
    trials: list[dict[str, Any]] = []
    if device.compiles_at_launch:
        first: dict[str, KernelLaunch] = {}
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


def _arguments(use: KernelLaunch, program: Program) -> list[list[Any]]:
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


class _Folder:
    """A temporary folder, held as long as this process lives, and emptied when it no longer needs it."""

    def __init__(self) -> None:
        """Make it, and remove those of processes that were killed.

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
        """Nothing of it stays."""
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


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(device: Device, folder: str, errors: Path) -> subprocess.Popen[bytes]:
    """A child that builds for `device`, its driver started with the variables of this process's; it prints to `errors`."""
    environment = {name: value for name, value in os.environ.items() if name not in driver_variables(device.platform)}
    with errors.open("wb") as stderr:
        return subprocess.Popen(
            python_module("flashmem.runtime.kernels.build_worker", device.key, folder, str(os.getpid())),
            env=module_environment({**environment, **device.variables}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )


def _only_when_idle(process: int) -> None:
    """Run a process when a processor has nothing else to do, where the system has such a thing."""
    if hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):
            os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))


def _answer(child: subprocess.Popen[bytes], job: dict[str, Any]) -> dict[str, Any] | str | None:
    """What a child says of a job; why the kernel cannot be built, as a sentence; or None if the child has ended."""
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(f"{json.dumps(job)}\n".encode())
        child.stdin.flush()
    except OSError:
        return None
    line, end = b"", time.monotonic() + LONGEST
    while not line.endswith(b"\n"):
        if not select.select([child.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
            child.kill()
            return f"the kernel {job['name']} was not built within {LONGEST:.0f} s"
        part = os.read(child.stdout.fileno(), 1 << 16)
        if not part:
            return None
        line += part
    answer: dict[str, Any] = json.loads(line)
    error = answer["error"]
    return answer if error is None else f"the kernel {job['name']} cannot be built: {error}"


def _last_line(file: Path) -> str:
    """What a child printed last, in brackets."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((f" ({line.strip()})" for line in reversed(lines) if line.strip()), "")
