"""Change the budget at random while a model runs: check bits and limits, and measure the time to plan again.

    python -m benchmarks.memory.moving_budget BUNDLE [--device pocl] [--moves 20] [--least 80MB] [--most 600MB] [--seed 0]

Prints:

- the number of compared answers;
- the peak bytes above the current limit after each change was in force;
- the seconds until a change was in force;
- the seconds of each new plan (processor time and elapsed);
- the first run after each change over the steady time in that budget, measured afterwards in separate runtimes.

    python -m benchmarks.memory.moving_budget BUNDLE --runs 900 --least 9.5MB --most 12MB

makes this number of runs while a thread changes the budget continuously, also below the model's minimum. A run gives the same
bits, or is refused with a BudgetError. The command exits with 1 if a run fails, or uses more than it was granted.
`mobilenetv3-large` from `flashmem.tools.zoo.graph_file.write_random` is a suitable model with many small launches.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import Arguments, run_command
from flashmem import Bundle, Runtime
from flashmem.base.errors import BudgetError, RunError
from flashmem.base.units import format_size, parse_size
from flashmem.runtime.engine.inputs import complete_inputs
from flashmem.runtime.memory.accounts import Account
from flashmem.runtime.serving.loaded_model import LoadedModel

_STEADY = 3
"""Runs of a runtime with a constant budget; the last two count."""


def planned(seconds: list[tuple[float, float]]) -> None:
    """Record the elapsed and processor seconds of every new plan in `seconds`."""
    make = LoadedModel._plan

    def timed(loaded: LoadedModel, limit: int | None, *, keep: bool) -> Any:
        begun, spent = time.perf_counter(), time.thread_time()
        try:
            return make(loaded, limit, keep=keep)
        finally:
            seconds.append((time.perf_counter() - begun, time.thread_time() - spent))

    LoadedModel._plan = timed  # type: ignore[method-assign]


def over(over_time: list[tuple[float, int]], settled: list[tuple[float, int]]) -> int:
    """Peak bytes above the current limit, from the time when each change was in force to the next change."""
    worst = 0
    for (at, limit), (until, _) in zip(settled, [*settled[1:], (float("inf"), 0)], strict=True):
        worst = max([worst, *(held - limit for when, held in over_time if at <= when < until)])
    return worst


def steady(bundle: Bundle, budget: int, args: argparse.Namespace, inputs: dict[str, Any]) -> float:
    """Seconds of a later run in a constant budget."""
    with Runtime(budget, device=args.device, prepare=False) as runtime:
        model, seconds = runtime.open(bundle, mode=args.mode), []
        for _ in range(_STEADY):
            begun = time.perf_counter()
            model.run(None, inputs)
            seconds.append(time.perf_counter() - begun)
    return statistics.mean(seconds[1:])


def counting(seen: Counter[str]) -> None:
    """Count in `seen` what every account uses beyond its grant."""
    refuse = Account._refuse_beyond

    def counted(account: Account, nbytes: int, what: str) -> None:
        if account._promised:
            seen["taken"] += 1
            seen["beyond"] += account.total + account._borrowed + nbytes > account._promised
        refuse(account, nbytes, what)

    Account._refuse_beyond = counted  # type: ignore[assignment, method-assign]


def run_while_moving(bundle: Bundle, inputs: dict[str, Any], args: argparse.Namespace) -> Counter[str]:
    """The outcomes of `args.runs` runs while the budget changes continuously."""
    least, most = parse_size(args.least), parse_size(args.most)
    rng, seen, over = random.Random(args.seed), Counter[str](), threading.Event()
    counting(seen)
    with Runtime(most, device=args.device, prepare=False) as runtime:
        model = runtime.open(bundle, mode=args.mode)
        wanted = model.run(None, inputs)

        def move() -> None:
            while not over.wait(rng.random() * 0.01):
                runtime.set_budget(rng.randrange(least, most))
                seen["moves"] += 1

        mover = threading.Thread(target=move)
        mover.start()
        try:
            for _ in range(args.runs):
                try:
                    outputs = model.run(None, inputs)
                    same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(wanted, outputs, strict=True))
                    seen["right" if same else "wrong"] += 1
                except BudgetError:
                    seen["refused"] += 1
                except RunError as error:
                    print(error, flush=True)
                    seen["failed"] += 1
                while model.failure is not None:
                    with suppress(BudgetError):  # the budget is too small for the model at present
                        model = runtime.open(bundle, mode=args.mode)
        finally:
            over.set()
            mover.join()
    return seen


def main() -> None:
    """Change the budget, compare answers, print the result."""
    parser = Arguments(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_device("pocl")
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--moves", type=int, default=20)
    parser.add_argument("--runs", type=int, default=0, help="runs while the budget moves all the time")
    parser.add_argument("--least", default="80MB")
    parser.add_argument("--most", default="600MB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-steady", dest="steady", action="store_false", help="leave the steady times out")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    parser.check_device(args.device)
    least, most = parse_size(args.least), parse_size(args.most)
    rng, plans = random.Random(args.seed), list[tuple[float, float]]()
    planned(plans)
    bundle = Bundle.open(args.bundle)
    inputs = complete_inputs(bundle.program, {}, args.seed)
    if args.runs:
        seen = run_while_moving(bundle, inputs, args)
        print(", ".join(f"{seen[name]} {name}" for name in ("right", "wrong", "refused", "failed", "moves", "taken", "beyond")))
        raise SystemExit(1 if seen["wrong"] or seen["failed"] or seen["beyond"] else 0)
    moves, compared = [], 0
    with Runtime(most, device=args.device, prepare=False) as runtime:  # all answers have the same bits
        model = runtime.open(bundle, mode=args.mode)
        begun = time.perf_counter()
        wanted = model.run(None, inputs)
        run_seconds = time.perf_counter() - begun
        settled = [(time.perf_counter(), most)]
        for _ in range(args.moves):
            answers = [runtime.submit(model, inputs) for _ in range(2)]
            time.sleep(rng.random() * run_seconds)
            limit, at = rng.randrange(least, most), time.perf_counter()
            was_running = not answers[-1].done()
            runtime.set_budget(limit).result()
            settled.append((time.perf_counter(), limit))
            outputs = [answer.result() for answer in answers]
            first = time.perf_counter()
            outputs.append(model.run(None, inputs))
            run_seconds = time.perf_counter() - first
            moves.append({"limit": limit, "settled": settled[-1][0] - at, "was_running": was_running, "first": run_seconds})
            for other in outputs:
                compared += 1
                if not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(wanted, other, strict=True)):
                    raise SystemExit(f"the answer under {limit} bytes has other bits")
        worst = over(runtime.over_time(), settled)
    if worst > 0:
        raise SystemExit(f"{worst} bytes above the limit in force were held")
    for moved in moves if args.steady else ():
        moved["steady"] = steady(bundle, moved["limit"], args, inputs)
    row = {"compared": compared, "moves": moves, "plans": plans}
    print(f"{compared} answers with the same bits; never above the limit in force once a move had settled")
    print(f"in force after {max(m['settled'] for m in moves):.3f} s at most; {sum(m['was_running'] for m in moves)} in a run")
    print(f"a new plan: {max(e for e, _ in plans):.3f} s at most, {max(c for _, c in plans):.3f} s of one processor")
    if args.steady:
        slower = [moved["first"] / moved["steady"] for moved in moves]
        print(f"first run after a move over the steady time: {max(slower):.2f} at most, {statistics.median(slower):.2f} median")
    print(f"budgets from {format_size(least)} to {format_size(most)}")
    if args.json is not None:
        args.json.write_text(json.dumps(row))


if __name__ == "__main__":
    run_command(main)
