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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashmem.bundle import Bundle, replace_binaries
from flashmem.errors import FlashmemWarning, RunError, UserError
from flashmem.interrupts import blocked
from flashmem.paths import VARIABLE, can_be_written, no_temporary_folder
from flashmem.program import Program, lane_kind
from flashmem.request import choose_mode, device_for
from flashmem.runtime.devices import Device, descriptor_for
from flashmem.runtime.kernel_list import SMALL_GRID, Size, Use, Wanted, variant, wanted_kernels
from flashmem.runtime.lanes import layer_moves
from flashmem.runtime.program_cache import ProgramCache, kernel_key, packed_entries

Report = Callable[[float], None]


@dataclass(frozen=True)
class Built:
    """What a bundle's sessions on `device` ask the cache for: `keys`; `built` of them were missing, and are there now."""

    device: Device
    keys: tuple[str, ...]
    built: int


def build_kernels(bundle: Bundle, device: str = "auto", report: Report = lambda fraction: None) -> Built | None:
    """Fill the program cache with the kernels of `bundle`, for a session as it is opened without options.

    Args:
        bundle: what was compiled.
        device: what it was compiled for, as `flashmem.compile` takes it.
        report: called with the fraction done.

    Returns:
        None where that device is not here: nothing is built then.

    Raises:
        RunError: the driver refuses a kernel, or ends the process that builds it.
    """
    here = device_for(bundle.descriptor.name, device)
    if here is None:
        return None
    program, plan = bundle.program, bundle.plan
    slices = {part.name: part for part in program.slices}
    try:
        mode = choose_mode(
            descriptor_for(here), path=program.memory_path, planned=bundle.meta.get("mode"), strategy=plan.strategy
        )
    except UserError:  # a descriptor of that name, but not of this device
        return None
    moves = layer_moves(plan, slices, lane_kind(program)) if mode == "interleave" else {}
    plain, lane = wanted_kernels(program, bundle.source, moves)
    cache, options = ProgramCache(), program.build_options
    wanted = {kernel_key(here, each, options): each for each in (*plain, *lane)}
    missing = [key for key in wanted if cache.read(key) is None]
    if missing and not can_be_written(cache.folder):
        warnings.warn(
            f"the program cache {cache.folder} cannot be written, so kernels are built when they first run; set "
            f"{VARIABLE} to a folder that can",
            FlashmemWarning,
            stacklevel=3,
        )
        return None
    if missing:
        report(0.0)
        jobs = [_job(key, wanted[key], program, here) for key in missing]
        _run(jobs, here, cache, report)
    return Built(here, tuple(wanted), len(missing))


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
    if use.ride is not None:
        found += use.ride.arguments(lambda part: ["buffer", part.file_bytes], _memory, lambda number: ["int", number])
    return found


def _memory(part: Any) -> list[Any]:
    return ["image", part.width, part.height, part.channel] if part.is_image else ["buffer", part.file_bytes]


def _run(jobs: list[dict[str, Any]], device: Device, cache: ProgramCache, report: Report) -> None:
    """All jobs, each by a child that is free. Ends the children, whatever happens."""
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for job in sorted(jobs, key=lambda job: -len(job["text"]) * max(1, len(job["trials"]))):
        waiting.put(job)
    done: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # why a kernel cannot be built, or None
    children: list[subprocess.Popen[str]] = []
    threads: list[threading.Thread] = []
    with _folder() as folder:
        try:
            for _ in range(min(len(jobs), _processors())):
                with blocked():  # an interrupt now would leave a child that nobody knows of
                    children.append(_start(device, folder))
                threads.append(threading.Thread(target=_feed, args=(children[-1], waiting, done, cache)))
                threads[-1].start()
            for number in range(1, len(jobs) + 1):
                failure = done.get()
                if failure is not None:
                    raise RunError(f"{failure}; compile with --no-build to leave the kernels to the first run")
                report(number / len(jobs))
        finally:
            for child in children:
                child.kill()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            for child in children:
                child.wait()
                for pipe in (child.stdin, child.stdout):
                    if pipe is not None:
                        with suppress(OSError):  # what is left of a line that a child did not take
                            pipe.close()


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
    waiting: queue.SimpleQueue[dict[str, Any]],
    done: queue.SimpleQueue[str | None],
    cache: ProgramCache,
) -> None:
    """Give one child one job after the other, and put what it makes into the cache."""
    assert child.stdin is not None and child.stdout is not None
    while True:
        try:
            job = waiting.get_nowait()
        except queue.Empty:
            return
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
