"""Worker processes that measure alternately, and statistics over their results."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flashmem
from benchmarks.disk import warm
from flashmem.bundle.bundle import Bundle

Row = dict[str, Any]


def run_bundle(bundle: Path, device: str, *extra: str, cold: bool = False) -> Row:
    """Run a bundle once in a new process, with its weights in the page cache as far as memory permits, or not if `cold`.

    Other runs, and large preloaded models, may have evicted them.
    """
    weights = Bundle.open(bundle).weights_path
    dropped = ("--cold", str(weights)) if cold else ()
    if not cold:
        warm(weights)
    return run_worker("flashmem", "--bundle", str(bundle), "--device", device, *extra, *dropped)


def run_worker(*arguments: str) -> Row:
    """Run one process of `benchmarks.worker`; exits if it fails."""
    command = [sys.executable, "-m", "benchmarks.worker", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def take_turns(variants: Mapping[str, Callable[[], Row]], runs: int) -> dict[str, list[Row]]:
    """`runs` rows of each variant. The variants alternate, so that a busy minute of the machine affects all of them.

    Every round has another order, from a seed: what a run leaves in the caches of disk and host favours no variant.
    """
    rows: dict[str, list[Row]] = {name: [] for name in variants}
    order = random.Random(0)
    for _ in range(runs):
        for name in order.sample(list(variants), len(variants)):
            rows[name].append(variants[name]())
    return rows


def median(rows: list[Row], key: str) -> float:
    """The median of `key` over the rows."""
    return float(statistics.median(row[key] for row in rows))


def weights_of(bundle: flashmem.Bundle) -> int:
    """Bytes that a plan streams or preloads."""
    return sum(part.nbytes for part in bundle.program.slices)


def same_bits(paths: list[Path]) -> bool:
    """Whether the outputs in the workers' files are equal bit by bit."""
    import numpy as np

    first, *others = [np.load(path) for path in paths]
    return all(np.array_equal(first[name], other[name], equal_nan=True) for other in others for name in first.files)
