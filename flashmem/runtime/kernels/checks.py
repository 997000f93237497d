"""Checks of kernels in child processes, and what follows from them.

The kernel that is checked is the binary of the program cache that sessions will use. A kernel that is wrong is checked without
optimisation too, and used so if that is right. A chain that is wrong is not used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

from flashmem.program.program import Program
from flashmem.runtime.checking.trial import Trial, Verdict
from flashmem.runtime.kernels.cache import kernel_key
from flashmem.runtime.kernels.cache_files import ProgramCache
from flashmem.runtime.kernels.pool import ChildPool, Job, KernelWorker, Rank
from flashmem.runtime.kernels.required import RequiredKernel
from flashmem.runtime.kernels.trials import distinct_trials
from flashmem.runtime.kernels.verdicts import UNOPTIMISED, Finding, Verdicts, text_key
from flashmem.runtime.opencl.device import Device

LONGEST = 300.0
"""Seconds after which a check that does not end is wrong: a kernel may wait for ever."""


@dataclass(frozen=True)
class CheckedKernel:
    """One launch that was checked. `known`: by an earlier check. `verdict.wrong` is that of the optimised kernel."""

    trial: Trial
    verdict: Verdict
    finding: Finding
    known: bool = False


Reader = Callable[[], bytes | None]
"""Gives the binary of a kernel, if there is one."""


class CheckJob(Job):
    """Checks launches of one kernel, which are not known to be right.

    `readers`: by name, of the kernel and of a chain's parts. `whole`: compare all elements. If not, those that the interpreter
    executes, which asks for no second compiler; of a chain, one of the draws.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        options: Sequence[str],
        readers: Mapping[str, Reader],
        *,
        whole: bool = True,
        end: float | None = None,
        keep: Callable[[CheckJob], None] = lambda job: None,
    ) -> None:
        self.trials = trials
        self._options = options
        self._readers = readers
        self._end = end
        self._keep = keep
        self._whole = whole
        self.verdicts: dict[str, Verdict] = {}
        self.repaired: tuple[str, ...] | None = None
        self.rank = Rank.WHOLE if whole else Rank.SAMPLE, -len(trials[0].text) * len(trials)

    def run(self, worker: KernelWorker) -> str | None:
        """Check, and if a launch is wrong, check all of them without optimisation."""
        binaries = self._write_binaries(worker.folder)
        self.verdicts = self._verdicts_with(worker, self._options, binaries, self._end)
        for file in binaries.values():
            file.unlink(missing_ok=True)
        if self.wrong and not self.trials[0].parts:
            slow = self._verdicts_with(worker, (*self._options, UNOPTIMISED), {}, None).values()
            if not any(each.wrong for each in slow) and any(each.compared for each in slow):
                self.repaired = (UNOPTIMISED,)
        return None

    def _write_binaries(self, folder: Path) -> dict[str, Path]:
        """Files with the binaries, by kernel. The child builds a kernel of which there is none, or no room for it."""
        found: dict[str, Path] = {}
        checked = hashlib.sha256(self.trials[0].text.encode()).hexdigest()
        for name, read in self._readers.items():
            file = folder / f"{checked}.{name}"
            try:
                if (binary := read()) is not None:
                    file.write_bytes(binary)
                    found[name] = file
            except OSError:
                file.unlink(missing_ok=True)
        return found

    def _verdicts_with(
        self, worker: KernelWorker, options: Sequence[str], binaries: Mapping[str, Path], end: float | None
    ) -> dict[str, Verdict]:
        return {
            trial.key: Verdict(note="not checked: no time was left")
            if end is not None and monotonic() > end
            else _ask(worker, trial, options, binaries, whole=self._whole)
            for trial in self.trials
        }

    def finish(self) -> None:
        """Keep what was found."""
        self._keep(self)

    @property
    def wrong(self) -> str:
        """What the kernel does instead of its text, or ""."""
        return next((verdict.wrong for verdict in self.verdicts.values() if verdict.wrong), "")

    @property
    def finding(self) -> Finding:
        """What is known now."""
        right = tuple(key for key, each in self.verdicts.items() if not each.wrong and (each.compared or not each.note))
        name = self.trials[0].name
        for key, each in self.verdicts.items():
            if each.wrong:
                is_chain = bool(self.trials[0].parts)
                return Finding(wrong=each.wrong, options=self.repaired, name=name, trial=key, of_chain=is_chain)
        if self._whole:
            return Finding(right, name=name)
        return Finding(tuple(key for key in right if self.verdicts[key].whole), right, name=name)


def _ask(worker: KernelWorker, trial: Trial, options: Sequence[str], binaries: Mapping[str, Path], *, whole: bool) -> Verdict:
    """The verdict of a child on a launch. A child that was wrong is replaced: a kernel may have written where it must not."""
    job = {
        "check": trial.to_json(),
        "options": list(options),
        "binaries": {name: str(file) for name, file in binaries.items()},
        "whole": whole,
    }
    try:
        answer = worker.ask(job, LONGEST)
    except TimeoutError:
        worker.replace()
        return Verdict(f"{trial.name}: the check did not end within {LONGEST:.0f} s")
    except OSError as error:
        return Verdict(note=f"not checked: no process can be started ({error.strerror})")
    if answer is None:
        if worker.was_killed:
            worker.replace()
            return Verdict(note="not checked: the process was killed, perhaps for want of memory")
        return Verdict(f"{trial.name}: the driver ended the process{worker.last_words()}")
    if "error" in answer:
        return Verdict(note=f"not checked: {answer['error']}")
    verdict = Verdict(**answer)
    if verdict.wrong:
        worker.replace()
    return verdict


@dataclass(frozen=True)
class _CheckedText:
    """A kernel, the key of its text, and its launches."""

    kernel: RequiredKernel
    key: str
    trials: Sequence[Trial]


class ProgramChecks:
    """The launches of kernels of a program on a device, what is known of them, and jobs for those that are not known."""

    def __init__(
        self,
        kernels: Sequence[RequiredKernel],
        program: Program,
        device: Device,
        note: Callable[[Finding], None] = lambda finding: None,
    ) -> None:
        """`note` receives what is found of each kernel."""
        self._note = note
        self._program = program
        self._device = device
        self._verdicts = Verdicts(device)
        self._cache = ProgramCache()
        self._plain: dict[str, RequiredKernel] = {}
        for each in kernels:  # of a kernel with a stream lane and without one, the one without comes first
            self._plain.setdefault(each.name, each)
        texts = {name: each.text for name, each in self._plain.items()}
        self._texts = [
            _CheckedText(each, text_key(device, each.text, program.build_options), distinct_trials(each, program, texts))
            for each in kernels
        ]
        self._done: dict[str, Verdict] = {}

    def samples(self, leave: Iterable[str] = ()) -> list[CheckJob]:
        """Jobs for a sample of each kernel of which nothing is known: elements of the launch with the least memory.

        `leave`: keys of the texts that others check.
        """
        left = set(leave)
        found = []
        for text in self._texts:
            finding = self._verdicts[text.key]
            if text.trials and not (text.key in left or finding.wrong or finding.right or finding.sampled):
                least = min(text.trials, key=lambda trial: trial.nbytes)
                found.append(self._job(text, [least], whole=False))
        return found

    @property
    def wrong(self) -> str:
        """What an optimised kernel is known to do instead of its text now, or ""."""
        found = Verdicts(self._device)
        return next((found[text.key].wrong for text in self._texts if found[text.key].wrong), "")

    @property
    def texts(self) -> Iterable[str]:
        """The keys of all texts."""
        return [text.key for text in self._texts]

    def jobs(self, *, again: bool = False, end: float | None = None, leave: Iterable[str] = ()) -> list[CheckJob]:
        """Jobs for launches that no earlier check found right, or for all of them; none begins after `end`.

        `leave`: keys of trials that others check.
        """
        left = set(leave)
        found = []
        for text in self._texts:
            finding = self._verdicts[text.key]
            if finding.wrong and not again:
                continue
            trials = [each for each in text.trials if each.key not in left and (again or each.key not in finding.right)]
            if trials:
                found.append(self._job(text, trials, end=end))
        return found

    def _job(self, text: _CheckedText, trials: Sequence[Trial], *, whole: bool = True, end: float | None = None) -> CheckJob:
        joined = (text.kernel, *(self._plain[part.name] for part in trials[0].parts))
        readers = {each.name: self._reader(each) for each in joined}
        return CheckJob(
            trials, self._program.build_options, readers, whole=whole, end=end, keep=lambda job: self._keep(text.key, job)
        )

    def _reader(self, kernel: RequiredKernel) -> Reader:
        key = kernel_key(self._device, replace(kernel, options=()), self._program.build_options)
        return lambda: self._cache.read(key)

    def _keep(self, key: str, job: CheckJob) -> None:
        self._done |= job.verdicts
        finding = job.finding
        before = self._verdicts[key]
        if before.wrong and not finding.wrong and before.trial not in finding.right:  # other launches do not excuse that one
            finding = replace(before, right=finding.right)
        if finding.right or finding.sampled or finding.wrong:
            self._verdicts.keep({key: finding})
            self._note(finding)

    def checked(self) -> list[CheckedKernel]:
        """All launches with what is known of them now."""
        self._verdicts = Verdicts(self._device)
        return [
            CheckedKernel(trial, self._done.get(trial.key, Verdict()), self._verdicts[text.key], trial.key not in self._done)
            for text in self._texts
            for trial in text.trials
        ]


def check_kernels(
    checks: Sequence[ProgramChecks],
    device: Device,
    *,
    again: bool = False,
    seconds: float | None = None,
) -> list[CheckedKernel]:
    """Check launches, and keep the findings. `again`: also those that an earlier check found right.

    No check begins after `seconds`.

    Raises:
        RunError: no process that checks can be started.
        UserError: no temporary folder can be written.
    """
    end = None if seconds is None else monotonic() + seconds
    pool = ChildPool(device)
    asked: set[str] = set()
    try:
        for each in checks:
            jobs = each.jobs(again=again, end=end, leave=asked)
            asked |= {trial.key for job in jobs for trial in job.trials}
            pool.submit(jobs)
        while pool.step():
            pass
        pool.check("kernels cannot be checked; free memory and try again")
    finally:
        pool.close()
    found: dict[str, CheckedKernel] = {}
    for checked in (checked for each in checks for checked in each.checked()):
        if checked.trial.key not in found or not checked.known:
            found[checked.trial.key] = checked
    return list(found.values())
