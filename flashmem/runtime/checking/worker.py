"""Check worker: a process that checks kernels on a device, one job per line of stdin, one answer per line of stdout.

A miscompiled kernel may write anywhere, or end the process: that is an answer too.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashmem.base.child_processes import end_with


def main() -> None:
    """Answer jobs until stdin or the parent ends. Arguments: as those of `flashmem.runtime.kernels.build_worker`."""
    if not end_with(int(sys.argv[3])):
        return
    # PoCL's cache of this process, in the folder that the parent removes: what a check compiles is used once.
    os.environ["POCL_CACHE_DIR"] = str(Path(sys.argv[2], f"pocl-{os.getpid()}"))
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a driver's output must not mix with the answers
    with suppress(BrokenPipeError):  # the parent no longer reads answers
        _answer(sys.argv[1], sys.argv[4] or None, answers)


def _answer(key: str, driver: str | None, answers: Any) -> None:
    from flashmem.base.errors import RunError
    from flashmem.runtime.checking.check import check_kernel
    from flashmem.runtime.checking.trials import Trial
    from flashmem.runtime.opencl.context import Context
    from flashmem.runtime.opencl.discovery import list_devices, use_driver

    use_driver(driver)
    device = next((device for device in list_devices() if device.key == key), None)
    context = Context(device) if device is not None else None
    for line in sys.stdin:
        job = json.loads(line)
        try:
            if context is None:
                raise RunError("the device is gone; try again")
            verdict = asdict(check_kernel(context, Trial.from_json(job["trial"]), job["options"]))
        except RunError as error:
            verdict = {"error": str(error)}
        except Exception as error:  # of the check itself, which says nothing of the driver
            verdict = {"error": f"{type(error).__name__}: {error}"}
        answers.write(f"{json.dumps(verdict)}\n".encode())


if __name__ == "__main__":
    main()
