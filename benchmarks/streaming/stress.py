"""Stress test: loads with random delays; each streamed answer has the bits of the resident one.

    python -m benchmarks.streaming.stress --device D [--minutes 30] [--runs 5000] [--models gpt2 ...] [--bundles DIR] [--jobs N]

Whole models with random weights (`flashmem.tools.zoo.graph_file`) are compiled for every memory path of the device. Each is
compiled without a budget, with half of the memory for everything, and with the smallest budget that works. Then fresh sessions
of all of them, in every transfer mode, alternate in an order drawn from `--seed`. Each makes `--each` runs; in half of the
sessions there are random times between the steps of some loads. Inputs alternate; the reference is a session of the same bundle
with every weight resident. Only kernels of first answers run, whose bits do not depend on which weights are resident.

It ends after `--runs` answers, or before the first session that would begin after `--minutes`. It prints the number of wrong
answers and a line of JSON. Exit code 1: an answer was wrong, or a session failed. A session longer than `--patience` seconds
ends the process with the stack of every thread.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import platform
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

import flashmem
from benchmarks.command import Arguments, run_command
from flashmem.base.errors import BudgetError, RunError, UserError
from flashmem.base.types import MemoryPath, Precision, TransferMode
from flashmem.bundle.bundle import Bundle
from flashmem.program.program import Program
from flashmem.runtime.engine.opened import planned_variant
from flashmem.runtime.opencl.handles import Event
from flashmem.runtime.request.compatibility import usable_modes
from flashmem.runtime.request.options import device_here, find_descriptor
from flashmem.runtime.streaming import loader
from flashmem.runtime.streaming.ahead import AheadRun, InFlight
from flashmem.runtime.streaming.background_reads import Reading
from flashmem.schedule.loads import Load, Step
from flashmem.tools.zoo.graph_file import write_random

Array = NDArray[Any]

MODELS = ("gpt2", "opt-125m", "resnet50", "vit-b16", "mobilenetv2", "whisper-tiny-encoder")
BUDGETS = ("none", "half", "smallest")

LATE = 40
"""Approximate number of loads in a run that sleep."""


@dataclass(frozen=True)
class Case:
    """A bundle in one transfer mode."""

    model: str
    path: MemoryPath
    budget: str
    mode: TransferMode
    bundle: Path

    def __str__(self) -> str:
        return f"{self.model}, {self.path}, {self.mode}, budget {self.budget}"


class Late(Reading):
    """A background read that ends later than it does."""

    def __init__(self, reading: Reading, seconds: float) -> None:
        self._reading, self._until, self.thread = reading, time.monotonic() + seconds, reading.thread

    def __eq__(self, other: object) -> bool:
        """Who made the read knows it by itself."""
        return other is self._reading

    __hash__ = None  # type: ignore[assignment]

    @property
    def ended(self) -> bool:
        """Not before its time."""
        return time.monotonic() >= self._until and self._reading.ended

    def wait(self) -> None:
        """Sleep for the rest."""
        self._reading.wait()
        time.sleep(max(0, self._until - time.monotonic()))

    def finish(self) -> None:
        """As the read."""
        self._reading.finish()

    def leave(self) -> None:
        """As the read."""
        self._reading.leave()


class Delays:
    """Random sleeps between the steps of a load, of about LATE loads in each run."""

    def __init__(self, seed: int, seconds: float) -> None:
        """The sleeps have a mean of `seconds`."""
        self._random, self._seconds, self._lock = random.Random(seed), seconds, threading.Lock()
        self.on = True

    def draw(self, loads: int) -> list[float]:
        """The sleep after the first steps of one load, in a run with `loads` loads."""
        with self._lock:
            late = self.on and self._random.random() < LATE / loads
            return [self._random.expovariate(1 / self._seconds) for _ in range(3)] if late else []

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """In the body, loader threads sleep; background reads end late, and who enqueues copies sleeps before and after."""
        delays, turn, begin, copy = self, loader._Turn, AheadRun._begin_next, AheadRun._copy

        class LateTurn(turn):  # type: ignore[valid-type, misc]
            def __init__(self, run: loader.LoaderRun, load: Load, thread: int) -> None:
                super().__init__(run, load, thread)
                self.sleeps = delays.draw(len(run.loaded))

            def did(self, what: Step) -> None:
                super().did(what)
                if self.sleeps:
                    time.sleep(self.sleeps.pop())

        def begin_late(run: AheadRun) -> bool:
            begun = begin(run)
            if begun and run._reading and (sleeps := delays.draw(len(run.loaded))):
                read = run._reading[-1]
                assert read.reading is not None
                read.reading = Late(read.reading, sleeps[0])
            return begun

        def copy_late(run: AheadRun, made: InFlight, behind: Event | None) -> None:
            before, after, *_ = delays.draw(len(run.loaded)) or (0.0, 0.0)
            time.sleep(before)
            copy(run, made, behind)
            time.sleep(after)

        loader._Turn = LateTurn  # type: ignore[misc]
        AheadRun._begin_next, AheadRun._copy = begin_late, copy_late  # type: ignore[method-assign]
        try:
            yield
        finally:
            loader._Turn = turn  # type: ignore[misc]
            AheadRun._begin_next, AheadRun._copy = begin, copy  # type: ignore[method-assign]


def drawn(program: Program, seed: int) -> dict[str, Array]:
    """Inputs with a random scale and offset, or indices below 1,000."""
    generator, inputs = np.random.default_rng(seed), {}
    for port in program.inputs:
        if port.dtype.startswith("float"):
            numbers = generator.standard_normal(port.shape) * generator.uniform(0.5, 2) + generator.uniform(-1, 1)
        else:
            numbers = generator.integers(0, 1000, port.shape)
        inputs[port.name] = numbers.astype(port.dtype)
    return inputs


def open_session(bundle: Bundle, device: str, mode: TransferMode, host_budget: str | None) -> flashmem.Session:
    """A session within the bundle's budget, or within the smallest that this mode needs."""
    try:
        return flashmem.Session(bundle, device=device, mode=mode, host_budget=host_budget)
    except BudgetError as error:
        return flashmem.Session(bundle, device=device, mode=mode, budget=error.smallest_bytes, host_budget=host_budget)


def without_steady(bundle: Bundle) -> Bundle:
    """The bundle without steady kernels."""
    variants = tuple(replace(each, program=replace(each.program, steady=())) for each in bundle.variants)
    return replace(bundle, variants=variants)


class Reference:
    """A bundle, two sets of inputs, and the answers with every weight resident."""

    def __init__(self, path: Path, device: str) -> None:
        """Raises SystemExit: the comparison could not show an error."""
        self.bundle = without_steady(Bundle.open(path))
        self.inputs = [drawn(self.bundle.program, seed) for seed in (1, 2)]
        with flashmem.Session(self.bundle, device=device, strategy="preload") as session:
            self.answers = [session.run(None, inputs) for inputs in self.inputs]
        finite = all(np.isfinite(each).all() for answer in self.answers for each in answer)
        if not finite or same(*self.answers):
            raise SystemExit(f"{path}: its answers are not finite, or do not depend on the input; they would show nothing")


def same(a: Sequence[Array], b: Sequence[Array]) -> bool:
    """Whether two answers have the same bits."""
    return all(np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in zip(a, b, strict=True))


def source_of(model: str, folder: Path) -> Path:
    """The ONNX file of a model; a model of the zoo is written to `folder`."""
    if model.endswith(".onnx"):
        return Path(model)
    source = folder / f"{model}.onnx"
    if not source.exists():
        write_random(model, source)
    return source


def compile_all(source: Path, path: MemoryPath, device: str, precision: Precision, folder: Path) -> dict[str, Path]:
    """The bundles of a model on one memory path, by budget."""
    stem = f"{source.stem}.{device_here(device).descriptor_name}.{path}.{precision}"
    made = {name: folder / f"{stem}.{name}.flashmem" for name in BUDGETS}

    def compiled(name: str, budget: int | None) -> Bundle:
        return flashmem.compile(source, made[name], device=device, memory_path=path, precision=precision, budget=budget)

    if not all(bundle.exists() for bundle in made.values()):
        bundle, here = compiled("none", None), device_here(device)
        mode = usable_modes(bundle, here, "auto").modes[path][0]
        try:
            compiled("half", planned_variant(bundle, here, mode, "preload").needed() // 2)
        except BudgetError as error:
            compiled("half", error.smallest_bytes)
        try:
            compiled("smallest", 1)
        except BudgetError as error:
            compiled("smallest", error.smallest_bytes)
    return made


def cases(args: argparse.Namespace, folder: Path) -> list[Case]:
    """All cases, compiled."""
    device, paths = device_here(args.device), find_descriptor(args.device).memory_paths
    wanted = [(source_of(model, folder), path) for model in args.models for path in paths if path in (args.paths or [path])]
    if args.jobs > 1:
        with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
            making = [pool.submit(compile_all, *each, args.device, args.precision, folder) for each in wanted]
            made = [future.result() for future in making]
    else:
        made = [compile_all(*each, args.device, args.precision, folder) for each in wanted]
    found = []
    for (source, path), bundles in zip(wanted, made, strict=True):
        for budget in args.budgets:
            bundle = bundles[budget]
            opened = Bundle.open(bundle)
            modes = [mode for mode in usable_modes(opened, device, "auto").modes[path] if mode in opened.plan.layouts]
            modes = [mode for mode in modes if mode in (args.modes or [mode])]
            found += [Case(source.stem, path, budget, mode, bundle) for mode in modes]
    return found


def play(case: Case, reference: Reference, args: argparse.Namespace, first: int) -> Mapping[str, int]:
    """Run one fresh session; returns the numbers of right and wrong answers."""
    counts = Counter[str]()
    with open_session(reference.bundle, args.device, case.mode, args.host_budget) as session:
        for number in range(first, first + args.each):
            answer = session.run(None, reference.inputs[number % 2])
            counts["right" if same(answer, reference.answers[number % 2]) else "wrong"] += 1
    return counts


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, run, count."""
    parser = Arguments(__doc__)
    parser.add_device()
    parser.add_argument("--models", nargs="+", default=MODELS, help="names of the zoo's graphs, or ONNX files")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--each", type=int, default=6, help="runs of each session")
    parser.add_argument("--delay", type=float, default=0.5, help="milliseconds between two steps of a late load, on average")
    parser.add_argument("--modes", nargs="+", help="transfer modes; default: all that the device has")
    parser.add_argument("--paths", nargs="+", help="memory paths; default: all that the device has")
    parser.add_argument(
        "--budgets", nargs="+", choices=BUDGETS, default=BUDGETS, help="default: all; the smallest is the slowest"
    )
    parser.add_argument("--precision", choices=get_args(Precision), default="fp32", help="tf32 needs --paths buffer")
    parser.add_argument("--host-budget", help="of the sessions: a size, or auto (docs/explanation/streaming.md, the host tier)")
    parser.add_argument("--bundles", type=Path, help="a folder to keep models and bundles in")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile")
    parser.add_argument("--patience", type=float, default=300, help="seconds until a session that does not end stops it all")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    parser.check_device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(stress(args, args.bundles or Path(folder)))


def stress(args: argparse.Namespace, folder: Path) -> int:
    """Run sessions until the limit; returns the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    device, rng, begun = device_here(args.device), random.Random(args.seed), time.monotonic()
    print(f"{device.name} ({device.platform}, driver {device.driver_version}), on {platform.machine()}", flush=True)
    played = cases(args, folder)
    if not played:
        raise UserError("nothing is left to play; the device has no such memory path or transfer mode (flashmem devices)")
    print(f"{len(played)} cases, compiled in {time.monotonic() - begun:.0f} s", flush=True)
    begun = time.monotonic()
    references = {bundle: Reference(bundle, args.device) for bundle in sorted({each.bundle for each in played})}
    print(f"{len(references)} references in {time.monotonic() - begun:.0f} s", flush=True)
    counts: dict[Case, Counter[str]] = {each: Counter() for each in played}
    begun, total, turn = time.monotonic(), 0, 0
    delays = Delays(args.seed, args.delay / 1e3)
    with delays.everywhere():
        while total < args.runs and time.monotonic() - begun < 60 * args.minutes:
            if turn % len(played) == 0:
                rng.shuffle(played)
            case = played[turn % len(played)]
            turn, delays.on = turn + 1, rng.random() < 0.5
            faulthandler.dump_traceback_later(args.patience, exit=True, file=sys.__stderr__)
            try:
                counts[case].update(play(case, references[case.bundle], args, turn))
            except RunError as error:
                counts[case]["failed"] += 1
                print(f"{case}: {error}", flush=True)
            faulthandler.cancel_dump_traceback_later()
            total = sum(sum(each.values()) for each in counts.values())
            if turn % len(played) == 0:
                print(f"{total} runs in {time.monotonic() - begun:.0f} s", flush=True)
    for case in sorted(counts, key=str):
        if counts[case]["wrong"] or counts[case]["failed"]:
            print(f"{case}: {dict(counts[case])}")
    seconds, whole = time.monotonic() - begun, sum(counts.values(), Counter())
    print(f"{total} runs of {turn} sessions in {seconds:.0f} s: {whole['wrong']} wrong, {whole['failed']} failed")
    by_mode = Counter[str]()
    for case in counts:
        for what, count in counts[case].items():
            by_mode[f"{case.path} {case.mode} {what}"] += count
    summary = {
        "device": device.name, "platform": device.platform, "driver": device.driver_version, "runs": total, "sessions": turn,
        "wrong": whole["wrong"], "failed": whole["failed"], "seconds": round(seconds, 1), "models": list(args.models),
        "by_mode": dict(sorted(by_mode.items())),
    }  # fmt: skip
    print(json.dumps(summary))
    return 1 if whole["wrong"] or whole["failed"] or not total else 0


if __name__ == "__main__":
    run_command(main)
