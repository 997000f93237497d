"""Cold and warm: consecutive answers of one session, compared with steady kernels with all weights resident.

    python -m benchmarks.streaming.warm --zoo DIR [--device pocl] [--models NAME ...] [--shares 1.2 0.5] [--runs 5] [--plot PNG]

DIR contains models that `benchmarks.exports` wrote. Each model is compiled without a budget, and for each fraction
(`--shares`) of its memory with all weights resident. Each kind of session runs in its own process, `--runs` times alternately;
prints medians of each answer:

- `prepared`: a session that prepares between its runs (the default), with `--pause` seconds each;
- `unprepared`: the same with `Session(prepare=False)`;
- `resident`: compiled with `--optimize steady`, everything resident before the first answer.

Requirements: the first answer is as early as without preparing. The fifth takes at most 1.1 times an answer with everything
resident, if the budget has room (no budget, or a share above 1). Every answer is compared with the session's first one.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import Arguments, run_command
from benchmarks.processes import weights_of
from benchmarks.worker import inputs_for

MODELS = ["resnet50", "vit-b16", "gptneo-125m"]
FIFTH = 5
WAYS = ("prepared", "unprepared", "resident")


def worker(args: argparse.Namespace) -> None:
    """Print the answers of one session, in this process."""
    from flashmem import Bundle, Session
    from flashmem.runtime.opencl.context import Context
    from flashmem.runtime.opencl.discovery import find_device

    driver = Context(find_device(args.device)).queue()
    ports = Bundle.open(args.bundle).program.inputs
    given = args.inputs if args.inputs is not None and args.inputs.is_file() else None
    inputs = inputs_for([(port.name, port.shape, port.dtype) for port in ports], given)
    strategy, prepare = ("preload", False) if args.way == "resident" else ("auto", args.way == "prepared")
    seconds, steady, errors = [], [], []
    first: list[Any] = []
    begun = time.perf_counter()
    with Session(args.bundle, device=args.device, strategy=strategy, prepare=prepare) as session:
        for number in range(args.answers):
            begun = time.perf_counter() if number else begun
            outputs = session.run(None, inputs)
            seconds.append(time.perf_counter() - begun)
            assert session.last_run is not None
            steady.append(session.last_run.steady)
            first = first or outputs
            errors.append(max(difference(a, b) for a, b in zip(first, outputs, strict=True)))
            time.sleep(args.pause)
    driver.finish()
    print(json.dumps({"seconds": seconds, "steady": steady, "error": max(errors)}))


def difference(one: Any, other: Any) -> float:
    """The largest difference, as a fraction of the range."""
    if np.array_equal(one, other, equal_nan=True):
        return 0.0
    return float(np.max(np.abs(one - other)) / max(np.ptp(one), 1e-30))


def compiled(model: Path, output: Path, device: str, *options: str) -> Path:
    """A bundle, compiled in a new process, with its kernels."""
    command = [sys.executable, "-m", "flashmem", "compile", str(model), "-o", str(output), "--device", device, *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return output


def measured(args: argparse.Namespace, bundles: dict[str, Path], inputs: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows of each kind of session, which alternate."""
    rows: dict[str, list[dict[str, Any]]] = {way: [] for way in bundles}
    shuffled = random.Random(0)
    for _ in range(args.runs):
        for way in shuffled.sample(list(bundles), len(bundles)):
            command = [
                sys.executable, "-m", "benchmarks.streaming.warm", "--device", args.device, "--answers", str(args.answers),
                "--pause", str(args.pause), "--way", way.partition(" ")[0], "--bundle", str(bundles[way]),
                "--inputs", str(inputs),
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{way} failed:\n{done.stderr}")
            rows[way].append(json.loads(done.stdout.splitlines()[-1]))
    return rows


def model_rows(args: argparse.Namespace, model: Path, scratch: Path) -> dict[str, list[dict[str, Any]]]:
    """Compile a model for all kinds of session, and measure them."""
    from flashmem import Bundle
    from flashmem.program.program import fixed_bytes

    cold = compiled(model, scratch / "cold.flashmem", args.device)
    bundles = {"resident": compiled(model, scratch / "steady.flashmem", args.device, "--optimize", "steady")}
    opened = Bundle.open(cold)
    everything = fixed_bytes(opened.program) + weights_of(opened)
    budgets = {"no budget": cold}
    for share in args.shares:
        budget = str(int(share * everything))
        budgets[f"{share:g}"] = compiled(model, scratch / f"{share:g}.flashmem", args.device, "--budget", budget)
    bundles |= {f"{way} {name}": path for name, path in budgets.items() for way in ("prepared", "unprepared")}
    return measured(args, bundles, model.parent / "inputs.npz")


def medians(rows: list[dict[str, Any]]) -> list[float]:
    """The median seconds of each answer."""
    return [statistics.median(each) for each in zip(*(row["seconds"] for row in rows), strict=True)]


def show(name: str, rows: dict[str, list[dict[str, Any]]]) -> None:
    """Print the milliseconds of a model's answers, and the requirements."""
    resident = statistics.median(medians(rows["resident"])[1:])
    print(f"\n{name}: {1e3 * resident:.1f} ms an answer with everything resident")
    print("budget       first, ms  unprepared    second   fifth  fifth / resident  unprepared  switched  error / range")
    for way in rows:
        kind, _, budget = way.partition(" ")
        if kind != "prepared":
            continue
        ours, others = medians(rows[way]), medians(rows[f"unprepared {budget}"])
        steady = [row["steady"].index(True) + 1 for row in rows[way] if True in row["steady"]]
        switched = f"at {statistics.median(steady):g}" if steady else "never"
        error = max(row["error"] for row in rows[way])
        print(
            f"{budget:11} {1e3 * ours[0]:10.1f} {1e3 * others[0]:11.1f} {1e3 * ours[1]:9.1f} {1e3 * ours[FIFTH - 1]:7.1f} "
            f"{ours[FIFTH - 1] / resident:17.2f} {others[FIFTH - 1] / resident:11.2f}  {switched:>8} {error:14.1e}"
        )


def draw(path: Path, found: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    """Plot milliseconds by answer, one plot for each model; dashed: everything resident."""
    from flashmem.tools.plots.figure import COLOURS, MARKERS, figure, legend_below, plain_axes

    with figure(path, columns=len(found), size=(4.2 * len(found), 3.8), squeeze=False) as (drawn, axes):
        for panel, (name, rows) in zip(axes[0], found.items(), strict=True):
            plain_axes(panel)
            for number, way in enumerate(way for way in rows if way != "resident"):
                kind, _, budget = way.partition(" ")
                values = [1e3 * each for each in medians(rows[way])]
                label = budget if budget == "no budget" else f"{budget} of all weights"
                style = "-" if kind == "prepared" else ":"
                colour, marker = COLOURS[number // 2 % len(COLOURS)], MARKERS[number % len(MARKERS)]
                panel.plot(range(1, len(values) + 1), values, style, color=colour, marker=marker, label=f"{label}, {kind}")
            panel.axhline(1e3 * statistics.median(medians(rows["resident"])[1:]), color="black", ls="--", label="resident")
            panel.set(title=name, xlabel="answer", yscale="log")
        axes[0][0].set_ylabel("ms")
        legend_below(drawn, axes[0][0], columns=3)


def main() -> None:
    """Compile, measure alternately, print."""
    parser = Arguments(__doc__)
    parser.add_zoo(required=False)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_device("pocl")
    parser.add_argument("--shares", type=float, nargs="*", default=[1.2, 0.5])
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between two answers")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--bundle", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--inputs", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way is not None:
        worker(args)
        return
    parser.check_device(args.device)
    if args.zoo is None or args.answers < FIFTH:
        parser.error(f"name the folder of the exported models with --zoo, and {FIFTH} answers at least")
    if args.plot is not None:
        from flashmem.tools.plots.figure import require_matplotlib

        require_matplotlib()
    found = {}
    for name, model in parser.models_in(args.zoo, args.models).items():
        with tempfile.TemporaryDirectory() as scratch:
            found[name] = model_rows(args, model, Path(scratch))
        show(name, found[name])
    if args.json is not None:
        args.json.write_text(json.dumps(found))
    if args.plot is not None:
        draw(args.plot, found)


if __name__ == "__main__":
    run_command(main)
