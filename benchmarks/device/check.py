"""Everything that shows whether a device is right, in one command of a quarter of an hour.

    python -m benchmarks.device.check --device D [--minutes 15] [--graphs 4000] [--parts layouts ...] [--jobs N] [--seed S]

The parts, each with its share of the time:

- `node-tests`: ONNX's node tests on every memory path, many in one model;
- `models`: the tiny exports of real networks in tests/data, beside ONNX Runtime;
- `layouts`: random graphs of products, attention, convolutions, pools and norms whose operands arrive and leave by random
  transposes, reshapes, slices, splits and joins, with sizes that are no multiples of anything, in every precision (tf32 too),
  memory path and transfer mode. The reference is float64, and the tolerance follows from the arithmetic;
- `operators`: random graphs of all operators;
- `stress`: loads with random delays, whose answers must have the bits of the resident ones.

Cases run in `--jobs` processes. It prints a table, the device and its driver. Graphs that are not right are kept in
`--findings`. Exit code 1: an answer was wrong, or a case failed. Another `--seed` draws other graphs.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.command import Arguments, run_command
from benchmarks.device.parts import PARTS, Setting
from flashmem.base.errors import UserError
from flashmem.base.paths import VARIABLE
from flashmem.runtime.kernels.children import processors
from flashmem.runtime.opencl import pocl
from flashmem.runtime.request.options import device_here

KINDS = ("right", "refused", "wrong", "failed")
_MOST_LINES = 20


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts, print the table."""
    parser = Arguments(__doc__)
    parser.add_device()
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--graphs", type=int, default=4000, help="graphs of layouts, if the time is enough")
    parser.add_argument("--together", type=int, default=16, help="graphs of layouts in one model")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--jobs", type=int, default=processors(), help="processes; by default one for each processor")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--findings", type=Path, default=Path("device-findings"), help="a folder for graphs that are not right")
    args = parser.parse_args(arguments)
    parser.check_device(args.device)
    if args.minutes <= 0 or min(args.graphs, args.together, args.jobs) < 1:
        raise UserError("--minutes, --graphs, --together and --jobs must be positive")
    device = device_here(args.device)
    here = Setting(args.device, device, args.seed, args.jobs, args.graphs, args.together, args.findings)
    named = f"{device.name} ({device.platform}, driver {device.driver_version})"
    print(f"{named}, {args.jobs} processes", flush=True)
    with own_caches():
        table = check(here, args.parts, args.minutes)
    print(f"\n{'part':12}" + "".join(f"{kind:>9}" for kind in KINDS) + f"{'seconds':>9}")
    for name, (counts, seconds) in table.items():
        print(f"{name:12}" + "".join(f"{counts[kind]:9}" for kind in KINDS) + f"{seconds:9.0f}")
    whole = sum((counts for counts, _ in table.values()), Counter[str]())
    nothing = [name for name, (counts, _) in table.items() if not counts["right"]]
    for name in nothing:
        print(f"{name}: nothing was right")
    print(f"{named}: {whole['wrong']} wrong, {whole['failed']} failed")
    sys.exit(1 if whole["wrong"] or whole["failed"] or nothing else 0)


@contextmanager
def own_caches() -> Iterator[None]:
    """In the body, processes keep compiled kernels in a temporary folder: the user's cache has no use for thousands of them."""
    before = {name: os.environ.get(name) for name in (VARIABLE, pocl.VARIABLE)}
    with tempfile.TemporaryDirectory(prefix="flashmem-check-", ignore_cleanup_errors=True) as folder:
        os.environ |= {name: str(Path(folder, name.lower())) for name in before}
        Path(os.environ[pocl.VARIABLE]).mkdir()
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def check(setting: Setting, parts: Sequence[str], minutes: float) -> dict[str, tuple[Counter[str], float]]:
    """The counts of each part and its seconds. Prints what is not right as soon as it is known."""
    table: dict[str, tuple[Counter[str], float]] = {}
    end = time.monotonic() + 60 * minutes
    left = [name for name in PARTS if name in parts]
    while left:
        begun, name = time.monotonic(), left[0]
        share = PARTS[name].share / sum(PARTS[each].share for each in left)
        counts, printed = Counter[str](), Counter[str]()
        for outcome in PARTS[name].outcomes(setting, begun + max(0.0, end - begun) * share):
            counts.update(outcome.counts)
            for line in outcome.lines:
                kind = line.partition(":")[0]
                printed[kind] += 1
                if printed[kind] <= _MOST_LINES:
                    print(f"{name}: {line}", flush=True)
        for kind, count in printed.items():
            if count > _MOST_LINES:
                print(f"{name}: {kind}: {count - _MOST_LINES} more", flush=True)
        table[name] = counts, time.monotonic() - begun
        print(f"{name}: {dict(counts)} in {table[name][1]:.0f} s", file=sys.stderr, flush=True)
        left.pop(0)
    return table


if __name__ == "__main__":
    run_command(main)
