"""Ctrl-C: real SIGINTs at random times into sessions that open, run and close, over and over.

    python -m benchmarks.streaming.interrupts --device D [--signals 20000] [--modes map dma ...] [--jobs N] [--seed S]

A small model with random weights is compiled within the smallest budget for every memory path of the device, and played in
every transfer mode. On a CPU the modes of a device with memory of its own are imitated too (`dma apart`, `interleave apart`).
Each batch of signals goes to a process of its own, `--jobs` of them at a time. Such a process opens a session, makes some runs,
closes it, and so on, until a signal of its parent arrives, at a time drawn from `--seed`. Then it closes the session, if there
is one, and counts

- in what the signal came: opening, runs, or a close; or whether no KeyboardInterrupt came of it (lost);
- answers that are those of a session which no signal disturbs, and others;
- errors other than KeyboardInterrupt, also from the close that follows (failed);
- bytes that budgets count after it all, and threads that are left.

It prints a line for each mode, and a line of JSON. A process that does not answer for `--patience` seconds is a hang, and ends
with the stack of every thread. Exit code 1: a hang, a wrong answer, a failure, a lost signal, or something left.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

import flashmem
from benchmarks.command import Arguments, run_command
from benchmarks.streaming.stress import same
from flashmem.base.child_processes import module_environment, python_module
from flashmem.base.errors import BudgetError, UserError
from flashmem.base.types import MemoryPath, TransferMode
from flashmem.bundle.bundle import Bundle
from flashmem.runtime.engine.inputs import complete_inputs
from flashmem.runtime.kernels.children import processors
from flashmem.runtime.memory.accounts import Budget
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.processor import processor_of
from flashmem.runtime.request import options
from flashmem.runtime.request.compatibility import usable_modes
from flashmem.runtime.request.options import device_here, find_descriptor

RUNS = 2
"""Runs of each session, if no signal comes: many signals shall come while it opens, and while it closes."""

BATCH = 200
"""Signals to one process."""

LONGEST = 30.0
"""Seconds after which a signal counts as lost: many times what a cycle takes on a busy machine."""

_ARMED = "armed"
_WHERE = ("opening", "run", "close")
_BAD = ("wrong", "failed", "lost", "bytes", "threads", "hangs")


@dataclass(frozen=True)
class Case:
    """A bundle in one transfer mode; `apart`: the device is said to have memory of its own."""

    path: MemoryPath
    mode: TransferMode
    apart: bool
    bundle: Path

    def __str__(self) -> str:
        return f"{self.path} {self.mode}{' apart' if self.apart else ''}"


def write_chain(file: Path) -> None:
    """A model of 8 products with 64 KiB of weights each."""
    rng, nodes, constants, value = np.random.default_rng(0), [], [], "x"
    for number in range(8):
        weight = (rng.standard_normal((128, 128)) / 11).astype(np.float32)
        constants.append(onnx.numpy_helper.from_array(weight, f"w{number}"))
        nodes.append(onnx.helper.make_node("MatMul", [value, f"w{number}"], [f"p{number}"]))
        nodes.append(onnx.helper.make_node("Tanh", [f"p{number}"], [value := f"y{number}"]))
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4, 128]) for name in ("x", value))
    graph = onnx.helper.make_graph(nodes, "chain", [x], [y], constants)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10), file)


def cases(name: str, folder: Path) -> list[Case]:
    """All cases on the device called `name`, compiled into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    source, device, found = folder / "chain.onnx", device_here(name), list[Case]()
    write_chain(source)
    for path in find_descriptor(name).memory_paths:
        bundle = folder / f"chain.{device.descriptor_name}.{path}.flashmem"
        opened = Bundle.open(bundle) if bundle.exists() else compile_smallest(source, bundle, name, path)
        modes = [mode for mode in usable_modes(opened, device, "auto").modes[path] if mode in opened.plan.layouts]
        found += [Case(path, mode, False, bundle) for mode in modes]
        if device.unified_memory and device.kind == "cpu":
            found += [Case(path, mode, True, bundle) for mode in modes if mode in ("dma", "interleave")]
    return found


def compile_smallest(source: Path, bundle: Path, device: str, path: MemoryPath) -> Bundle:
    """The model compiled within the smallest budget for everything that works."""
    try:
        return flashmem.compile(source, bundle, device=device, memory_path=path, budget=1)
    except BudgetError as error:
        return flashmem.compile(source, bundle, device=device, memory_path=path, budget=error.smallest_bytes)


class Player:
    """What a child process does: sessions of one case, which signals of its parent end."""

    def __init__(self, case: Case, device: str, patience: float, seed: int) -> None:
        self._case, self._device, self._patience, self._random = case, device, patience, random.Random(seed)
        self._bundle = Bundle.open(case.bundle)
        self._inputs = complete_inputs(self._bundle.program, {}, 0)
        self._budgets = list[weakref.ref[Budget]]()  # since the last signal
        self.counts = Counter[str]()
        self.failures = Counter[str]()
        if case.apart:
            there: Device = replace(device_here(device), unified_memory=False)
            options.find_device = lambda *_, **__: there  # type: ignore[assignment]
        sys.unraisablehook = lambda lost: self.failures.update([f"{lost.exc_type.__name__} ignored in {lost.object!r}"])
        self._watch_budgets()
        self._budget: int | None = None
        try:
            self._opened().close()
        except BudgetError as error:  # the smallest of another mode
            self._budget = error.smallest_bytes
        with self._opened() as session:
            self._answer = session.run(None, self._inputs)
        self._threads = set(threading.enumerate())
        begun = time.monotonic()
        self._cycle()
        self.seconds = time.monotonic() - begun
        self.counts.clear()
        gc.collect()
        gc.freeze()  # each signal is followed by a collection

    def _watch_budgets(self) -> None:
        make, budgets = Budget.__init__, self._budgets

        def noted(budget: Budget, *arguments: Any) -> None:
            make(budget, *arguments)
            budgets.append(weakref.ref(budget))

        Budget.__init__ = noted  # type: ignore[method-assign]

    def _opened(self) -> flashmem.Session:
        tier = "16MB" if self._case.apart and self._random.random() < 0.5 else None
        mode, budget = self._case.mode, self._budget
        return flashmem.Session(
            self._bundle, device=self._device, mode=mode, budget=budget, host_budget=tier, build_apart=False
        )

    def _cycle(self) -> None:
        """Open a session, run, and close it; sets `_where` and `_session` for who is interrupted."""
        self._session, self._where = None, "opening"
        self._session = self._opened()
        self._where = "run"
        for _ in range(RUNS):
            self._compare(self._session.run(None, self._inputs))
        self._where = "close"
        self._session.close()
        self._session = None

    def _compare(self, answer: Sequence[NDArray[Any]]) -> None:
        self.counts["right" if same(answer, self._answer) else "wrong"] += 1

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signal: that of Python, but it notes where."""
        stack = traceback.extract_stack(frame, limit=4)
        self._came = " < ".join(f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in reversed(stack))
        raise KeyboardInterrupt

    def play(self) -> None:
        """Sessions until a signal arrives, and what it leaves."""
        self._came = "no handler"
        faulthandler.dump_traceback_later(self._patience, exit=True, file=sys.__stderr__)
        self._session: flashmem.Session | None = None
        self._where, until = "opening", time.monotonic() + LONGEST
        try:
            print(_ARMED, flush=True)
            while time.monotonic() < until:
                self._cycle()
            self.counts["lost"] += 1
            self.failures[f"lost in: {self._came}"] += 1
        except KeyboardInterrupt:
            self.counts[self._where] += 1
        except BaseException as error:
            self._failed(error)
        try:
            if self._session is not None:
                self._session.close()
        except BaseException as error:
            self._failed(error)
        self._session = None
        self._count_left()
        faulthandler.cancel_dump_traceback_later()

    def _failed(self, error: BaseException) -> None:
        self.counts["failed"] += 1
        self.failures[f"{self._where}: {type(error).__name__}: {error}"] += 1

    def _count_left(self) -> None:
        gc.collect()
        until = time.monotonic() + LONGEST
        while (left := self._left_threads()) and time.monotonic() < until:
            time.sleep(0.002)
        self._threads.update(left)  # counted once
        self.counts["threads"] += len(left)
        self.failures.update(f"the thread {thread.name} is left" for thread in left)
        self.counts["bytes"] += sum(budget.total for each in self._budgets if (budget := each()) is not None)
        self._budgets.clear()

    def _left_threads(self) -> set[threading.Thread]:
        return set(threading.enumerate()) - self._threads


def play_batch(given: dict[str, Any]) -> None:
    """The child process: one batch."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    case = Case(given["path"], given["mode"], given["apart"], Path(given["bundle"]))
    player = Player(case, given["device"], given["patience"], given["seed"])
    print(player.seconds, flush=True)
    signal.signal(signal.SIGINT, player.interrupt)
    for _ in range(given["signals"]):
        player.play()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(json.dumps({"counts": player.counts, "failures": player.failures}), flush=True)


Found = tuple[Counter[str], Counter[str]]
"""What came of signals, and each failure with its number."""


def send_all(case: Case, device: str, signals: int, patience: float, seed: int) -> Found:
    """Send a batch of signals. A child that ends before it had all of them has a successor."""
    counts = Counter[str]()
    failures = Counter[str]()
    rng = random.Random(seed)
    left = signals
    while left > 0:
        found, failed = send_batch(case, device, left, patience, rng)
        left -= max(1, found["signals"])
        counts.update(found)
        failures.update(failed)
    return counts, failures


def send_batch(case: Case, device: str, signals: int, patience: float, rng: random.Random) -> Found:
    """Play a batch in a child, and send it signals; what came of them."""
    given = {
        "path": case.path, "mode": case.mode, "apart": case.apart, "bundle": str(case.bundle), "device": device,
        "patience": patience, "seed": rng.randrange(1 << 30), "signals": signals,
    }  # fmt: skip
    with subprocess.Popen(
        python_module("benchmarks.streaming.interrupts", "--child", json.dumps(given)),
        env=module_environment(), stdout=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        begun, sent = child.stdout.readline(), 0
        if not begun:
            raise UserError(f"the process that plays {case} could not begin")
        seconds = float(begun)
        for line in child.stdout:
            if line.strip() != _ARMED:
                found = json.loads(line)
                return Counter(found["counts"], signals=sent), Counter(found["failures"])
            time.sleep(rng.uniform(0, seconds))
            os.kill(child.pid, signal.SIGINT)
            sent += 1
    what = "hangs" if child.returncode == 1 else "failed"
    return Counter({"signals": sent, what: 1}), Counter({f"the process ended with exit code {child.returncode}": 1})


def said(counts: Counter[str]) -> str:
    """One line about a mode."""
    came = ", ".join(f"{counts[where]} in {where}" for where in _WHERE)
    rest = ", ".join(f"{counts[what]} {what}" for what in ("right", "wrong", "failed", "lost", "hangs"))
    return f"{counts['signals']} signals ({came}); {rest}; left: {counts['bytes']} bytes, {counts['threads']} threads"


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, send signals, count."""
    parser = Arguments(__doc__)
    parser.add_device()
    parser.add_argument("--signals", type=int, default=20_000, help="of all modes together")
    parser.add_argument("--modes", nargs="+", help="for instance map, or 'buffer dma apart'; default: all")
    parser.add_argument("--bundles", type=Path, help="a folder to keep bundles in")
    parser.add_argument("--jobs", type=int, default=processors(), help="processes; by default one for each processor")
    parser.add_argument("--patience", type=float, default=60, help="seconds until a process that does not answer is a hang")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child is not None:
        play_batch(json.loads(args.child))
        return
    parser.check_device(args.device)
    if min(args.signals, args.jobs) < 1:
        raise UserError("--signals and --jobs must be positive")
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(interrupt(args, args.bundles or Path(folder)))


def batches(signals: int, number: int, modes: int) -> list[int]:
    """The sizes of the batches of one of `modes`, which share the signals."""
    share = signals * (number + 1) // modes - signals * number // modes
    return [min(BATCH, share - done) for done in range(0, share, BATCH)]


def interrupt(args: argparse.Namespace, folder: Path) -> int:
    """Send all signals, in batches, and print what came of them mode by mode; returns the exit code."""
    device = device_here(args.device)
    rng = random.Random(args.seed)
    begun = time.monotonic()
    print(f"{device.name} ({device.platform}, driver {device.driver_version}), {processor_of(device)}")
    print(f"Python {platform.python_version()}, {args.jobs} processes", flush=True)
    played = [case for case in cases(args.device, folder) if {str(case), case.mode} & set(args.modes or [str(case)])]
    if not played:
        raise UserError("nothing is left to play; the device has no such transfer mode (flashmem devices)")
    print(f"{len(played)} modes, compiled in {time.monotonic() - begun:.0f} s", flush=True)
    counts = {case: Counter[str]() for case in played}
    with ThreadPoolExecutor(args.jobs) as pool:
        sending = {
            case: [
                pool.submit(send_all, case, args.device, signals, args.patience, rng.randrange(1 << 30))
                for signals in batches(args.signals, number, len(played))
            ]
            for number, case in enumerate(played)
        }
        try:
            for case, futures in sending.items():
                failures = Counter[str]()
                for future in futures:
                    found, failed = future.result()
                    counts[case].update(found)
                    failures.update(failed)
                print(f"{case}: {said(counts[case])}", flush=True)
                for failure, count in failures.items():
                    print(f"  {count} times {failure}", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    whole = sum(counts.values(), Counter[str]())
    print(f"all modes, in {time.monotonic() - begun:.0f} s: {said(whole)}")
    summary = {"device": device.name, "platform": device.platform, "driver": device.driver_version, "python": sys.version}
    print(json.dumps({**summary, "by_mode": {str(case): counts[case] for case in played}}))
    return 1 if any(whole[what] for what in _BAD) or not whole["signals"] else 0


if __name__ == "__main__":
    run_command(main)
