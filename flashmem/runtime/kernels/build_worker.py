"""Kernel build worker: a process that compiles kernels for the program cache, one job per line of stdin.

It writes one answer per line of stdout. A driver that compiles at the first launch (PoCL) requires such a launch. That launch
has the scalar arguments of a real one, and the smallest grid of the same variant. It has zeroed memory of the real sizes, which
no kernel accesses as a whole.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import sys
from contextlib import suppress
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
    key, folder = sys.argv[1], Path(sys.argv[2], str(os.getpid()))
    # PoCL's cache of this process alone, so that it holds only what PoCL made of one kernel.
    pocl = folder / "pocl"
    try:
        folder.mkdir()
        pocl.mkdir()
    except FileNotFoundError:  # the parent has ended and removed the folder
        return
    os.environ[_POCL_FOLDER] = str(pocl)
    with suppress(BrokenPipeError):  # the parent no longer reads answers
        _answer(key, sys.argv[4] or None, folder, pocl, answers)
    shutil.rmtree(folder, ignore_errors=True)  # stdin ends only if the parent was killed


def _answer(key: str, driver: str | None, folder: Path, pocl: Path, answers: Any) -> None:
    from flashmem.base.errors import RunError
    from flashmem.runtime.opencl.context import Context
    from flashmem.runtime.opencl.discovery import driver_failures, list_devices, use_driver

    use_driver(driver)
    device = next((device for device in list_devices() if device.key == key), None)
    context, why = None, "; ".join(("the device is gone; try again", *driver_failures()))
    if device is not None:
        try:
            context = Context(device)
        except RunError as failure:
            why = str(failure)
    for line in sys.stdin:
        job = json.loads(line)
        made, error = folder / job["name"], None
        try:
            if context is None:
                raise RunError(why)
            made.write_bytes(_built(context, job, pocl))
        except (RunError, OSError) as failure:
            error = str(failure)
        answers.write(f"{json.dumps({'error': error, 'file': str(made)})}\n".encode())


def _built(context: Any, job: dict[str, Any], pocl: Path) -> bytes:
    """The compiled kernel, including the variants for the launches of the job."""
    program = context.build(job["text"], job["options"])
    queue = context.queue()
    for trial in job["trials"]:
        whole, group = trial["size"]
        arguments = [_argument(context, *arg) for arg in trial["args"]]  # a kernel does not keep its arguments alive
        kernel = program.kernel(job["name"], arguments)
        queue.launch(queue.prepare(kernel, tuple(whole), None if group is None else tuple(group)))
        queue.finish()
    if job["trials"]:
        _stand_in_for_the_general_one(pocl, job["name"])
    else:
        program.check(job["name"])
    binary: bytes = program.binary()
    return binary


def _argument(context: Any, kind: str, *value: Any) -> Any:
    import numpy as np

    if kind == "buffer":
        return context.scratch(np.frombuffer(mmap.mmap(-1, max(1, value[0])), np.uint8))
    if kind == "image":
        return context.image(*value)
    return np.int32(value[0]) if kind == "int" else np.float32(value[0])


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


if __name__ == "__main__":
    main()
