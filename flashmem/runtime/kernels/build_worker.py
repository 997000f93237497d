"""A process that builds kernels for the program cache: one job in a line of stdin, one answer in a line of stdout.

A driver that compiles at the first launch (PoCL) is given that launch: with the numbers of a layer, memory of the sizes that it
has, all zero and never touched as a whole, and a grid that is as small as the variant allows.
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
    """Answer until stdin ends, or whoever asks does. Arguments: the key of the device; a folder for what is made, which whoever
    asks removes; the process that asks.
    """
    if not end_with(int(sys.argv[3])):
        return
    answers = os.fdopen(os.dup(1), "wb", buffering=0)  # nothing is left to be written when this process ends
    os.dup2(2, 1)  # what a driver prints is no answer
    key, folder = sys.argv[1], Path(sys.argv[2], str(os.getpid()))
    # PoCL's own cache, for this process only: what it made of one kernel is all there.
    pocl = folder / "pocl"
    try:
        folder.mkdir()
        pocl.mkdir()
    except FileNotFoundError:  # whoever asked is gone, and has removed the folder
        return
    os.environ[_POCL_FOLDER] = str(pocl)
    with suppress(BrokenPipeError):  # whoever asked wants no answer any more
        _answer(key, folder, pocl, answers)
    shutil.rmtree(folder, ignore_errors=True)  # stdin ends only where whoever asked was killed


def _answer(key: str, folder: Path, pocl: Path, answers: Any) -> None:
    from flashmem.base.errors import RunError
    from flashmem.runtime.opencl.context import Context, list_devices

    device = next((device for device in list_devices() if device.key == key), None)
    context = Context(device) if device is not None else None
    for line in sys.stdin:
        job = json.loads(line)
        made, error = folder / job["name"], None
        try:
            if context is None:
                raise RunError("the device is gone; try again")
            made.write_bytes(_built(context, job, pocl))
        except (RunError, OSError) as failure:
            error = str(failure)
        answers.write(f"{json.dumps({'error': error, 'file': str(made)})}\n".encode())


def _built(context: Any, job: dict[str, Any], pocl: Path) -> bytes:
    """The kernel's binary, complete for the launches of the job."""
    program = context.build(job["text"], job["options"])
    queue = context.queue()
    for trial in job["trials"]:
        whole, group = trial["size"]
        arguments = [_argument(context, *arg) for arg in trial["args"]]  # a kernel does not keep them alive
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
    """PoCL is about to compile the kernel once more, for launches of any kind: as long as all else takes, and never used.
    Where it would put that, it finds what it made for a launch of ours. Who has switched special variants off does use it.
    """
    made = sorted(pocl.glob(f"**/{name}/*/{name}.so"))
    if made and not os.environ.get("POCL_WORK_GROUP_SPECIALIZATION"):
        general = made[0].parent.parent / "0-0-0"
        general.mkdir(exist_ok=True)
        if not (general / made[0].name).exists():
            shutil.copyfile(made[0], general / made[0].name)


if __name__ == "__main__":
    main()
