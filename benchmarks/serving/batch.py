"""Tokens a second of a language model for one request, and for several at a time, within the same budget.

    python -m benchmarks.serving.batch model.gguf --device pocl --budget 60MB [--rows 8] [--max-length 64] [--tokens 32]

The caches of all rows count in the budget. Both sessions stay open and take turns, for several rounds; it prints the medians,
the ratio, and what a run loads. The texts of a request must be the same in every row and round. Exit code 1: one differs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import flashmem
from benchmarks.command import Arguments, run_command
from flashmem.runtime.generation.batch import BatchGenerator
from flashmem.runtime.generation.generated_text import GenerationReport

PROMPT = "Once upon a time there was a dog who lived on a boat. Each morning"


def main() -> None:
    """Compile for one request and for several, then generate with both in turn."""
    parser = Arguments(__doc__)
    parser.add_language_model()
    parser.add_argument("--budget", help="of each session, for instance 60MB")
    parser.add_argument("--rows", type=int, default=8, help="requests at a time")
    parser.add_argument("--max-length", type=int, default=64, help="tokens of each cache")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    parser.check_device(args.device)
    if not args.model.is_file():
        parser.error(f"{args.model}: no such file; name a language model in a .gguf file")
    given: Any = {"device": args.device, "budget": args.budget, "max_length": args.max_length}
    with tempfile.TemporaryDirectory() as folder:
        one = flashmem.compile(args.model, Path(folder) / "one.flashmem", **given)
        many = flashmem.compile(args.model, Path(folder) / "many.flashmem", batch=args.rows, **given)
        with flashmem.Generator(one, device=args.device) as single, BatchGenerator(many, device=args.device) as batch:
            texts, single_rates, batch_rates = set[str](), list[float](), list[float]()
            for _ in range(args.rounds):
                _ = "".join(single.generate(PROMPT, max_new_tokens=args.tokens, speculate=False))
                if single.last is None or single.last.tokens < 2:
                    sys.exit(f"the model ends after {PROMPT!r}; use another one")
                single_rates.append(1 / single.last.token_seconds)
                since = perf_counter()
                begun = [batch.generate(PROMPT, max_new_tokens=args.tokens) for _ in range(args.rows)]
                texts |= {"".join(each) for each in begun}
                reports = [each.report for each in begun]
                batch_rates.append(_rate(reports, perf_counter() - since))
    before, after, report = median(single_rates), median(batch_rates), reports[0]
    assert report is not None
    print(f"one request: {before:.1f} tokens a second, {single.last.token_bytes / 1e6:.1f} MB loaded for each", end="")
    print(f", {single.last.peak_bytes / 1e6:.1f} MB at most")
    print(f"{args.rows} requests: {after:.1f} tokens a second, {report.token_bytes / 1e6:.1f} MB loaded for a run", end="")
    print(f", {report.peak_bytes / 1e6:.1f} MB at most; {after / before:.2f} times as many; {len(texts)} text(s)")
    sys.exit(0 if len(texts) == 1 else 1)


def _rate(reports: list[GenerationReport | None], seconds: float) -> float:
    """Tokens a second of all requests, after the first token of each."""
    known = [report for report in reports if report is not None]
    begun = min(report.first_seconds for report in known)
    return sum(report.tokens - 1 for report in known) / (seconds - begun)


if __name__ == "__main__":
    run_command(main)
