"""What the command line prints: tables, facts and JSON on stdout, progress on stderr."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from flashmem.base.streams import say

ProgressCallback = Callable[[str, float], None]


def emit_json(data: dict[str, Any]) -> None:
    """Exactly one JSON object on stdout."""
    print(json.dumps(data, indent=2, allow_nan=False))


class _Plain:
    """What is used of rich's console, where rich is not installed (a phone needs neither it nor typer): whole lines."""

    def print(self, *text: object, **ignored: Any) -> None:
        """A line."""
        print(*text)


def out() -> Any:
    """Where a report goes: rich's console, where it is installed. Without a terminal lines are as wide as they need to be."""
    if not _has_rich():
        return _Plain()
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def _has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


def print_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Columns under `headers`, whatever characters the cells have."""
    if not _has_rich():
        lines = [[str(cell) for cell in row] for row in (headers, *rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            print("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(*headers, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    out().print(table)


def print_facts(facts: Mapping[str, str]) -> None:
    """One line for each: a label and what it says."""
    width = max(map(len, facts))
    for label, text in facts.items():
        out().print(f"{label:<{width}}  {text}", markup=False, soft_wrap=True)


@contextmanager
def waiting(what: str, *, quiet: bool) -> Iterator[None]:
    """Shows on a terminal's stderr that something is going on, unless `quiet`."""
    if quiet or not sys.stderr.isatty() or not _has_rich():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


@contextmanager
def progress(title: str) -> Iterator[ProgressCallback]:
    """Calls it with (stage, fraction) to draw a bar on stderr for each stage that goes on, side by side with others once it has
    got anywhere; without a terminal each stage is one line.
    """
    if not sys.stderr.isatty() or not _has_rich():
        seen: set[str] = set()

        def note(stage: str, fraction: float) -> None:
            if stage not in seen:
                seen.add(stage)
                say(f"{title}: {stage}")

        yield note
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        fractions: dict[str, float] = {}
        tasks: dict[str, TaskID] = {}

        def draw(stage: str, fraction: float) -> None:
            fractions[stage] = fraction
            if stage not in tasks:
                tasks[stage] = bar.add_task(f"{title}: {stage}", total=1.0)
            for known, task in tasks.items():
                bar.update(task, completed=fractions[known], visible=known == stage or 0 < fractions[known] < 1)

        yield draw
