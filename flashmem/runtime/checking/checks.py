"""Checks of all kernels of a program, in child processes, and what follows from them."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic

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


@dataclass
class Effort:
    """What checks may use. `abandon` ends them from another thread: what is not checked then is not known.

    `again`: check what an earlier check found right, too. `seconds`: after which no further check begins. `report` is called
    with the fraction done.
    """

    again: bool = False
    seconds: float | None = None
    report: Report = lambda fraction: None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _children: list[Child] = field(default_factory=list)
    _abandoned: bool = False

    def abandon(self) -> None:
        """End all checks now."""
        with self._lock:
            self._abandoned = True
            for child in self._children:
                child.kill()

    @property
    def abandoned(self) -> bool:
        """Whether the checks are to end."""
        return self._abandoned

    def child(self, device: Device, folder: Path) -> Child:
        """A new child that checks."""
        made = Child(_MODULE, device, folder, folder / f"{os.getpid()}-{threading.get_ident()}.txt")
        with self._lock:
            self._children.append(made)
            if self._abandoned:
                made.kill()
        return made


def check_kernels(
    kernels: Iterable[RequiredKernel], program: Program, device: Device, effort: Effort | None = None
) -> list[CheckedKernel]:
    """Check the launches of kernels of `program` that no earlier check has found right, and keep the findings.

    A kernel that is wrong is checked without optimisation too, and used so if that is right.

    Raises:
        RunError: no process that checks can be started.
        UserError: no temporary folder can be written.
    """
    effort = effort or Effort()
    verdicts, options = Verdicts(device), program.build_options
    trials = distinct_trials(kernels, program)
    keys = {trial.key: text_key(device, trial.text, options) for trial in trials}

    def is_known(trial: Trial) -> bool:
        finding = verdicts[keys[trial.key]]
        return not effort.again and (bool(finding.wrong) or trial.key in finding.right)

    def keep(trial: Trial, verdict: Verdict) -> None:
        if not verdict.wrong and (verdict.compared or not verdict.note):
            verdicts.keep({keys[trial.key]: replace(verdicts[keys[trial.key]], right=(trial.key,), name=trial.name)})

    todo = [trial for trial in trials if not is_known(trial)]
    end = None if effort.seconds is None else monotonic() + effort.seconds
    done = _answers(todo, options, device, effort, keep, end)
    wrong = {keys[trial.key]: done[trial.key].wrong for trial in reversed(todo) if done[trial.key].wrong}
    repaired = [trial for trial in trials if keys[trial.key] in wrong]
    slow = _answers(repaired, (*options, UNOPTIMISED), device, effort, lambda trial, verdict: None)
    for key, said in wrong.items():
        own = [trial for trial in repaired if keys[trial.key] == key]
        helps = not any(slow[trial.key].wrong for trial in own) and any(slow[trial.key].compared for trial in own)
        verdicts.keep({key: Finding((), said, (UNOPTIMISED,) if helps else None, own[0].name)})
    return [
        CheckedKernel(trial, done.get(trial.key, Verdict()), verdicts[keys[trial.key]], known=trial.key not in done)
        for trial in trials
    ]


def _answers(
    trials: Sequence[Trial],
    options: Sequence[str],
    device: Device,
    effort: Effort,
    keep: Callable[[Trial, Verdict], None],
    end: float | None = None,
) -> dict[str, Verdict]:
    """The verdict of each trial, by its key: those of the longest texts first, each by a free child. `keep` gets each;
    none begins after `end`."""
    if not trials:
        return {}
    waiting: queue.SimpleQueue[Trial] = queue.SimpleQueue()
    for trial in sorted(trials, key=lambda trial: -len(trial.text)):
        waiting.put(trial)
    done: queue.SimpleQueue[tuple[Trial, Verdict] | BaseException] = queue.SimpleQueue()
    folder = WorkFolder()
    threads = []
    try:
        for _ in range(min(processors(), len(trials))):
            threads.append(started(_work, "flashmem-check", waiting, done, options, device, Path(folder.name), effort, end))
        found: dict[str, Verdict] = {}
        while len(found) < len(trials):
            answer = done.get()
            if isinstance(answer, BaseException):
                raise RunError(f"kernels cannot be checked: {answer}; free memory and try again") from answer
            trial, verdict = answer
            found[trial.key] = verdict
            keep(trial, verdict)
            effort.report(len(found) / len(trials))
    except BaseException:
        effort.abandon()
        raise
    finally:
        for thread in threads:
            thread.join()
        folder.remove()
    return found


def _work(
    waiting: queue.SimpleQueue[Trial],
    done: queue.SimpleQueue[tuple[Trial, Verdict] | BaseException],
    options: Sequence[str],
    device: Device,
    folder: Path,
    effort: Effort,
    end: float | None,
) -> None:
    """Give waiting trials to a child, and to a new one after one has ended."""
    child: Child | None = None
    try:
        while True:
            try:
                trial = waiting.get_nowait()
            except queue.Empty:
                return
            if effort.abandoned or (end is not None and monotonic() > end):
                done.put((trial, Verdict(note="not checked: no time was left")))
                continue
            child = child or effort.child(device, folder)
            verdict = _asked(child, trial, options)
            if verdict.wrong:  # it may have ended, or written where it must not
                child.close()
                child = None
            done.put((trial, Verdict(note="not checked: no time was left") if effort.abandoned else verdict))
    except BaseException as error:
        done.put(error)
    finally:
        if child is not None:
            child.close()


def _asked(child: Child, trial: Trial, options: Sequence[str]) -> Verdict:
    """The verdict of a child on a trial."""
    try:
        answer = child.ask({"trial": trial.to_json(), "options": list(options)}, LONGEST)
    except TimeoutError:
        return Verdict(f"{trial.name}: the check did not end within {LONGEST:.0f} s")
    if answer is None:
        return Verdict(f"{trial.name}: the driver ended the process{child.last_line()}")
    if "error" in answer:
        return Verdict(note=f"not checked: {answer['error']}")
    return Verdict(**answer)
