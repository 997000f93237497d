"""Changes of shape variant: time and loads of the first run after one, beside runs of single tokens.

    python -m benchmarks.streaming.changes model.gguf --device nvidia --budget 320MB [--host-budget auto] [--shape]

`--shape`: a model as large as TinyLlama-1.1B in Q4_1 with random weights, with the vocabulary of `model.gguf`. Runs of 8 tokens
(which check drafts) and of one alternate, `--changes` times; between two of them are `--between` runs of one token.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.command import Arguments, run_command
from benchmarks.serving.llama_cpp import write_shape
from flashmem.runtime.generation.generator import Generator
from flashmem.runtime.generation.language_session import RowPart

CHECKED = 8


def main() -> None:
    """Compile, run, and print a table."""
    parser = Arguments(__doc__)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_device()
    parser.add_argument("--budget", default="320MB")
    parser.add_argument("--host-budget", help="a size, or auto")
    parser.add_argument("--shape", action="store_true", help="a model as large as TinyLlama-1.1B")
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--changes", type=int, default=10)
    parser.add_argument("--between", type=int, default=4)
    args = parser.parse_args()
    parser.check_device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "shape.gguf" if args.shape else args.model
        if args.shape:
            write_shape(model, args.model)
        begun = time.perf_counter()
        budgets = {"budget": args.budget, "host_budget": args.host_budget}
        with Generator(model, device=args.device, max_length=args.max_length, **budgets) as generator:
            print(f"opened, with compilation, in {time.perf_counter() - begun:.1f} s", flush=True)
            measure(generator, args.changes, args.between)


def measure(generator: Generator, changes: int, between: int) -> None:
    """Print the medians of each kind of run."""
    language, at = generator._model, 0
    kinds = ("one token, after another", "8 tokens, after one", "one token, after 8")
    found: dict[str, list[tuple[float, int]]] = {kind: [] for kind in kinds}

    def run(kind: str | None, count: int) -> None:
        nonlocal at
        begun = time.perf_counter()
        language.run({0: RowPart(at, [5 + (at + n) % 200 for n in range(count)])})
        seconds, at = time.perf_counter() - begun, at + count
        report = language.session.last_run
        assert report is not None
        if kind is not None:
            found[kind].append((seconds, sum(load.nbytes for load in report.loads)))

    for count in (1, CHECKED, 1, 1, CHECKED, 1, 1, 1):
        run(None, count)
        language.session.prepared()
    for _ in range(changes):
        run(kinds[1], CHECKED)
        run(kinds[2], 1)
        for _ in range(between):
            run(kinds[0], 1)
    print("| run | ms, medians (least, most) | MB loaded |")
    print("|---|---|---|")
    for kind, rows in found.items():
        seconds = [1e3 * row[0] for row in rows]
        loaded = statistics.median(row[1] for row in rows) / 1e6
        print(f"| {kind} | {statistics.median(seconds):.2f} ({min(seconds):.2f}, {max(seconds):.2f}) | {loaded:.1f} |")


if __name__ == "__main__":
    run_command(main)
