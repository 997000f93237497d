"""The command line of the oracle."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence

from . import __doc__ as about
from .first import FirstCase, first_case, first_findings
from .paper import PaperCase, paper_case, paper_findings
from .rules import Pick
from .slots import SlotCase, slot_case, slot_findings

Case = PaperCase | FirstCase | SlotCase


def drawn(number: int, pick: Pick) -> tuple[str, Case]:
    """The problem of a number, and what kind it is."""
    if number % 4 == 3:
        return "first", first_case(pick)
    return ("slots", slot_case(pick)) if number % 4 == 1 else ("paper", paper_case(pick))


def findings(case: Case) -> tuple[str, list[str]]:
    """The planner's result for a problem, in a word, and the findings."""
    if isinstance(case, PaperCase):
        return paper_findings(case)
    return first_findings(case) if isinstance(case, FirstCase) else slot_findings(case)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.planning.oracle", description=(about or "").splitlines()[0])
    parser.add_argument("--instances", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    said: Counter[str] = Counter()
    wrong, begun = 0, time.monotonic()
    for number in range(options.instances):
        kind, made = drawn(number, random.Random(f"{options.seed} {number}").choice)
        status, found = findings(made)
        said[f"{kind} {status}"] += 1
        wrong += bool(found)
        for finding in found:
            print(f"instance {number} of seed {options.seed}: {finding}\n    {made}", flush=True)
    print(", ".join(f"{what} {count}" for what, count in sorted(said.items())))
    print(f"{options.instances} instances in {time.monotonic() - begun:.0f} s, seed {options.seed}: {wrong} with a finding")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
