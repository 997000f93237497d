"""Output of the command line: tables, facts and JSON on stdout, progress on stderr."""

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
    """Print exactly one JSON object to stdout."""
    print(json.dumps(data, indent=2, allow_nan=False))


class _Plain:
    """A substitute for rich's console if rich is not installed, as on a phone."""

    def print(self, *text: object, **ignored: Any) -> None:
        """Print a line."""
        print(*text)


def out() -> Any:
    """The console for reports: rich's if it is installed. Without a terminal, lines have unlimited width."""
    if not _has_rich():
        return _Plain()
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def _has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


def print_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; cells may contain any characters."""
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
    """Print one line for each entry: its label and its text."""
    width = max(map(len, facts))
    for label, text in facts.items():
        out().print(f"{label:<{width}}  {text}", markup=False, soft_wrap=True)


@contextmanager
def show_spinner(what: str, *, quiet: bool) -> Iterator[None]:
    """Show a spinner on stderr while the body runs, if stderr is a terminal and not `quiet`."""
    if quiet or not sys.stderr.isatty() or not _has_rich():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


@contextmanager
def progress(title: str) -> Iterator[ProgressCallback]:
    """Yield a callback for (stage, fraction) that draws a progress bar on stderr for each active stage.

    Without a terminal it prints one line for each stage.
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
