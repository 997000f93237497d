"""What each part of the method brings (FlashMem Figure 7): latency and memory, one part added at a time.

    python -m benchmarks.ablation --zoo DIR --device pocl [--budget-ratio 0.25] [--disk cold] [--runs 5] [--json a.json]

One device, one memory path, one budget, and one transfer mode, `interleave`: weights are read into staging, and the compute
queue moves them on to where kernels read them, as the plan's x_{w,l} say. The steps turn one switch each:

1. preload: everything resident before the first layer, as engines do.
2. + OPG: streamed on the planner's plan inside the budget, layers as fused as they can be, kernels that only compute. Every
   move is made by a launch between two of them (`Session(lanes=False)`), on the same queue, so it delays what comes after.
3. + adaptive unfusion: the same, and fused layers split where the plan gains (`unfusion` of `flashmem.compile`).
4. + kernel rewriting: the bundle of step 3; kernels move the next weights between their own steps (`Session(lanes=True)`).

Two rows stand beside them. *Kernel rewriting without unfusion* completes the square, because the two depend on each other: a
split makes room for moves inside kernels (C_l). Moves by launches of their own take the same time wherever they are, so that
step 3 can pay, in more launches, for what only step 4 uses. *The device's own mode*, where that is not `interleave`, is what a
user gets: with `map` and `alias` kernels read the file's bytes in place and nothing is moved; `dma` has a copy engine.

Plans of one program must give the same bits, which is checked. Memory is what the session's ledger counted, at most and on
average over time, and the process above itself before the model is opened. With `--objective paper` C_l is a constraint; in the
latency objective a chunk above C_l costs the time of its copy. Medians of fresh processes that take turns. Needs the `bench`
extra.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import flashmem
from benchmarks.processes import median, run_bundle, same_bits, take_turns, weights_of
from benchmarks.zoo import MODELS, models_in, planned_again, within
from flashmem.device import TransferMode


@dataclass(frozen=True)
class Step:
    """One row that streams: how its bundle is compiled, and how it is played."""

    name: str
    mode: TransferMode
    unfusion: bool
    lanes: bool

    @property
    def flags(self) -> tuple[str, ...]:
        """For `benchmarks.worker`."""
        return ("--mode", self.mode, *(() if self.lanes else ("--no-lanes",)))


def steps_of(own_mode: TransferMode) -> list[Step]:
    """The rows below preload, for a device whose own mode is `own_mode`."""
    steps = [
        Step("+ OPG", "interleave", unfusion=False, lanes=False),
        Step("+ adaptive unfusion", "interleave", unfusion=True, lanes=False),
        Step("+ kernel rewriting", "interleave", unfusion=True, lanes=True),
        Step("kernel rewriting without unfusion", "interleave", unfusion=False, lanes=True),
    ]
    if own_mode != "interleave":
        # Layers stay whole there: without moves in kernels C_l plays no part, and a split could only cost.
        steps.append(Step(f"the device's own mode, {own_mode}", own_mode, unfusion=False, lanes=True))
    return steps


def measure(name: str, model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One model: a row for each step."""
    common = {"device": args.device, "memory_path": args.memory_path, "objective": args.objective, "chunk": args.chunk}
    whole = flashmem.compile(model, folder / "whole.flashmem", **common, unfusion=False)
    path, weights = whole.program.memory_path, weights_of(whole)
    steps = steps_of(whole.descriptor.modes[path][0])
    budget = int(args.budget_ratio * weights)
    made = {}
    for mode, unfusion in dict.fromkeys((step.mode, step.unfusion) for step in steps):
        output = folder / f"{mode}-{unfusion}.flashmem"
        split = partial(flashmem.compile, model, output, **common, mode=mode)
        made[mode, unfusion] = within(budget, split if unfusion else partial(planned_again, whole, output, mode=mode))
    bundles = {step.name: made[step.mode, step.unfusion] for step in steps}
    runs: dict[str, tuple[Path, tuple[str, ...]]] = {"preload": (whole.path, ("--strategy", "preload"))}
    runs |= {step.name: (bundles[step.name].path, step.flags) for step in steps}
    answers = {}
    for number, (key, (where, extra)) in enumerate(runs.items()):  # fills the program cache
        answers[key] = folder / f"{number}.npz"
        run_bundle(where, args.device, *extra, "--repeat", "2", "--outputs", str(answers[key]))
    rows = take_turns(
        {
            key: partial(run_bundle, where, args.device, *extra, cold=args.disk == "cold")
            for key, (where, extra) in runs.items()
        },
        args.runs,
    )
    fields = ("integrated", "ledger_peak", "ledger_average", "above_bare")
    table: dict[str, dict[str, Any]] = {key: {f: median(found, f) for f in fields} for key, found in rows.items()}
    programs = {"preload": whole.program.launches}
    for step, bundle in bundles.items():
        table[step]["budget"] = bundle.budget_bytes
        table[step]["layers"] = len(bundle.program.launches)
        table[step]["unfusion"] = [note for note in bundle.plan.notes if "unfusion" in note]
        # Another cut rounds differently, so only plans of one program must agree to the bit.
        twin = next((other for other, launches in programs.items() if launches == bundle.program.launches), None)
        table[step]["same bits"] = None if twin is None else same_bits([answers[twin], answers[step]])
        programs[step] = bundle.program.launches
    return {"model": name, "weights": weights, "disk": args.disk, "path": path, "steps": table}


def show(result: dict[str, Any]) -> None:
    """One table; factors are against preload."""
    base = result["steps"]["preload"]
    print(
        f"\n### {result['model']}, {result['weights'] / 1e6:.0f} MB of weights, {result['path']} path, file {result['disk']}\n"
    )
    print("| step | budget, MB | layers | first answer, s | faster | most held / average, MB | less on average | process, MB |")
    print("|---|---|---|---|---|---|---|---|")
    for key, row in result["steps"].items():
        budget = f"{row['budget'] / 1e6:.0f}" if row.get("budget") else "none"
        held = f"{row['ledger_peak'] / 1e6:.0f} / {row['ledger_average'] / 1e6:.0f}"
        print(
            f"| {key} | {budget} | {row.get('layers', '')} | {row['integrated']:.3f} "
            f"| {base['integrated'] / row['integrated']:.2f} x | {held} "
            f"| {base['ledger_average'] / row['ledger_average']:.1f} x | {row['above_bare'] / 1e6:.0f} |"
        )
    for key, row in result["steps"].items():
        for note in row.get("unfusion", ()):
            print(f"\n{key}: {note}")
        if row.get("same bits") is False:
            print(f"\n{key}: DIFFERENT BITS from another plan of the same program")
    print(flush=True)


def main() -> None:
    """Measure every model found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--memory-path", default="auto", choices=("auto", "buffer", "texture"))
    parser.add_argument("--budget-ratio", type=float, default=0.25, help="of the weights")
    parser.add_argument("--objective", default="auto", choices=("auto", "first", "paper"))
    parser.add_argument("--chunk", default="1MiB")
    parser.add_argument("--disk", default="cold", choices=("cached", "cold"))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = models_in(args.zoo, args.models, parser)
    results = []
    for name, model in found.items():
        with tempfile.TemporaryDirectory(prefix="flashmem-ablation-") as folder:
            results.append(measure(name, model, Path(folder), args))
            show(results[-1])
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
