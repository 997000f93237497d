"""The report of `flashmem profile --report`: prediction errors, and operators whose response differs from Table 5."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

from flashmem.cli.output.console import print_facts, print_table
from flashmem.planning.capacity.response import LearnedClass
from flashmem.profiler.dataset import read_dataset
from flashmem.profiler.report import (
    CAPACITY_BAR,
    CHUNK,
    MEAN_BAR,
    MEDIAN_BAR,
    HeldOut,
    agreement,
    default_path,
    errors,
    judged_by_shipped,
    learned_classes,
    repeats,
)


def print_repeats(dataset: Path, again: Path) -> None:
    """Print the agreement of two profiles of one device."""
    found = repeats(dataset, again)
    apart = f"{mean(found.differences):.1%} in the mean, {median(found.differences):.1%} in the median"
    within = ", ".join(
        f"{agreement(found.capacities, chunk):.1%} in {what}" for chunk, what in ((None, "bytes"), (CHUNK, "chunks"))
    )
    print_facts({f"{len(found.differences)} launches measured again differ by": apart, "their C_l within 25 %": within})


def print_report(dataset: Path, parts: Sequence[HeldOut]) -> None:
    """Print the report of `flashmem profile --report`; `parts` is the result of `held_out` for the dataset."""
    about, rows = read_dataset(dataset)
    launches = len({row.case for row in rows})
    print_facts({"measured": about["source"], "launches": str(launches), "rows": str(len(rows))})
    print("\ntrained anew without what is held out, and without launches that are the same:")
    verdicts = _print_parts(parts)
    trained_on, shipped = judged_by_shipped(dataset)
    if shipped:
        print(f"\nthe models next to the dataset, trained on {', '.join(trained_on)}, asked for what they were not trained on:")
        verdicts += [f"models next to the dataset: {verdict}" for verdict in _print_parts(shipped)]
    elif trained_on:
        print(f"\nthe models next to the dataset were trained on all of it: {', '.join(trained_on)}")
    else:
        print("\nbeside the dataset are no models that say what they were trained on")
    modes = sorted({row.mode for row in rows} - {"none"})
    for mode in modes:
        _print_classes(mode, learned_classes([row for row in rows if row.features.memory_path == default_path(rows)], mode))
    print("\n".join(verdicts) or "all bars met")


def _print_parts(parts: Sequence[HeldOut]) -> list[str]:
    """Print the tables of C_l and of latencies; returns the failed requirements."""
    verdicts = _print_capacities(parts)
    lines = []
    for part in parts:
        subsets = (
            ("alone", [p for p in part.predictions if p.row.mode == "none"]),
            ("loaded", [p for p in part.predictions if p.row.mode != "none"]),
        )
        for kind, chosen in subsets:
            if not chosen:
                continue
            raw = errors(chosen, "predicted", raw=True)
            ours = errors(chosen, "predicted")
            plain = errors(chosen, "roofline")
            numbers = (f"{f(e):.1%}" for e in (raw, ours, plain) for f in (mean, median))
            lines.append((part.what, part.alike, kind, len(chosen), *numbers))
            if mean(ours) > mean(plain) or median(ours) > median(plain):
                verdicts.append(f"{part.what}, {kind}: the roofline is better than XGBoost")
            if mean(ours) > MEAN_BAR or median(ours) > MEDIAN_BAR:
                missed = f"at pace {mean(ours):.1%} / {median(ours):.1%}, raw {mean(raw):.1%} / {median(raw):.1%}"
                verdicts.append(f"{part.what}, {kind}: misses MAPE {MEAN_BAR:.0%} or median {MEDIAN_BAR:.0%} ({missed})")
    headers = ("held out", "alike", "latency", "rows", "raw seconds: MAPE", "median", "at pace: MAPE", "median")
    print_table((*headers, "roofline, at pace: MAPE", "median"), lines)
    return verdicts


def _print_capacities(parts: Sequence[HeldOut]) -> list[str]:
    """Print the share of C_l within 25 % of the measured ones; returns the failed requirements."""
    lines = []
    verdicts = []
    for part in parts:
        pairs = [[(c.measured, getattr(c, which)) for c in part.capacities] for which in ("predicted", "roofline")]
        values = [agreement(found, chunk) for chunk in (None, CHUNK) for found in pairs]
        resolved = [(c.measured, c.predicted) for c in part.capacities if c.resolved]
        by_mode = [
            f"{mode} {agreement([(c.measured, c.predicted) for c in part.capacities if c.row.mode == mode], None):.0%}"
            for mode in sorted({c.row.mode for c in part.capacities})
        ]
        counted = f"{agreement(resolved, None):.1%} of {len(resolved)}"
        lines.append((part.what, len(part.capacities), *(f"{value:.1%}" for value in values), counted, ", ".join(by_mode)))
        if not values[0] >= CAPACITY_BAR:
            verdicts.append(
                f"{part.what}: misses C_l within 25 % in bytes for {CAPACITY_BAR:.0%} of launches ({values[0]:.1%})"
            )
    print_table(
        (
            "C_l within 25 %",
            "curves",
            "in bytes",
            "roofline",
            "in chunks of 1 MiB",
            "roofline",
            "resolved",
            "bytes, by mode",
        ),
        lines,
    )
    return verdicts


def _print_classes(mode: str, learned: Sequence[LearnedClass]) -> None:
    print(f"operator classes from the response to {mode}:")
    rows = [(e.operator, e.launches, f"{e.tolerance:.2f}", e.learned, e.paper, "" if e.agrees else "disagree") for e in learned]
    print_table(("operator", "launches", "ratio at +20 %", "learned", "Table 5", ""), rows)
