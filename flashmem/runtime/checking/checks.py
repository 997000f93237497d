"""Checks of all kernels of a program, in child processes, and what follows from them."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flashmem.base.errors import RunError
from flashmem.base.threads import started
from flashmem.program.program import Program
from flashmem.runtime.checking.check import Verdict
from flashmem.runtime.checking.trials import Trial, distinct_trials
from flashmem.runtime.kernels.build_processes import WorkFolder
from flashmem.runtime.kernels.children import Child, processors
from flashmem.runtime.kernels.required import RequiredKernel
from flashmem.runtime.kernels.verdicts import UNOPTIMISED, Finding, Verdicts, text_key
from flashmem.runtime.opencl.device import Device

LONGEST = 300.0
"""Seconds after which a check that does not end is wrong: a kernel may wait for ever."""

_MODULE = "flashmem.runtime.checking.worker"

Report = Callable[[float], None]


@dataclass(frozen=True)
class CheckedKernel:
    """One launch that was checked. `known`: by an earlier check. `verdict.wrong` is that of the optimised kernel."""

    trial: Trial
    verdict: Verdict
    finding: Finding
    known: bool = False


def check_kernels(
    kernels: Iterable[RequiredKernel],
    program: Program,
    device: Device,
    *,
    again: bool = False,
    report: Report = lambda fraction: None,
) -> list[CheckedKernel]:
    """Check the launches of kernels of `program` that no earlier check has found right, and keep the findings.

    A kernel that is wrong is checked without optimisation too, and used so if that is right. `again`: check all of them.
    `report` is called with the fraction done.

    Raises:
        RunError: no process that checks can be started.
        UserError: no temporary folder can be written.
    """
    verdicts, options = Verdicts(device), program.build_options
    trials = distinct_trials(kernels, program)
    keys = {trial.key: text_key(device, trial.text, options) for trial in trials}

    def is_known(trial: Trial) -> bool:
        finding = verdicts[keys[trial.key]]
        return not again and (bool(finding.wrong) or trial.key in finding.right)

    todo = [trial for trial in trials if not is_known(trial)]
    done = _answers(todo, options, device, report) if todo else {}
    wrong = {keys[trial.key] for trial in todo if done[trial.key].wrong}
    repaired = [trial for trial in trials if keys[trial.key] in wrong]
    slow = _answers(repaired, (*options, UNOPTIMISED), device, report) if repaired else {}
    found: dict[str, Finding] = {}
    for trial in todo:
        key = keys[trial.key]
        before = found.get(key, Finding(name=trial.name))
        if key not in wrong:
            if done[trial.key].compared or not done[trial.key].note:
                found[key] = replace(before, right=(*before.right, trial.key))
        elif done[trial.key].wrong and not before.wrong:
            helps = all(not slow[other.key].wrong for other in repaired if keys[other.key] == key)
            found[key] = Finding((), done[trial.key].wrong, (UNOPTIMISED,) if helps else None, trial.name)
    if found:
        verdicts.keep(found)
    return [
        CheckedKernel(trial, done.get(trial.key, Verdict()), verdicts[keys[trial.key]], known=trial.key not in done)
        for trial in trials
    ]


def _answers(trials: Sequence[Trial], options: Sequence[str], device: Device, report: Report) -> dict[str, Verdict]:
    """The verdict of each trial, by its key: those of the longest texts first, each by a free child."""
    waiting: queue.SimpleQueue[Trial] = queue.SimpleQueue()
    for trial in sorted(trials, key=lambda trial: -len(trial.text)):
        waiting.put(trial)
    done: queue.SimpleQueue[tuple[str, Verdict] | BaseException] = queue.SimpleQueue()
    folder = WorkFolder()
    try:
        arguments = (waiting, done, options, device, Path(folder.name))
        threads = [started(_work, "flashmem-check", *arguments) for _ in range(min(processors(), len(trials)))]
        found: dict[str, Verdict] = {}
        while len(found) < len(trials):
            answer = done.get()
            if isinstance(answer, BaseException):
                raise RunError(f"kernels cannot be checked: {answer}; free memory and try again") from answer
            found[answer[0]] = answer[1]
            report(len(found) / len(trials))
        for thread in threads:
            thread.join()
    finally:
        folder.remove()
    return found


def _work(
    waiting: queue.SimpleQueue[Trial],
    done: queue.SimpleQueue[tuple[str, Verdict] | BaseException],
    options: Sequence[str],
    device: Device,
    folder: Path,
) -> None:
    """Give waiting trials to a child, and to a new one after one has ended."""
    child: Child | None = None
    errors = folder / f"{os.getpid()}-{threading.get_ident()}.txt"
    try:
        while True:
            try:
                trial = waiting.get_nowait()
            except queue.Empty:
                return
            child = child or Child(_MODULE, device, folder, errors)
            answer = child.ask({"trial": trial.to_json(), "options": list(options)}, LONGEST)
            if answer is None:
                verdict = Verdict(f"{trial.name}: the driver ended the process{child.last_line()}")
            elif isinstance(answer, str):
                verdict = Verdict(f"{trial.name}: the check {answer}")
            elif "error" in answer:
                verdict = Verdict(note=f"not checked: {answer['error']}")
            else:
                verdict = Verdict(**answer)
            if not isinstance(answer, dict):
                child.close()
                child = None
            done.put((trial.key, verdict))
    except BaseException as error:
        done.put(error)
    finally:
        if child is not None:
            child.close()
