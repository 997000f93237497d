"""Kernel worker: a process that builds and checks kernels, one job per line of stdin, one answer per line of stdout.

A build compiles a kernel for the program cache. A driver that compiles at the first launch (PoCL) requires such a launch: with
the scalar arguments of a real one, and the smallest grid of the same variant. It has zeroed memory of the real sizes, which no
kernel accesses as a whole.

A check runs one launch of a compiled kernel with drawn memory (`flashmem.runtime.checking`). A miscompiled kernel may write
anywhere, or end the process: that is an answer too.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashmem.base.child_processes import end_with

_POCL_FOLDER = "POCL_CACHE_DIR"


def main() -> None:
    """Answer jobs until stdin or the parent ends.

    Arguments: the key of the device; the folder for results, which the parent removes; the parent's process id; the driver of
    the device, or nothing if all must be loaded.
    """
    if not end_with(int(sys.argv[3])):
        return
    answers = os.fdopen(os.dup(1), "wb", buffering=0)  # unbuffered, so that nothing is left to write at the end
    os.dup2(2, 1)  # a driver's output must not mix with the answers
    folder = Path(sys.argv[2], str(os.getpid()))
    try:
        (folder / "pocl").mkdir(parents=True)
    except FileNotFoundError:  # the parent has ended and removed the folder
        return
    os.environ[_POCL_FOLDER] = str(folder / "pocl")  # of this process alone, so that it holds only what PoCL made of one kernel
    with suppress(BrokenPipeError):  # the parent no longer reads answers
        for line in sys.stdin:
            answers.write(f"{json.dumps(_answer(json.loads(line), folder))}\n".encode())
    shutil.rmtree(folder, ignore_errors=True)  # stdin ends only if the parent was killed


def _answer(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    from flashmem.base.errors import RunError

    try:
        context = _context()
        return _build(context, job, folder) if "build" in job else _check(context, job)
    except (RunError, OSError) as failure:
        return {"error": str(failure)}
    except Exception as error:  # of our own, which says nothing of the driver
        return {"error": f"{type(error).__name__}: {error}"}


_opened: list[Any] = []


def _context() -> Any:
    """The context of this process. Raises RunError."""
    from flashmem.base.errors import RunError
    from flashmem.runtime.opencl.context import Context
    from flashmem.runtime.opencl.discovery import driver_failures, list_devices, use_driver

    if not _opened:
        use_driver(sys.argv[4] or None)
        device = next((device for device in list_devices() if device.key == sys.argv[1]), None)
        if device is None:
            raise RunError("; ".join(("the device is gone; try again", *driver_failures())))
        _opened.append(Context(device))
    return _opened[0]


# -- builds


def _build(context: Any, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write the compiled kernel, including the variants for the launches of the job, to a file."""
    from flashmem.runtime.checking.trial import TrialArgument

    name = job["build"]
    program = context.build(job["text"], job["options"])
    queue = context.queue()
    for launch in job["launches"]:
        whole, group = launch["size"]
        # A kernel does not keep its arguments alive.
        arguments = [_fill_with_zeros(context, TrialArgument(**argument)) for argument in launch["arguments"]]
        queue.launch(queue.prepare(program.kernel(name, arguments), tuple(whole), None if group is None else tuple(group)))
        queue.finish()
    if job["launches"]:
        _stand_in_for_the_general_one(folder / "pocl", name)
    else:
        program.check(name)
    made = folder / name
    made.write_bytes(program.binary())
    return {"file": str(made)}


def _fill_with_zeros(context: Any, argument: Any) -> Any:
    import numpy as np

    if argument.kind == "buffer":
        return context.scratch(np.frombuffer(mmap.mmap(-1, max(1, argument.nbytes)), np.uint8))
    if argument.kind == "image":
        return context.image(*argument.shape)
    return np.int32(argument.value) if argument.kind == "int" else np.float32(argument.value)


def _stand_in_for_the_general_one(pocl: Path, name: str) -> None:
    """Prevent PoCL from compiling a kernel again for launches of any size, which takes as long and is never used.

    PoCL finds the result for our launch in its place, and uses it if the user has disabled special variants.
    """
    made = sorted(pocl.glob(f"**/{name}/*/{name}.so"))
    if made and not os.environ.get("POCL_WORK_GROUP_SPECIALIZATION"):
        general = made[0].parent.parent / "0-0-0"
        general.mkdir(exist_ok=True)
        if not (general / made[0].name).exists():
            shutil.copyfile(made[0], general / made[0].name)


# -- checks


def _check(context: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Check one launch of a kernel: of its binary, if there is one that the driver takes, or else built here.

    `binaries`: by name, of the kernel and of a chain's parts.
    """
    from flashmem.base.errors import RunError
    from flashmem.runtime.checking.chains import check_chain
    from flashmem.runtime.checking.check import check_kernel
    from flashmem.runtime.checking.trial import Trial
    from flashmem.runtime.kernels.verdicts import UNOPTIMISED

    trial = Trial.from_json(job["check"])
    options = tuple(job["options"])
    binaries = job["binaries"]

    def compiled(which: Trial) -> Any:
        def make() -> Any:
            if which.name in binaries:
                with suppress(RunError):
                    return context.load(Path(binaries[which.name]).read_bytes(), options)
            return context.build(which.text, options)

        return _kept(trial.text, (which.text, options, binaries.get(which.name)), make)

    if trial.parts:
        return asdict(check_chain(context, trial, compiled(trial), compiled, whole=job["whole"]))
    twin = (trial.text, (*options, UNOPTIMISED), None)
    other = (lambda: _kept(trial.text, twin, lambda: context.build(*twin[:2]))) if job["whole"] else None
    return asdict(check_kernel(context, trial, compiled(trial), other))


_KEPT: dict[str, dict[Any, Any]] = {}
"""Programs of the text that is checked, and of its parts, which its launches share."""


def _kept(checked: str, key: tuple[str, tuple[str, ...], str | None], make: Callable[[], Any]) -> Any:
    if checked not in _KEPT:
        _KEPT.clear()
    programs = _KEPT.setdefault(checked, {})
    if key not in programs:
        programs[key] = make()
    return programs[key]


if __name__ == "__main__":
    main()
