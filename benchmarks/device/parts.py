"""The parts of `check`: each yields outcomes until its cases or its time are over."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.device.running import Batch, Outcome, play
from flashmem.base.types import MemoryPath, Precision, TransferMode
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.devices import descriptor_for
from tests.support.isolated import call_isolated

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tests/data"
STRESSED = ("whisper-tiny-encoder", str(MODELS / "mobilenet-tiny.onnx"), str(MODELS / "vit-tiny.onnx"))
_LONGEST_ON_A_GPU, _LONGEST_ELSEWHERE = 240.0, 1800.0
"""Seconds after which one model counts as hanging. CPUs build kernels slowly."""

_PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16")

Item = TypeVar("Item")


@dataclass(frozen=True)
class Setting:
    """What to run on, and how much. `graphs` counts graphs of layouts, of which `together` make a model."""

    name: str
    device: Device
    seed: int
    jobs: int
    graphs: int
    together: int
    findings: Path

    @property
    def longest(self) -> float:
        """Seconds after which one model counts as hanging."""
        return _LONGEST_ON_A_GPU if self.device.kind == "gpu" else _LONGEST_ELSEWHERE

    @property
    def places(self) -> list[tuple[Precision, MemoryPath, TransferMode]]:
        """Every precision that the device has, on every memory path, in every transfer mode."""
        descriptor = descriptor_for(self.device)
        found: list[tuple[Precision, MemoryPath, TransferMode]] = []
        for path in descriptor.memory_paths:
            tf32: tuple[Precision, ...] = ("tf32",) if self.device.mma and path == "buffer" else ()
            found += [(precision, path, mode) for mode in descriptor.modes[path] for precision in (*_PRECISIONS, *tf32)]
        return found


def node_tests(setting: Setting, deadline: float) -> Iterator[Outcome]:
    """ONNX's node tests, on each memory path: those that pass elsewhere."""
    from tests.conformance.merged_nodes import batches

    paths = sorted({path for _, path, _ in setting.places})
    tasks = list(product(map(tuple, batches()), [setting.name], paths))
    random.Random(setting.seed).shuffle(tasks)
    yield from _in_processes(play_node_tests, tasks, setting, deadline)


def play_node_tests(task: tuple[tuple[str, ...], str, str]) -> Outcome:
    """Run some of ONNX's node tests in one model, and alone where that fails."""
    from tests.conformance.merged_nodes import check_batch
    from tests.conformance.onnx_nodes import PASSES, cases, outcome

    names, device, path = task
    made = Outcome()
    try:
        check_batch(names, device, path)
        made.add("right", cases=len(names))
        return made
    except Exception as error:
        together = f"only together, {names[0]} and {len(names) - 1} more on {path}: {_line(error)}"
    for name in names:
        try:
            said = outcome(cases()[name], device, path)[0]
            made.add(*(("right",) if said == PASSES else ("refused", f"{name} on {path}: {said}")))
        except AssertionError as error:
            made.add("wrong", f"{name} on {path}: {_line(error)}")
        except Exception as error:
            made.add("failed", f"{name} on {path}: {_line(error)}")
    if set(made.counts) == {"right"}:
        made.add("failed", together)
    return made


def models(setting: Setting, deadline: float) -> Iterator[Outcome]:
    """The tiny exports of real networks in tests/data, compared with ONNX Runtime by `flashmem run --verify`."""
    places = sorted({(precision, path) for precision, path, _ in setting.places})
    files = [file for file in sorted(MODELS.glob("*.onnx")) if "dynamic" not in file.stem]  # which need sizes
    tasks = [(file, setting.name, *place) for file in files for place in places]
    yield from _in_processes(play_model, tasks, setting, deadline)


def play_model(task: tuple[Path, str, str, str]) -> Outcome:
    """Run one model by the command of users."""
    file, device, precision, path = task
    words = ["run", file, "--device", device, "--precision", precision, "--memory-path", path, "--verify"]
    done = subprocess.run(
        [sys.executable, "-m", "flashmem", *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    made, said = Outcome(), (done.stderr.splitlines() or [""])[-1]
    kind = {0: "right", 1: "wrong", 2: "refused"}.get(done.returncode, "failed")
    made.add(kind, "" if kind == "right" else f"{file.stem}, {precision}, {path}: {said}")
    return made


def kernels(setting: Setting, deadline: float) -> Iterator[Outcome]:
    """Every kernel of the same networks, compared with its text by `flashmem verify`: one case a launch."""
    places = sorted({(precision, path) for precision, path, _ in setting.places})
    files = [file for file in sorted(MODELS.glob("*.onnx")) if "dynamic" not in file.stem]
    tasks = [(file, setting.name, *place) for file in files for place in places]
    yield from _in_processes(play_kernels, tasks, setting, deadline)


def play_kernels(task: tuple[Path, str, str, str]) -> Outcome:
    """Compile one model without building, and check its kernels, by the commands of users."""
    file, device, precision, path = task
    made, named = Outcome(), f"{file.stem}, {precision}, {path}"
    with tempfile.TemporaryDirectory(prefix="flashmem-") as folder:
        place = ("--device", device, "--precision", precision, "--memory-path", path, "--no-build")
        bundle = str(Path(folder, "m.flashmem"))
        for words in (("compile", str(file), "-o", bundle, *place), ("verify", bundle, "--device", device, "--json")):
            done = subprocess.run(
                [sys.executable, "-m", "flashmem", *words], cwd=ROOT, capture_output=True, text=True, check=False
            )
            if done.returncode and not done.stdout.startswith("{"):
                kind = "refused" if done.returncode == 2 else "failed"
                made.add(kind, f"{named}: {(done.stderr.splitlines() or [''])[-1]}")
                return made
    for each in json.loads(done.stdout)["kernels"]:
        kind = "wrong" if each["wrong"] else "right" if each["known"] or each["compared"] else "refused"
        made.add(kind, "" if kind == "right" else f"{named}: {each['wrong'] or each['note']}")
    return made


def layouts(setting: Setting, deadline: float) -> Iterator[Outcome]:
    """Random graphs of layouts (`layouts.py`), in every precision, memory path and transfer mode."""
    places = setting.places
    random.Random(setting.seed).shuffle(places)
    large = setting.device.kind == "gpu"
    tasks = [
        Batch(setting.name, setting.seed, first, setting.together, *places[number % len(places)], large, setting.findings)
        for number, first in enumerate(range(0, setting.graphs, setting.together))
    ]
    yield from _in_processes(play, tasks, setting, deadline)


def operators(setting: Setting, deadline: float) -> Iterator[Outcome]:
    """Random graphs of all operators (`tests/conformance/random_graphs`)."""
    from tests.conformance.random_graphs.task import Task

    places = sorted({(path, precision) for precision, path, _ in setting.places if precision != "tf32"})
    tasks = [
        Task(setting.seed, index, setting.name, path, str(setting.findings), precision)
        for index in range(10 * setting.graphs)
        for path, precision in [places[index % len(places)]]
    ]
    yield from _in_processes(play_operators, tasks, setting, deadline)


def play_operators(task: Any) -> Outcome:
    """Draw and judge one graph of operators."""
    from tests.conformance.random_graphs.task import work

    result, made = work(task), Outcome()
    kind = {"agreed": "right", "traceback": "failed"}.get(result.kind, result.kind)
    made.add(kind, f"{task.name}: {result.culprit}: {result.reasons[-1]}" if kind in ("wrong", "failed") else "")
    return made


def stress(setting: Setting, deadline: float) -> Iterator[Outcome]:
    """Loads with random delays (`benchmarks/streaming/stress.py`): each answer has the bits of the resident one."""
    left = max(60.0, deadline - time.monotonic())
    words = ["--device", setting.name, "--minutes", f"{left / 120:.2f}", "--jobs", str(setting.jobs), "--models", *STRESSED]
    command = [sys.executable, "-m", "benchmarks.streaming.stress", *words, "--seed", str(setting.seed)]
    made = Outcome()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=left + setting.longest)
    except subprocess.TimeoutExpired:
        made.add("failed", f"the stress test did not end within {left + setting.longest:.0f} s")
    else:
        lines = done.stdout.splitlines()
        try:
            summary = json.loads(lines[-1])
        except (IndexError, ValueError):
            made.add("failed", f"the stress test ended with {done.returncode}: {(done.stderr.splitlines() or [''])[-1]}")
        else:
            made.add("right", cases=summary["runs"] - summary["wrong"] - summary["failed"])
            for kind in ("wrong", "failed"):
                if summary[kind]:
                    made.add(kind, "; ".join(line for line in lines if f"'{kind}'" in line), summary[kind])
    yield made


@dataclass(frozen=True)
class Part:
    """A part of the check: its share of the time, and what yields its outcomes."""

    share: float
    outcomes: Callable[[Setting, float], Iterator[Outcome]]


PARTS = {
    "node-tests": Part(3, node_tests),
    "models": Part(1.5, models),
    "kernels": Part(1.5, kernels),
    "layouts": Part(5.5, layouts),
    "operators": Part(1.5, operators),
    "stress": Part(3.5, stress),
}
"""By name, in the order in which they run. Time that a part leaves is for the ones after it."""


def _on_its_share(function: Callable[[Any], Outcome], jobs: int, task: Any) -> Outcome:
    """Call with a share of the processors, so that the processes' own children are not all for each."""
    if hasattr(os, "sched_setaffinity"):
        mine = sorted(os.sched_getaffinity(0))
        share = max(1, (os.cpu_count() or 1) // jobs)
        os.sched_setaffinity(0, random.sample(mine, min(len(mine), share)))
    return function(task)


def _in_processes(
    function: Callable[[Item], Outcome], tasks: Iterable[Item], setting: Setting, deadline: float
) -> Iterator[Outcome]:
    """The outcomes of tasks in worker processes. None begins after the deadline."""
    in_time = (task for task in tasks if time.monotonic() < deadline)
    own = partial(_on_its_share, function, setting.jobs)
    for task, result in call_isolated(own, in_time, jobs=setting.jobs, timeout=setting.longest):
        if isinstance(result, str):
            made = Outcome()
            made.add("failed", f"{result} of {str(task)[:300]}")
            yield made
        else:
            yield result


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
