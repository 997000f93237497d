"""The child of `imitations`: checks a kernel whose driver is imitated to compile another text."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np

from flashmem.base.child_processes import end_with
from flashmem.base.errors import RunError
from flashmem.interpreter.launch import interpret_kernel
from flashmem.runtime.checking import check
from flashmem.runtime.checking.drawing import DRAWS
from flashmem.runtime.checking.trial import Trial
from flashmem.runtime.kernels.verdicts import UNOPTIMISED
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.opencl.discovery import list_devices, use_driver
from tests.support.miscompiled import MiscompilingContext


def main() -> None:
    """Answer jobs until stdin or the parent ends. Arguments: as those of `flashmem.runtime.kernels.worker`."""
    if not end_with(int(sys.argv[3])):
        return
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    use_driver(sys.argv[4] or None)
    device = next(device for device in list_devices() if device.key == sys.argv[1])
    for line in sys.stdin:
        job = json.loads(line)
        answers.write(f"{json.dumps(_answer(device, job))}\n".encode())


def _answer(device: Any, job: dict[str, Any]) -> dict[str, Any]:
    trial, options, text = Trial.from_json(job["trial"]), job["options"], job["text"]
    try:
        context = MiscompilingContext(device, lambda source: text)
        program = context.build(trial.text, options)
        verdict = check.check_kernel(context, trial, program, lambda: context.build(trial.text, [*options, UNOPTIMISED]))
    except RunError as error:  # the driver refuses it
        return {"effect": text != trial.text, "wrong": str(error)}
    if verdict.wrong or text == trial.text:
        return {"effect": True, "wrong": verdict.wrong}
    return {"effect": _differs(Context(device), trial, options, text), "wrong": ""}


def _differs(context: Context, trial: Trial, options: list[str], text: str) -> bool:
    """Whether the changed kernel writes other bits than the right one."""
    launch = check.TrialRun(context, trial, interpret_kernel(trial.text, trial.name, check.forms(context, trial.text)))
    right, changed = context.build(trial.text, options), context.build(text, options)
    for draw in range(len(DRAWS)):
        results = [launch.results_of(program, draw) for program in (right, changed)]
        if any(not np.array_equal(results[0][place], results[1][place]) for place in results[0]):
            return True
    return False


if __name__ == "__main__":
    main()
