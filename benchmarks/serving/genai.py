"""A language model in a folder beside onnxruntime-genai: time to the first token, and for each later one.

    pip install onnxruntime-genai
    python -m benchmarks.serving.genai folder --device pocl [--budget 60MB] [--limit] [--tokens 64] [--runs 5]

Sides take turns in new processes. Both read the same tokens and generate as many, the likeliest ones. It prints medians, and
the peak of the process's memory. flashmem makes no drafts. With `--limit` each process is in a memory cgroup (needs root) of
the sum of a bare process of flashmem with the device's context, the budget, and 48 MiB; one that needs more is killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import flashmem
from benchmarks.command import Arguments, run_command
from benchmarks.memory_cgroup import HardLimit
from benchmarks.processes import Row, median, run_worker, take_turns
from benchmarks.worker import drop
from flashmem.base.units import format_size, parse_size
from flashmem.runtime.engine.report import process_peak_rss

PROMPT = "Tell me a short story about a dog and a boat. The dog is called Tim, and the boat is green. They meet a whale."
LENGTH = 512
_ABOVE = 48 << 20


def main() -> None:
    """Measure both in turn."""
    parser = Arguments(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("model"))
    parser.add_device()
    parser.add_argument("--budget", help="of flashmem, for instance 60MB")
    parser.add_argument("--limit", action="store_true", help="limit the memory of each process to what the budget needs")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--side", choices=["flashmem", "genai"], help="measure one of them once, in this process")
    args = parser.parse_args()
    parser.check_device(args.device)
    if not (args.folder / "genai_config.json").is_file():
        parser.error(f"{args.folder}: no genai_config.json there; name a folder of onnxruntime-genai")
    if args.side:
        measure = _flashmem if args.side == "flashmem" else _genai
        print(json.dumps(measure(args.folder, args.device, args.budget, args.tokens)))
        return
    bundle = flashmem.compile(args.folder, device=args.device, budget=args.budget, max_length=LENGTH)
    limit = None
    if args.limit:
        if args.budget is None:
            parser.error("--limit follows from the budget; name one with --budget")
        bare = run_worker("bare", "--device", args.device)["bare"]
        limit = bare + parse_size(args.budget, what="budget") + _ABOVE
        print(f"limit {format_size(limit)}, of which {format_size(bare)} are a bare process", flush=True)
    files = [each for folder in (args.folder, bundle.path) for each in folder.rglob("*") if each.is_file()]
    rows = take_turns({side: partial(_worker, side, args, limit, files) for side in ("flashmem", "genai")}, args.runs)
    for side, every in rows.items():
        found = [row for row in every if "ended" not in row]
        if len(found) < len(every):
            print(f"{side}: {', '.join(row['ended'] for row in every if 'ended' in row)}")
        if not found:
            continue
        first, later, peak = median(found, "first"), median(found, "later"), median(found, "peak")
        print(f"{side}: first token after {first:.2f} s, {1e3 * later:.1f} ms each, process at most {peak / 1e6:.0f} MB")
    if not args.limit:
        print(f"flashmem over genai, each token: {median(rows['flashmem'], 'later') / median(rows['genai'], 'later'):.2f}")


def _worker(side: str, args: Any, limit: int | None, files: list[Path]) -> Row:
    command = [sys.executable, "-m", "benchmarks.serving.genai", str(args.folder), "--side", side]
    command += ["--device", args.device, "--tokens", str(args.tokens), *(["--budget", args.budget] if args.budget else [])]
    if limit is None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    else:
        drop(files)
        with HardLimit(limit) as group:
            done = group.run(command)
        if done.returncode in (-9, 137) or "bad_alloc" in done.stderr or "bad allocation" in done.stderr:
            return {"ended": "killed"}
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def _flashmem(folder: Path, device: str, budget: str | None, count: int) -> Row:
    with flashmem.Generator(folder, device=device, budget=budget, max_length=LENGTH) as generator:
        tokens = generator.tokens_of(PROMPT)
        list(generator.generate(tokens, max_new_tokens=count, speculate=False))
        report = generator.last
        assert report is not None
        return {"first": report.first_seconds, "later": report.token_seconds, "peak": process_peak_rss()}


def _genai(folder: Path, device: str, budget: str | None, count: int) -> Row:
    import onnxruntime_genai  # type: ignore[import-not-found]

    model = onnxruntime_genai.Model(str(folder))
    tokens = onnxruntime_genai.Tokenizer(model).encode(PROMPT)
    given = onnxruntime_genai.GeneratorParams(model)
    given.set_search_options(max_length=len(tokens) + count, min_length=len(tokens) + count, do_sample=False)
    generator, begun = onnxruntime_genai.Generator(model, given), perf_counter()
    generator.append_tokens(tokens)
    generator.generate_next_token()
    first, made = perf_counter(), 1
    while made < count and not generator.is_done():
        generator.generate_next_token()
        made += 1
    return {"first": first - begun, "later": (perf_counter() - first) / (made - 1), "peak": process_peak_rss()}


if __name__ == "__main__":
    run_command(main)
