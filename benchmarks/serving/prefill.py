"""The first token after a long prompt that is read in runs of 32, 64 or 128 tokens.

    python -m benchmarks.serving.prefill model.gguf --device pocl --budget 60MB [--limit 260MB] [--tokens 512] [--runs 5]

One bundle for each length of runs, all within the budget. They take turns in fresh processes; with `--limit` in a memory
cgroup (needs root), which the weight file may not fit. It prints what `flashmem compile` chooses, and for each length the
median seconds to the first token (of a session's second or third prompt), bytes loaded for each run over all weights, and
milliseconds and bytes of a later token. Exit code 1: the first tokens differ.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import flashmem
from benchmarks.command import Arguments, run_command
from benchmarks.memory_cgroup import HardLimit
from benchmarks.processes import Row, median, take_turns, weights_of
from benchmarks.worker import drop
from flashmem.base.units import parse_size
from flashmem.bundle.language import LONG_RUNS, PROMPT_TOKENS
from flashmem.compiler.adaptive import prompt_runs
from flashmem.runtime.generation.language_session import RowPart

LENGTHS = (PROMPT_TOKENS, *LONG_RUNS)
_PROMPTS, _MORE = 3, 8


def main() -> None:
    """Compile for each length, then let processes take turns."""
    parser = Arguments(__doc__)
    parser.add_language_model()
    parser.add_argument("--budget", help="of each session, for instance 60MB")
    parser.add_argument("--limit", help="of the memory of each process")
    parser.add_argument("--tokens", type=int, default=512, help="of the prompt")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--side", type=Path, help="measure this bundle once, in this process")
    args = parser.parse_args()
    parser.check_device(args.device)
    if args.side:
        print(json.dumps(_measured(args.side, args.device, args.tokens)))
        return
    if not args.model.exists():
        parser.error(f"{args.model}: no such file; name a language model in a .gguf file, or a folder")
    with tempfile.TemporaryDirectory() as folder:
        own, bundles = prompt_runs.longer_run, dict[int, flashmem.Bundle]()
        given: Any = {"device": args.device, "budget": args.budget, "max_length": 2 * args.tokens}
        chosen: list[int | None] = []
        for length in LENGTHS:

            def forced(costs: Any, longest: int, cost: Any, length: int = length) -> int | None:
                if length == LENGTHS[0]:
                    chosen.append(own(costs, longest, cost))
                    return None
                cost(length)
                return length

            prompt_runs.longer_run = forced
            bundles[length] = flashmem.compile(args.model, Path(folder) / f"{length}.flashmem", **given)
        print(f"flashmem reads a prompt in runs of {chosen[0] or PROMPT_TOKENS} tokens", flush=True)
        sides = {str(length): partial(_worker, bundle, args) for length, bundle in bundles.items()}
        rows = take_turns(sides, args.runs)
        firsts = set[int]()
        for length, found in rows.items():
            weights = weights_of(bundles[int(length)])
            numbers = [f"{row['first']:.2f}" for row in found]
            firsts |= {row["token"] for row in found}
            print(
                f"{length}: first token after {median(found, 'first'):.2f} s ({', '.join(numbers)}), "
                f"{median(found, 'read') / weights:.2f} of the weights loaded for each run; then "
                f"{1e3 * median(found, 'later'):.1f} ms and {median(found, 'loaded') / 1e6:.1f} MB a token",
                flush=True,
            )
    sys.exit(1 if len(firsts) > 1 else 0)


def _worker(bundle: flashmem.Bundle, args: Any) -> Row:
    command = [sys.executable, "-m", "benchmarks.serving.prefill", "--side", str(bundle.path), "--device", args.device]
    command += ["--tokens", str(args.tokens)]
    if args.limit is None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    else:
        drop([bundle.weights_path])
        with HardLimit(parse_size(args.limit, what="limit")) as group:
            done = group.run(command)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed ({done.returncode}):\n{done.stderr}")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def _measured(path: Path, device: str, count: int) -> Row:
    with flashmem.Generator(path, device=device) as generator:
        words = " ".join(f"Word number {each} of the list is {each * 37 % 101}." for each in range(count))
        tokens = generator.tokens_of(words)[:count]
        session, read, runs = generator._model.session, list[int](), generator._model.run

        def spy(parts: Mapping[int, RowPart]) -> Any:
            found = runs(parts)
            if len(parts[0].tokens) >= PROMPT_TOKENS and session.last_run is not None:
                read.append(sum(load.nbytes for load in session.last_run.loads))
            return found

        generator._model.run = spy  # type: ignore[method-assign]
        seconds = list[float]()
        for number in range(_PROMPTS):
            list(generator.generate([tokens[number], *tokens[1:]], max_new_tokens=_MORE, speculate=False))
            report = generator.last
            assert report is not None
            seconds.append(report.first_seconds)
        return {
            "first": min(seconds[1:]),
            "read": sum(read) / len(read),
            "later": report.token_seconds,
            "loaded": report.token_bytes,
            "token": generator._cached[count],
        }


if __name__ == "__main__":
    run_command(main)
