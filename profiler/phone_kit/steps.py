"""The steps of the phone kit on the phone. Each runs existing commands in child processes and returns its results as data."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from flashmem.base.child_processes import module_environment, python_module
from flashmem.schedule.modes import MODES
from flashmem.tools.verify import TOLERANCE, compare

from ..dataset import SUFFIX
from .children import Ended, run_child
from .contents import STREAMED, Contents, KitBundle
from .rates import NAME

Json = dict[str, Any]

MINUTES = 10.0
"""Minutes of a whole run; the steps' shares below are of these."""

_REPEATS = 3
_RATES_MINUTES = 2.5  # for rates and launches; the rates alone need one or two
_CHECK_SECONDS = 20.0  # for the kernels of each bundle
_REFUSED = 2  # exit code of a command that does not do what was asked, and says why


@dataclass(frozen=True)
class Chosen:
    """The device under test: its number in the list of devices, its name, its descriptor's, its modes by memory path."""

    number: int
    name: str
    descriptor: str
    modes: Mapping[str, Sequence[str]]


@dataclass
class KitRun:
    """A run of the kit: its contents, a folder for temporary files, the time at which it has to be done.

    `scale`: how much longer than MINUTES it may take. `device` is known after the doctor.
    """

    contents: Contents
    work: Path
    deadline: float
    scale: float = 1.0
    wanted: str = "auto"
    device: Chosen | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: module_environment())

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - monotonic()

    def child(self, seconds: float, module: str, *arguments: str | Path) -> Ended:
        """Run a module in a child process, for its share of the time."""
        environment = {**self.environment, "FLASHMEM_CACHE_DIR": str(self.work / "cache")}
        command = python_module(module, *map(str, arguments))
        return run_child(command, min(seconds * self.scale, self.left), environment)

    def bundles(self) -> Iterator[KitBundle]:
        """The kit's bundles for the device."""
        if self.device is not None:
            yield from self.contents.bundles(self.contents.device_for(self.device.descriptor))


class StepFailedError(Exception):
    """A step failed; its text is one sentence. `result`: what it found before."""

    def __init__(self, said: str, result: Any = None) -> None:
        super().__init__(said)
        self.result = result


def doctor(kit: KitRun) -> Json:
    """`flashmem doctor --json`, and the choice of the device: the one asked for, else the first GPU, else the first."""
    ended = kit.child(90, "flashmem", "doctor", "--json")
    try:
        report: Json = json.loads(ended.out)
    except ValueError:
        raise StepFailedError(ended.said or "flashmem doctor printed no report") from None
    devices = enumerate(report["devices"])
    found = [Chosen(number, each["name"], each["descriptor"], each["modes"]) for number, each in devices]
    if not found:
        raise StepFailedError(f"OpenCL lists no device; type: {'; '.join(report['next']) or 'flashmem doctor'}", report)
    if kit.wanted != "auto":
        found = [each for each in found if kit.wanted in (str(each.number), each.descriptor)]
        if not found:
            raise StepFailedError(f"no device {kit.wanted!r} is here", report)
    else:
        found.sort(key=lambda each: report["devices"][each.number]["kind"] != "gpu")
    chosen = found[0]
    if not kit.contents.device_for(chosen.descriptor):
        known = ", ".join(kit.contents.about["devices"])
        raise StepFailedError(f"the kit is for {known}, and {chosen.name} is {chosen.descriptor}; make one for it", report)
    kit.device = chosen
    return report


def probes(kit: KitRun) -> Json:
    """Every probe of an extension (`runtime.opencl.probes`), each in its own process."""
    from flashmem.runtime.opencl.probes import PROBES  # it imports pyopencl, which the doctor has found

    assert kit.device is not None
    found: Json = {}
    for extension in PROBES:
        ended = kit.child(30, "flashmem.runtime.opencl.probes", extension, str(kit.device.number), kit.work)
        answer = next(ended.lines(), None)
        if not ended.ok or answer is None:  # a crash after the answer is a failure too
            answer = {"extension": extension, "outcome": "failed", "said": ended.said or "it printed nothing", "facts": {}}
        found[extension] = answer
    return found


def correctness(kit: KitRun) -> list[Json]:
    """Every model in every memory path and transfer mode, compared with ONNX Runtime's answers.

    Afterwards the cache has all compiled kernels, so that `streamed` measures no builds.
    """
    found = []
    for bundle in kit.bundles():
        found += [_run(kit, bundle, mode, 60) for mode in MODES]
    wrong = [f"{each['model']}, {each['memory_path']}, {each['mode']}: {each['said']}" for each in found if _is_bad(each)]
    if wrong:
        raise StepFailedError("; ".join(wrong), found)
    return found


def kernels(kit: KitRun) -> list[Json]:
    """Every kernel of every bundle, compared with its text (`flashmem verify`); what took too long is not checked.

    Of each bundle the kit's file has the report, the number of launches `checked`, and what is used `instead` of wrong kernels.
    """
    assert kit.device is not None
    found: list[Json] = []
    wrong: list[str] = []
    for bundle in kit.bundles():
        words = (
            "verify",
            bundle.folder,
            "--device",
            str(kit.device.number),
            "--seconds",
            str(_CHECK_SECONDS * kit.scale),
            "--json",
        )
        ended = kit.child(_CHECK_SECONDS + 60, "flashmem", *words)
        row: Json = {"model": bundle.model, "memory_path": bundle.memory_path}
        try:
            row["report"] = json.loads(ended.out)
        except ValueError:
            row["said"] = ended.said or "flashmem verify printed no report"
            wrong.append(f"{bundle.model}, {bundle.memory_path}: {row['said']}")
        else:
            checked = row["report"]["kernels"]
            row["checked"] = sum(each["known"] or each["compared"] + each["twin"] > 0 for each in checked)
            row["instead"] = {each["kernel"]: each["instead"] or "nothing" for each in checked if each["wrong"]}
            wrong += [f"{bundle.model}, {bundle.memory_path}: {each['wrong']}" for each in checked if each["wrong"]]
        found.append(row)
    if wrong:
        raise StepFailedError("; ".join(wrong), found)
    return found


def run_streamed(kit: KitRun) -> list[Json]:
    """The large model: streamed from a file outside the page cache in every mode, and preloaded."""
    found = []
    for bundle in kit.bundles():
        if bundle.model == STREAMED:
            for words in (*(("--mode", mode) for mode in MODES), ("--strategy", "preload")):
                _drop(bundle.folder)
                found.append(_run(kit, bundle, words[1], 40, words=(*words, "--repeat", str(_REPEATS))))
    wrong = [f"{each['memory_path']}, {each['mode']}: {each['said']}" for each in found if _is_bad(each)]
    if wrong:
        raise StepFailedError("; ".join(wrong), found)
    return found


def storage(kit: KitRun) -> list[Json]:
    """Reads of a file with and without O_DIRECT by numbers of threads."""
    megabytes = 256 if kit.scale >= 1 else 32
    ended = kit.child(60, "flashmem.profiler.phone_kit.storage", kit.work, str(megabytes))
    return _rows(ended)


def rates(kit: KitRun) -> str:
    """The profiler's rates and launches: the text of its dataset.

    If a launch crashed the driver, a second call keeps what the first one measured.
    """
    assert kit.device is not None
    launches = kit.contents.launches(kit.contents.device_for(kit.device.descriptor))
    module = "flashmem.profiler.phone_kit.rates"
    number = str(kit.device.number)
    minutes = _RATES_MINUTES * kit.scale
    ended = kit.child(60 * (_RATES_MINUTES + 1), module, launches, number, kit.work, f"{minutes:.3f}")
    if not ended.ok:
        again = kit.child(60, module, launches, number, kit.work, "0.001")
        if not again.ok:
            raise StepFailedError(ended.said)
    return gzip.decompress((kit.work / f"{NAME}{SUFFIX}").read_bytes()).decode()


def heat(kit: KitRun) -> list[Json]:
    """Rates under load, for the time that is left."""
    assert kit.device is not None
    launches = kit.contents.launches(kit.contents.device_for(kit.device.descriptor))
    seconds = min(300 * kit.scale, kit.left - 15 * kit.scale)
    if seconds <= 0:
        raise StepFailedError("no time was left")
    words = (launches, str(kit.device.number), kit.work, f"{seconds:.1f}")
    return _rows(kit.child(330, "flashmem.profiler.phone_kit.heat", *words))


STEPS: dict[str, Callable[[KitRun], Any]] = {
    "doctor": doctor,
    "probes": probes,
    "kernels": kernels,
    "correctness": correctness,
    "streamed": run_streamed,
    "storage": storage,
    "rates": rates,
    "heat": heat,
}
"""The steps in order; the last one takes the time that the others leave."""


def _rows(ended: Ended) -> list[Json]:
    """The lines of a child. Raises StepFailedError if it failed, with the lines before."""
    found = list(ended.lines())
    if not ended.ok:
        raise StepFailedError(ended.said, found)
    return found


def _is_bad(row: Json) -> bool:
    return row["outcome"] not in ("right", "refused")


def _run(kit: KitRun, bundle: KitBundle, mode: str, seconds: float, *, words: tuple[str, ...] = ()) -> Json:
    """`flashmem run` on a bundle; `outcome`: right, wrong, refused (the device lacks the mode), or failed."""
    assert kit.device is not None
    row: Json = {"model": bundle.model, "memory_path": bundle.memory_path, "mode": mode}
    output = kit.work / "output.npz"
    output.unlink(missing_ok=True)
    chosen = words or ("--mode", mode)
    given = ("--input", kit.contents.inputs(bundle.model), "--output", output, "--device", str(kit.device.number), "--json")
    ended = kit.child(seconds, "flashmem", "run", bundle.folder, *given, *chosen)
    row["seconds"] = round(ended.seconds, 3)
    if not ended.ok:
        lacks = ended.code == _REFUSED and mode in MODES and mode not in kit.device.modes.get(bundle.memory_path, ())
        return row | {"outcome": "refused" if lacks else "failed", "said": ended.said}
    wanted = kit.contents.answers(bundle.model)
    with np.load(output) as file:
        answers = {name: file[name] for name in wanted}
    errors = {name: compare([answers[name]], [wanted[name]], bundle.precision).relative_error for name in wanted}
    wrong = [f"{name} by {error:.2g}" for name, error in errors.items() if not error <= TOLERANCE[bundle.precision]]
    row["largest_error"] = max(errors.values()) if np.isfinite(max(errors.values())) else None
    row["report"] = json.loads(ended.out[ended.out.index("{") :])
    said = f"wrong outputs, as a share of their range: {', '.join(wrong)}" if wrong else ""
    return row | {"outcome": "wrong" if wrong else "right", "said": said}


def _drop(bundle: Path) -> None:
    """Drop a bundle's pages from the page cache."""
    for path in bundle.rglob("weights.bin"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
