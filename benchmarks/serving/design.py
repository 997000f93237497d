"""Designs for an application of four models: RASS and exhaustive search, switches, and memory pressure.

    python -m benchmarks.serving.design --zoo DIR [--device pocl ...] [--json FILE] [--plot PNG]

DIR contains models that `benchmarks.exports` wrote. The application classifies images (ResNet-50 or ViT-B/16), reads
(GPT-Neo-125M) and measures depth (DepthAnything-S), in single and in half precision, within each of `--budgets`. Every
candidate is measured. Then an exhaustive search over all decisions, in plain arithmetic, must agree with RASS. Prints the
designs and the policy (CARIn, Tables 7 and 8), and the optimality over that of simpler methods (Figures 3 to 6). Also prints
the time of switches, and the reactions to a process that occupies a core or memory (Figures 7 and 8). `--describe` solves the
same application for devices that are not present, by simulation. With root rights, memory is occupied inside a cgroup;
otherwise that part is skipped. `--made-up` applies pressure to a simulated system, where nothing is occupied and no time
passes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import Arguments, run_command
from benchmarks.memory_cgroup import HardLimit, why_no_limit
from benchmarks.serving import design_exhaustive as plain
from benchmarks.serving.design_plots import draw_pressure, draw_ratios, written
from benchmarks.serving.design_pressure import MadeUp, pressed
from flashmem.base.units import format_size
from flashmem.bundle.cache import LIMIT_VARIABLE
from flashmem.runtime.application.designs import Designs, DeviceState
from flashmem.tools.design.application import Measure, read_application
from flashmem.tools.design.metrics import Candidate, value
from flashmem.tools.design.profiles import Profiling, candidates, processors_here
from flashmem.tools.design.writer import Solved, describe, solved, write

TASKS = ("see=resnet50:0.7613,vit-b16:0.8107", "read=gptneo-125m", "depth=depthanything-s")
"""Accuracy is the top-1 of torchvision's first weights. Each other task has one model, and no objective uses its accuracy. Half
precision changes none of CARIn's by more than 0.002 (its Tables 2 to 5), so it counts as the same.
"""

MOST_CLOSING_MS = 50
MOST_RUNS = 3
"""Limits of the benchmark: milliseconds of a switch without loading the new sessions' weights, and runs until a reaction."""

GROUP_BYTES = 6 << 30
"""Limit of the cgroup before it is lowered to its present use."""


def application(args: argparse.Namespace, devices: Sequence[str], budgets: Sequence[str], file: Path) -> None:
    """Write `app.toml`."""
    lines = [f"budgets = {json.dumps(list(budgets))}"]
    lines += [f'[[device]]\nname = "{name}"' for name in devices]
    for each in args.tasks:
        task, _, models = each.partition("=")
        lines.append(f'[[task]]\nname = "{task}"')
        named = dict(model.partition(":")[::2] for model in models.split(","))
        for model, path in args.parser.models_in(args.zoo, list(named)).items():
            lines.append(f"[[task.model]]\npath = {json.dumps(str(path.resolve()))}")
            lines.append(f"precision = {json.dumps(args.precisions)}")
            lines += [f"accuracy = {named[model]}"] if named[model] else []
        if ":" in models:
            lines.append(f'[[objective]]\nmaximise = "accuracy"\ntask = "{task}"\nweight = {args.weight}')
    lines.append('[[objective]]\nminimise = "latency"\n[[objective]]\nminimise = "memory"')
    lines.append(f'[[constraint]]\nmetric = "latency"\nstatistic = "p90"\nat_most = "{args.within}"')
    file.write_text("\n".join(lines) + "\n")


def compared(answer: Solved, found: Sequence[Candidate]) -> dict[str, Any]:
    """The exhaustive search, and RASS's optimality over that of simpler methods, on all processors and on each set.

    Exits if RASS and the exhaustive search differ.
    """
    asked = answer.application
    everything = plain.exhaustive(asked, found)
    differing = plain.disagreements(answer, everything)
    if differing:
        raise SystemExit("RASS and the exhaustive search differ:\n" + "\n".join(differing))
    rows = []
    for name, kept in [("any", found), *((" and ".join(one), _on(found, one)) for one in answer.solution.sets)]:
        ours = plain.best_of(everything, kept)
        theirs = {
            "best accuracy": plain.best_of(everything, plain.best_accuracy(asked, kept)),
            "smallest model": plain.best_of(everything, plain.smallest_model(asked, kept)),
            "unaware of other models": plain.unaware(asked, kept, everything),
            "weighted sum (OODIn)": plain.unaware(asked, kept, everything, weighted_sum=True),
        }
        ratios = {way: _ratio(ours, score) for way, score in theirs.items()}
        rows.append({"processors": name, "optimality": _finite(ours), "ratio": ratios})
    return {"decisions": len(answer.decisions), "allowed": answer.allowed, "ratios": rows}


def _on(found: Sequence[Candidate], processors: Sequence[str]) -> list[Candidate]:
    return [one for one in found if one.processor.name in processors]


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    """The ratio; None if one of them satisfies no constraint. An infinite ratio becomes the largest float."""
    if ours is None or theirs is None:
        return None
    return 1.0 if ours == theirs else _finite(ours / theirs)


def _finite(number: float | None) -> float | None:
    return number if number is None or math.isfinite(number) else sys.float_info.max


def tables(answer: Solved) -> str:
    """The designs and the policy as Markdown: CARIn's Tables 7 and 8."""
    designs = describe(answer)
    lines = ["| design | kept for | optimality | models, device and budget of each task | latency, ms | memory, MB |"]
    lines += ["|---|---|---|---|---|---|"]
    for number, row in enumerate(answer.solution.designs):
        decision = answer.decisions[row]
        models = "; ".join(f"{one.variant.title}, {one.processor.device}, {_budget(one)}" for one in decision)
        latency = ", ".join(f"{1e3 * value(decision, Measure('latency', 'average', one.task)):.0f}" for one in decision)
        memory = sum(one.profile.memory for one in decision) / 1e6
        score = answer.solution.optimality[row]
        roles = ", ".join(answer.solution.roles[number])
        lines.append(f"| d{number} | {roles} | {score:.2f} | {models} | {latency} | {memory:.0f} |")
    lines += ["", "| " + " | ".join([*(" and ".join(each) for each in designs.sets), "memory", "design"]) + " |"]
    lines += ["|" + "---|" * (len(designs.sets) + 2)]
    words = {None: "-", True: "T", False: "F"}
    for rule in designs.policy:
        lines.append("| " + " | ".join([*(words[each] for each in (*rule.sets, rule.memory)), f"d{rule.design}"]) + " |")
    return "\n".join(lines)


def _budget(one: Candidate) -> str:
    return "no limit" if one.budget is None else format_size(one.budget)


def in_child(folder: Path, what: str, args: argparse.Namespace) -> Any:
    """One measurement of `design_pressure` in a new process; "memory" in a new cgroup."""
    command = [sys.executable, "-m", "benchmarks.serving.design_pressure", str(folder), what, "--repeats", str(args.repeats)]
    if what == "memory":
        why = why_no_limit()
        if why is not None:
            return f"not tried: no memory cgroup can be made ({why})"
        with HardLimit(GROUP_BYTES) as group:
            done = group.run([*command, "--group", str(group.folder)])
    else:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"failed: {done.stderr.strip()[-2000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def needed(found: Any) -> Any:
    """The result of a measurement; exits with its error message if it failed."""
    if isinstance(found, str):
        raise SystemExit(found)
    return found


def made_up(folder: Path, kind: Any, scratch: Path) -> Any:
    """Apply pressure to a simulated system."""
    designs = Designs.read(folder)
    system = MadeUp(scratch / kind, designs.designs[designs.choose(DeviceState())].memory)
    return pressed(folder, kind, system, system.passes)


def tell_switches(rows: Sequence[dict[str, Any]]) -> None:
    """Print the milliseconds of each switch: a median would hide the longest one."""
    print("\nswitch   closing, ms  opening, ms              loading, ms")
    for row in rows:
        opening, loading = (
            "  ".join(f"{task} {1e3 * s:.0f}" for task, s in row[key].items()) for key in ("opening", "loading")
        )
        print(f"d{row['from']} to d{row['to']} {1e3 * row['closing']:11.1f}  {opening:24} {loading}")
    if rows:
        closing = 1e3 * max(row["closing"] for row in rows)
        opening = 1e3 * max(sum(row["opening"].values()) for row in rows)
        met = "met" if closing <= MOST_CLOSING_MS else "missed"
        print(f"closing: {closing:.1f} ms at most (bar {MOST_CLOSING_MS}: {met})")
        print(f"opening all sessions of a switch: {opening:.0f} ms at most")


def tell_pressure(kind: str, story: Any) -> None:
    """Print after how many runs pressure was answered, and how soon it ended."""
    if isinstance(story, str):
        print(f"{kind}: {story}")
        return
    count, back = story["answered_after_runs"], story["reverted_after_seconds"]
    met = "met" if count is not None and count <= MOST_RUNS else "missed"
    answered = f"{'not answered' if count is None else f'answered in run {count}'} (bar {MOST_RUNS}: {met})"
    reverted = "not reverted" if back is None else f"reverted {back:.1f} s after it ended"
    used = sorted({f"d{run['design']}" for run in story["runs"] if run["phase"] == "during"})
    print(
        f"a process takes {'a core' if kind == 'core' else kind}: {answered}, {reverted}; designs meanwhile: {', '.join(used)}"
    )


def main() -> None:
    """Profile, solve, compare, write, switch, apply pressure, print."""
    parser = Arguments(__doc__)
    parser.add_zoo()
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), help="TASK=MODEL[:ACCURACY],...")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "fp16"])
    parser.add_argument("--device", action="append", help="may be given more than once; all that are here by default")
    parser.add_argument("--budgets", nargs="+", default=["100MB", "300MB"])
    parser.add_argument("--describe", nargs="*", default=["adreno750", "generic-cpu"], help="devices that are simulated")
    parser.add_argument("--described-budgets", nargs="+", default=["300MB"])
    parser.add_argument("--within", default="5s", help="the p90 of each task's latency")
    parser.add_argument("--weight", type=float, default=4.0, help="of accuracy beside the other objectives")
    parser.add_argument("--runs", type=int, default=6, help="later answers of each candidate")
    parser.add_argument("--repeats", type=int, default=3, help="of each switch")
    parser.add_argument("--made-up", action="store_true")
    parser.add_argument("--designs", type=Path, help="keep the designs in this folder")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="pressure over time; ratios are drawn beside it, as NAME-ratios.png")
    args = parser.parse_args()
    for device in args.device or ():
        parser.check_device(device)
    args.parser = parser
    os.environ.setdefault(LIMIT_VARIABLE, "20GB")  # more candidates than the default cache keeps on a small disk
    here = [each.device for each in processors_here()]
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folder = args.designs or scratch / "app.designs"
        if args.describe:
            answer, result["described"] = _solve(args, args.describe, args.described_budgets, scratch, simulated=True)
        answer, result["here"] = _solve(args, args.device or here, args.budgets, scratch, simulated=False)
        write(answer, folder, here=True)
        best = answer.decisions[answer.solution.designs[0]]
        result["predicted"] = {one.task: value(best, Measure("latency", "average", one.task)) for one in best}
        result["together"] = needed(in_child(folder, "together", args))
        print("\nlatency of d0's tasks beside each other, predicted and measured, s:", result["predicted"], result["together"])
        result["switches"] = needed(in_child(folder, "switches", args))
        tell_switches(result["switches"])
        result["pressure"] = {
            kind: made_up(folder, kind, scratch) if args.made_up else in_child(folder, kind, args)
            for kind in ("core", "memory")
        }
        result["memory"] = [design.memory for design in Designs.read(folder).designs]
    for kind, story in result["pressure"].items():
        tell_pressure(kind, story)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1))
    if args.plot is not None:
        stories = {kind: story for kind, story in result["pressure"].items() if not isinstance(story, str)}
        if stories:
            draw_pressure(args.plot, stories, result["memory"])
        ratios = {where: result[where]["ratios"] for where in ("here", "described") if where in result}
        draw_ratios(args.plot.with_name(f"{args.plot.stem}-ratios.png"), ratios)


def _solve(
    args: argparse.Namespace, devices: Sequence[str], budgets: Sequence[str], scratch: Path, *, simulated: bool
) -> tuple[Solved, dict[str, Any]]:
    file = scratch / ("described.toml" if simulated else "app.toml")
    application(args, devices, budgets, file)
    asked = read_application(file)
    found = list(candidates(asked, Profiling(args.runs, simulated), lambda text: print(text, file=sys.stderr, flush=True)))
    answer = solved(asked, found)
    result = compared(answer, found)
    print(f"\n{', '.join(devices)}{' (simulated)' if simulated else ''}: the exhaustive search over", end=" ")
    print(f"{result['decisions']} decisions ({result['allowed']} keep all constraints) agrees.\n\n{tables(answer)}\n")
    ways = list(result["ratios"][0]["ratio"])
    print("| processors | " + " | ".join(f"ours / {way}" for way in ways) + " |\n|" + "---|" * (len(ways) + 1))
    for row in result["ratios"]:
        print(f"| {row['processors']} | " + " | ".join(written(row["ratio"][way]) for way in ways) + " |")
    return answer, {**result, "tables": tables(answer)}


if __name__ == "__main__":
    run_command(main)
