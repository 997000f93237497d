"""Fuzzing of bundles: changed bundles, opened and run: `python -m tests.fuzz.bundles --count 10000 --seed 1 [--jobs 2]`.

A *damaged* bundle has changed bytes in any file. It must end in one sentence or in the right answer. A *rewritten* one has
changed values in a JSON file, or changed statements and senseless text in a file of kernels, with every hash corrected. It may
be a valid program, so any answer is accepted, but no crash and no hang. One with changed kernels is opened, and not run.
Workers are processes that open, run and report. A worker that ends, or reports nothing for 10 s, is a finding, and so is a
traceback.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import resource
import select
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.bundle_changes import files_of, fit, rewrite
from tests.support.mini_bundle import write_mini_bundle
from tests.support.paths import DATA

PATIENCE_SECONDS = 10.0
MODELS = ("resnet-tiny", "gptneo-tiny-tied", "mobilenet-tiny")


@dataclass(frozen=True)
class Base:
    """A bundle whose copies are changed; its inputs and right answers are files beside it."""

    name: str
    path: Path

    @property
    def inputs(self) -> Path:
        return self.path.with_suffix(".inputs.npz")

    def answers(self, device: int, mode: str) -> Path:
        return self.path.with_suffix(f".{device}-{mode}.npz")


@dataclass(frozen=True)
class Job:
    """A changed bundle to run, and the expected answer."""

    path: str
    inputs: str
    answers: str
    device: int
    mode: str
    opened_only: bool = False  # not run: drivers take seconds to build other kernels


@dataclass(frozen=True)
class Outcome:
    """The outcome of a changed bundle: `right`, `different`, `sentence`; or, all findings: `traceback`, `crash`, `hang`."""

    kind: str
    text: str = ""


# -- the bundles


def make_bases(folder: Path, *, compiled: bool) -> list[Base]:
    """Bundles with hand-written kernels on both memory paths; with `compiled`, also bundles of three small models."""
    import flashmem
    from flashmem.bundle.bundle import Bundle
    from flashmem.runtime.engine.inputs import complete_inputs

    bases = []
    for path in ("buffer", "texture"):
        base = Base(f"mini-{path}", folder / f"mini-{path}.flashmem")
        model = write_mini_bundle(base.path, path)  # type: ignore[arg-type]
        np.savez(base.inputs, **model.inputs())  # type: ignore[arg-type]
        bases.append(base)
    for name in MODELS if compiled else ():
        base = Base(name, folder / f"{name}.flashmem")
        flashmem.compile(DATA / f"{name}.onnx", base.path, chunk="4KiB")
        inputs = complete_inputs(Bundle.open(base.path).program, {}, 0)
        np.savez(base.inputs, **inputs)  # type: ignore[arg-type]
        bases.append(base)
    return bases


def cases(base: Base) -> list[tuple[int, str]]:
    """(device, mode) of everything on this machine that runs the bundle; writes its answers to files."""
    from flashmem.bundle.bundle import Bundle
    from flashmem.runtime.opencl.devices import descriptor_for
    from flashmem.runtime.opencl.discovery import list_devices
    from flashmem.runtime.session import Session

    memory_path, found = Bundle.open(base.path).program.memory_path, []
    for number, device in enumerate(list_devices()):
        for mode in descriptor_for(device).modes.get(memory_path, ()):
            with Session(base.path, device=str(number), mode=mode, verify_weights=True) as session:
                answers = session.run(None, dict(np.load(base.inputs)))
            np.savez(base.answers(number, mode), *answers)
            found.append((number, mode))
    return found


# -- the changes


def change(path: Path, rng: random.Random) -> tuple[str, str]:
    """Change one thing in a bundle; returns "damaged" or "rewritten", and a description of the change."""
    if rng.random() < 0.5:
        return "damaged", _damage(path, rng)
    return "rewritten", _rewrite(path, rng)


def _damage(path: Path, rng: random.Random) -> str:
    files = [path / "manifest.json", *sorted(files_of(path).iterdir())]
    weights = files_of(path) / "weights.bin"
    file = weights if rng.random() < 0.4 else rng.choice(files)
    size = file.stat().st_size
    how = rng.choice(("flip", "flip", "flip", "truncate", "extend", "zero", "swap", "remove"))
    if how == "remove":
        file.unlink()
    elif how == "truncate":
        os.truncate(file, rng.randrange(size))
    else:
        content = bytearray(file.read_bytes())
        if how == "flip":
            for _ in range(rng.choice((1, 1, 8))):
                content[rng.randrange(size)] ^= 1 << rng.randrange(8)
        elif how == "extend":
            content += rng.randbytes(rng.choice((1, 4096)))
        elif how == "zero":
            start = rng.randrange(size)
            content[start : start + 4096] = bytes(len(content[start : start + 4096]))
        else:
            a, b, length = rng.randrange(size), rng.randrange(size), rng.choice((1, 64, 4096))
            one, other = content[a : a + length], content[b : b + length]
            if len(one) == len(other) and abs(a - b) >= length:
                content[a : a + length], content[b : b + length] = other, one
        file.write_bytes(content)
    return f"{how} {file.name}"


def _rewrite(path: Path, rng: random.Random) -> str:
    names = ("program.json",) * 5 + ("plan.json",) * 3 + ("manifest.json", "checksums.bin") + ("kernels.cl", "kernels_lane.cl")
    name = rng.choice(names)
    if name.endswith(".cl"):
        return _rewrite_kernels(path, name, rng)
    if name == "checksums.bin":
        file = files_of(path) / name
        content = bytearray(file.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
        fit(path, name)
        return "one bit of checksums.bin"
    done: list[str] = []

    def put(data: Any) -> None:
        if name != "program.json" and rng.random() < 0.2:
            done.append(_together(data, rng))
            return
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            places = list(_places(data))
            if name == "program.json" and rng.random() < 0.5:
                places = [place for place in places if place[0] == "launches"] or places
            *way, key = rng.choice(places)
            holder = data
            for step in way:
                holder = holder[step]
            if rng.random() < 0.05:
                del holder[key]
                done.append(f"{name} {[*way, key]} removed")
            else:
                holder[key] = _another(holder[key], data, places, rng)
                done.append(f"{name} {[*way, key]} = {str(holder[key])[:60]}")

    rewrite(path, name, put)
    return "; ".join(done)


def _together(data: Any, rng: random.Random) -> str:
    """Change values that a checker must see together: the pieces and the ring of a plan, or the files of a manifest."""
    if "layouts" not in data:
        file = rng.choice(("../../.bashrc", "/etc/passwd", "notes", "weights.bin", "program.1.json"))
        data["files"][file] = {"nbytes": 1, "sha256": ""}
        return f"manifest.json names {file}"
    piece, ring = rng.choice((0, 1, 16, 4096)), rng.choice((0, 16, 48, 4095, 4096, 8192, 2**40))
    data["piece_bytes"] = piece
    for layout in data["layouts"].values():
        layout.update(piece_bytes=piece, ring_bytes=ring)
    return f"plan.json: pieces of {piece} bytes, rings of {ring}"


_SENSELESS = (
    "/*", "//", "*/", "\\\n", "__kernel ", "__kernel void a(", "void a(", "#define A x ## 0 ", "##", "## a", " ", "a", "#", "(",
    "e0[", "vload4(0, e0 + (", "k_epilogue(", "\n", "//@\n", "//@ items 1\n",
)  # fmt: skip
_STATED = ("-", "(", "1 + ", "min(", "9", "width * ", "row % ", "x", "1, ", "2 ** ", "[", " < ")


def _rewrite_kernels(path: Path, name: str, rng: random.Random) -> str:
    """Change a statement of a kernel, or add text that is no code: other code may do whatever it likes, and tests nothing."""
    file = files_of(path) / name
    lines, times = file.read_text().split("\n"), rng.choice((1, 2, 100, 20_000))
    if rng.random() < 0.5:
        at = rng.choice([number for number, line in enumerate(lines) if line.startswith("//@ ")])
        piece, cut = rng.choice(_STATED) * times, rng.randrange(4, len(lines[at]) + 1)
        lines[at] = lines[at][:cut] + piece + rng.choice((lines[at][cut:], "", "1", ")" * times, "]"))
    else:
        at, piece = rng.randrange(len(lines)), rng.choice(_SENSELESS) * times
        lines.insert(at, piece + rng.choice(_SENSELESS))
    file.write_text("\n".join(lines))
    fit(path, name)
    return f"{name} line {at}: {len(piece)} letters of {piece[:20]!r}"


def _places(data: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value in JSON data."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*way, key)
        yield from _places(value, (*way, key))


def _another(value: Any, data: Any, places: list[tuple[Any, ...]], rng: random.Random) -> Any:
    """Another value than `value`: near it, extreme, of another type, or from another place."""
    if rng.random() < 0.25:
        other = data
        for step in rng.choice(places):
            try:
                other = other[step]
            except (KeyError, IndexError, TypeError):  # an earlier change removed it
                return None
        return copy.deepcopy(other)
    if isinstance(value, bool) or value is None:
        return rng.choice((0, 1, "", [], None, True))
    if isinstance(value, int):
        near = (value + 1, value - 1, value * 2, value // 2, value * 1000, value + 512, value + 4096, -value)
        return rng.choice((*near, *near, 0, 1, 2**31 - 1, 2**31, 2**40, 2**63, 10**30, 10**400, float(value)))
    if isinstance(value, float):
        extreme = (0.0, -0.0, 1e39, 1e300, float("inf"), float("nan"), 10**400, -(10**400))
        return rng.choice((value * 2, -value, *extreme, str(value)))
    if isinstance(value, str):
        return rng.choice((value + "x", value[:-1], "", "/etc/passwd", "é" * 100, 7))
    if isinstance(value, list):
        return rng.choice((value[:-1], value[1:], value * 2, [], list(reversed(value)), {}, None))
    return rng.choice(({}, [], None, 0))


# -- running them


def work() -> None:
    """The worker: reads a job a line, and writes an outcome a line."""
    from flashmem.base.errors import RunError, UserError
    from flashmem.bundle.bundle import Bundle
    from flashmem.runtime.engine.report import process_peak_rss
    from flashmem.runtime.session import Session

    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # a driver's output is not a report
    for line in sys.stdin:
        job = Job(**json.loads(line))
        try:
            if job.opened_only:
                Bundle.open(job.path)
                print(json.dumps({**asdict(Outcome("right")), "peak": process_peak_rss()}), file=reports)
                continue
            options: dict[str, Any] = {"device": str(job.device), "mode": job.mode, "verify_weights": True}
            with Session(job.path, **options) as session:
                answers = session.run(None, dict(np.load(job.inputs)))
            expected = list(np.load(job.answers).values())
            right = len(answers) == len(expected) and all(
                a.dtype == e.dtype and np.array_equal(a, e, equal_nan=a.dtype.kind == "f")
                for a, e in zip(answers, expected, strict=False)
            )
            outcome = Outcome("right" if right else "different")
        except (UserError, RunError, ValueError) as error:
            plain = type(error) is ValueError and not str(error).startswith(("input ", "the model "))
            outcome = Outcome("traceback" if plain or "\n" in str(error) else "sentence", f"{type(error).__name__}: {error}")
        except BaseException as error:
            outcome = Outcome("traceback", f"{type(error).__name__}: {error}")
        print(json.dumps({**asdict(outcome), "peak": process_peak_rss()}), file=reports)


class Worker:
    """A process that runs changed bundles, started again when a bundle ends it."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, job: Job, patience: float = PATIENCE_SECONDS) -> Outcome:
        fresh = self._process is None
        if self._process is None:
            command = [sys.executable, "-m", "tests.fuzz.bundles", "--worker"]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=DATA.parent.parent
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # it ended; the read reports that
            self._process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
            self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], patience + 60 * fresh)
        line = self._process.stdout.readline() if ready else b""
        if line:
            report = json.loads(line)
            self.peak_bytes = max(self.peak_bytes, report["peak"])
            return Outcome(report["kind"], report["text"])
        if not ready:
            self._process.kill()
        code = self._process.wait()
        self._process = None
        return Outcome("crash", f"exit status {code}") if ready else Outcome("hang")

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._process = None


@dataclass
class Result:
    """The result of a series of changed bundles: the number of each (change, outcome), and every finding."""

    counts: Counter[tuple[str, str]]
    findings: list[str]
    peak_bytes: int


def fuzz(bases: list[Base], count: int, seed: int, folder: Path, jobs: int = 1) -> Result:
    """Change, open and run `count` bundles; the same ones for the same seed."""
    known = {base.name: cases(base) for base in bases}
    result = Result(Counter(), [], 0)

    def series(number: int) -> None:
        with _worker(result) as worker:
            for index in range(number, count, jobs):
                rng = random.Random(f"{seed}-{index}")
                base = rng.choice(bases)
                device, mode = rng.choice(known[base.name])
                path = folder / f"{index}.flashmem"
                shutil.copytree(base.path, path)
                how, what = change(path, rng)
                files, opened_only = (str(base.inputs), str(base.answers(device, mode))), what.startswith("kernels")
                outcome = worker.run(Job(str(path), *files, device, mode, opened_only))
                result.counts[how, outcome.kind] += 1
                if outcome.kind in ("crash", "hang", "traceback") or (how, outcome.kind) == ("damaged", "different"):
                    where = f"{base.name}, device {device}, mode {mode}"
                    result.findings.append(f"{index}: {outcome.kind} {outcome.text} after {what} ({where})")
                    print(result.findings[-1], file=sys.stderr, flush=True)  # now: a long series may be stopped
                shutil.rmtree(path)

    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(series, number) for number in range(jobs)]:
            done.result()
    return result


@contextmanager
def _worker(result: Result) -> Iterator[Worker]:
    worker = Worker()
    try:
        yield worker
    finally:
        worker.close()
        result.peak_bytes = max(result.peak_bytes, worker.peak_bytes)


def main() -> int:
    """The command: prints the number of each outcome, and the findings; returns 1 if it has any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return 0
    with tempfile.TemporaryDirectory(prefix="fuzz-bundles-") as name:
        folder = Path(name)
        result = fuzz(make_bases(folder, compiled=True), options.count, options.seed, folder, options.jobs)
    for (how, kind), number in sorted(result.counts.items()):
        print(f"{how:9} {kind:10} {number}")
    print(f"largest process {result.peak_bytes / 1e6:.0f} MB")
    print(*result.findings, f"{len(result.findings)} findings of {options.count}", sep="\n")
    return 1 if result.findings else 0


if __name__ == "__main__":
    sys.exit(main())
