"""A thousand tokens: the time of each, and the memory that the budget counts after each.

    python -m benchmarks.serving.long_text model.gguf --device pocl [--budget 80MB] [--tokens 1000] [--kv int8]

The likeliest token follows each time, also where the model would end. It prints the median milliseconds around token 100 and
around the last one, their ratio, and the memory that the budget counts: after each token, without weights where these are
streamed, and at most. Exit code 1: the memory after a token differs from that after another, or a run exceeds the budget.
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
from flashmem.request.opening import SessionRequest
from flashmem.runtime.generation.language_session import LanguageSession, RowPart

_AROUND = 20
"""Tokens of which a median is taken."""


def main() -> None:
    """Compile, then read one token after the other."""
    parser = Arguments(__doc__)
    parser.add_language_model()
    parser.add_argument("--budget", help="of the session, for instance 80MB")
    parser.add_argument("--kv", choices=("fp32", "fp16", "int8"), help="stored type of the cache; fp16 without it")
    parser.add_argument("--tokens", type=int, default=1000)
    args = parser.parse_args()
    parser.check_device(args.device)
    if not args.model.exists():
        parser.error(f"{args.model}: no such file; name a language model in a .gguf file, or a folder")
    if args.tokens < 100 + 2 * _AROUND:
        parser.error(f"--tokens {args.tokens} is too few; give {100 + 2 * _AROUND} or more")
    given: Any = {"device": args.device, "budget": args.budget, "max_length": args.tokens + 1, "state_precision": args.kv}
    with tempfile.TemporaryDirectory() as folder:
        bundle = flashmem.compile(args.model, Path(folder) / "m.flashmem", **given)
        with LanguageSession(bundle, SessionRequest(device=args.device)) as model:
            seconds, held, peaks = list[float](), set[int](), set[int]()
            token = 1
            for number in range(args.tokens):
                since = perf_counter()
                [after] = model.run({0: RowPart(number, [token])})[0]
                seconds.append(perf_counter() - since)
                token = int(after.tokens[0])
                report, bound = model.session.last_run, model.session._engine.bound
                assert report is not None and bound is not None
                if number:  # the first run reads constants and begins the history
                    peaks.add(report.memory.peak_bytes)
                loading = bound.ledger.by_category.get("weights", 0) if args.budget else 0  # the next run has begun to load
                held.add(bound.ledger.total - loading)
            limit = report.memory.budget_bytes
    early, late = (1e3 * median(seconds[at - _AROUND : at + _AROUND]) for at in (100, args.tokens - _AROUND))
    print(f"token 100: {early:.1f} ms, token {args.tokens}: {late:.1f} ms, {late / early:.2f} times")
    what = "beside weights" if args.budget else "in all"
    print(f"{len(held)} number(s) of bytes {what} after a token: {held}; peaks of {min(peaks)} to {max(peaks)} bytes")
    sys.exit(1 if len(held) > 1 or (limit is not None and max(peaks) > limit) else 0)


if __name__ == "__main__":
    run_command(main)
