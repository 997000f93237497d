"""Kernels built ahead of the first run, in processes of their own: the program cache is full before anything runs.

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
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from flashmem.bundle import Bundle, replace_binaries
from flashmem.device import DeviceDescriptor, TransferMode
from flashmem.errors import FlashmemWarning, RunError, UserError
from flashmem.interrupts import blocked
from flashmem.paths import VARIABLE, can_be_written, no_temporary_folder
from flashmem.planning.plan import OverlapPlan, Strategy
from flashmem.program import Program, Source, lane_kind
from flashmem.request import choose_mode, device_for
from flashmem.runtime.devices import Device, descriptor_for
from flashmem.runtime.kernel_list import SMALL_GRID, Size, Use, Wanted, variant, wanted_kernels
from flashmem.runtime.lanes import LayerMoves, layer_moves
from flashmem.runtime.program_cache import ProgramCache, kernel_key, packed_entries

Report = Callable[[float], None]


@dataclass(frozen=True)
class Built:
    """What a bundle's sessions on `device` ask the cache for: `keys`; `built` of them were missing, and are there now."""

    device: Device
    keys: tuple[str, ...]
    built: int


@dataclass(frozen=True)
class Wish:
    """A program whose kernels are wanted, as a session plays it that is opened without options. `planned`: the transfer mode
    that it is planned for. `plan`: None as long as there is none; nothing is known then of kernels that stream.
    """

    program: Program
    source: Source
    descriptor: DeviceDescriptor
    strategy: Strategy
    planned: TransferMode | None
    plan: OverlapPlan | None = None


class KernelBuilder:
    """Fills the program cache while its owner goes on. Used in a `with`: to leave it ends the child processes."""

    def __init__(self, device: str = "auto", report: Report = lambda fraction: None) -> None:
        """Nothing starts yet.

        Args:
            device: what is compiled for, as `flashmem.compile` takes it.
            report: called with the fraction done, in `begin`, `poll` and `finish`.
        """
        self._asked, self._report, self._cache = device, report, ProgramCache()
        self._submitted = set[str]()
        self._waiting: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # why a kernel cannot be built, or None
        self._finished = 0
        self._failure: str | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._children: list[subprocess.Popen[str]] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def begin(self, wish: Wish) -> None:
        """Start to build what is missing of the kernels of a program; to ask again costs nothing.

        Nothing is built if the device is not here, or the cache cannot be written.

        Raises:
            RunError: no process can be started.
        """
        self._begin(wish)

    def poll(self) -> None:
        """Report how far it is. Does not wait."""
        while self._finished < len(self._submitted):
            try:
                self._note(self._done.get_nowait())
            except queue.Empty:
                return

    def finish(self, bundle: Bundle) -> Built | None:
        """Wait until all kernels of `bundle` are in the program cache.

        Returns:
            None where its device is not here, or the cache cannot be written, with a warning: nothing is built then.

        Raises:
            RunError: the driver refuses a kernel, or ends the process that builds it.
        """
        planned, plan = bundle.meta.get("mode"), bundle.plan
        found = self._begin(Wish(bundle.program, bundle.source, bundle.descriptor, plan.strategy, planned, plan))
        if found is None:
            return None
        device, keys, missing = found
        if missing:
            warnings.warn(
                f"the program cache {self._cache.folder} cannot be written, so kernels are built when they first run; set "
                f"{VARIABLE} to a folder that can",
                FlashmemWarning,
                stacklevel=3,
            )
            return None
        if self._finished < len(self._submitted):
            self._start_children(device, _processors())
        while self._finished < len(self._submitted) and self._failure is None:
            self._note(self._done.get())
        if self._failure is not None:
            raise RunError(f"{self._failure}; compile with --no-build to leave the kernels to the first run")
        return Built(device, keys, len(self._submitted))

    def _begin(self, wish: Wish) -> tuple[Device, tuple[str, ...], bool] | None:
        """As `begin`: the device, the keys of all kernels, and whether some are missing that cannot be built."""
        device = device_for(wish.descriptor.name, self._asked)
        if device is None:
            return None
        program = wish.program
        try:
            mode = choose_mode(descriptor_for(device), path=program.memory_path, planned=wish.planned, strategy=wish.strategy)
        except UserError:  # a descriptor of that name, but not of this device
            return None
        moves: Mapping[int, LayerMoves] = {}
        if mode == "interleave":
            if wish.plan is None:
                return None
            moves = layer_moves(wish.plan, {part.name: part for part in program.slices}, lane_kind(program))
        plain, lane = wanted_kernels(program, wish.source, moves)
        options = program.build_options
        wanted = {kernel_key(device, each, options): each for each in (*plain, *lane)}
        missing = [key for key in wanted if key not in self._submitted and self._cache.read(key) is None]
        if missing and not can_be_written(self._cache.folder):
            return device, tuple(wanted), True
        if missing:
            self._submit([_job(key, wanted[key], program, device) for key in missing], device)
        return device, tuple(wanted), False

    def _submit(self, jobs: list[dict[str, Any]], device: Device) -> None:
        """The longest first; each goes to a child that is free."""
        for job in sorted(jobs, key=lambda job: -len(job["text"]) * max(1, len(job["trials"]))):
            self._submitted.add(job["key"])
            self._waiting.put(job)
        self._report(self._finished / len(self._submitted))
        self._start_children(device, max(1, _processors() - 1))  # one is busy with the weights

    def _start_children(self, device: Device, most: int) -> None:
        """As many children as jobs wait for, `most` of them in all."""
        self._folder = self._folder or _folder()
        for _ in range(min(self._waiting.qsize(), most - len(self._children))):
            with blocked():  # an interrupt now would leave a child that nobody knows of
                child = _start(device, self._folder.name)
                self._children.append(child)
            thread = threading.Thread(target=_feed, args=(child, self._waiting, self._done, self._cache))
            self._threads.append(thread)
            thread.start()

    def _note(self, failure: str | None) -> None:
        """One job is done."""
        self._finished += 1
        self._failure = self._failure or failure
        self._report(self._finished / len(self._submitted))

    def __exit__(self, *exception: object) -> None:
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
    slices = {part.name: part for part in program.slices}
    found: list[list[Any]] = []
    for arg in use.args:
        if arg.kind == "slice":
            found.append(_memory(slices[str(arg.value)]))
        elif arg.kind in ("tensor", "constant"):
            found.append(["buffer", tensors[str(arg.value)] if arg.kind == "tensor" else arg.nbytes])
        else:
            found.append([arg.kind, arg.value])
    if use.move is not None:
        move = use.move
        found += [["buffer", move.part.file_bytes], _memory(move.part)]
        found += [["int", number] for number in (move.first, move.count, move.width, move.pitch)]
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


def _start(device: Device, folder: str) -> subprocess.Popen[str]:
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
        raise RunError(
            f"no process that builds kernels can be started ({error.strerror}); compile with --no-build to leave them to the "
            "first run"
        ) from error


def _feed(
    child: subprocess.Popen[str],
    waiting: queue.SimpleQueue[dict[str, Any] | None],
    done: queue.SimpleQueue[str | None],
    cache: ProgramCache,
) -> None:
    """Give one child one job after the other, until there is none but None, and put what it makes into the cache."""
    assert child.stdin is not None and child.stdout is not None
    while (job := waiting.get()) is not None:
        try:
            child.stdin.write(json.dumps(job) + "\n")
            child.stdin.flush()
            answer = json.loads(child.stdout.readline() or "null")
            if answer is not None and answer["error"] is None:
                cache.write(job["key"], Path(answer["file"]).read_bytes())
        except (OSError, ValueError):
            answer = None
        if answer is None:
            done.put(f"the driver ended the process that built the kernel {job['name']}")
            return
        error = answer["error"]
        done.put(None if error is None else f"the kernel {job['name']} cannot be built: {error}")


def with_binaries(bundle: Bundle, built: Built | None) -> Bundle:
    """The same bundle, carrying what the cache has of the kernels that were `built`.

    Raises:
        UserError: their device is not here, or the bundle cannot be written.
    """
    if built is None:
        raise UserError(
            f"no device {bundle.descriptor.name} is here that kernels could be compiled for; leave --with-binaries out"
        )
    cache = ProgramCache()
    entries = {key: binary for key in built.keys if (binary := cache.read(key)) is not None}
    return replace_binaries(bundle, packed_entries(entries))
