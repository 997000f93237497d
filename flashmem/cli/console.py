"""What a person sees: messages and progress on stderr, answers on stdout, and the exit code for each kind of error."""

from __future__ import annotations

import codecs
import errno
import importlib.util
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from flashmem.base import interrupts
from flashmem.base.errors import FlashmemWarning, RunError, UserError
from flashmem.base.extras import missing

EXIT_RUN_FAILED = 1
EXIT_USER_ERROR = 2

ProgressCallback = Callable[[str, float], None]


def say(message: str) -> None:
    """A line for the person who waits."""
    print(f"flashmem: {message}", file=sys.stderr)


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


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turns errors into one sentence on stderr and an exit code: 2 if the user has to change something, 1 if the run failed.

    Anything else is a defect of flashmem and keeps its traceback.
    """
    try:
        try:
            yield
        finally:
            _flush()  # here, where a full disk and a reader who left can still be reported
    except (UserError, FileNotFoundError) as error:
        _fail(str(error), EXIT_USER_ERROR)
    except ModuleNotFoundError as error:
        said = missing("this command", error.name or "")
        if said is None:
            raise
        _fail(str(said), EXIT_USER_ERROR)
    except RunError as error:
        _fail(str(error), EXIT_RUN_FAILED)
    except BrokenPipeError:
        sys.exit(EXIT_RUN_FAILED)  # the reader of stdout left (`flashmem plan … | head`): nothing more to say to it
    except OSError as error:
        _fail(_describe(error), EXIT_USER_ERROR)
    except MemoryError:
        _fail("the process ran out of memory", EXIT_RUN_FAILED)
    except KeyboardInterrupt:
        if interrupts.is_silent():
            sys.exit(interrupts.EXIT_CODE)
        _fail("interrupted", interrupts.EXIT_CODE)


def prepare_streams() -> None:
    """Makes stdout and stderr fit for everything that is printed: file names of any bytes, and no reader at all.

    A stream that was closed before Python started becomes one that nobody reads, or the next file opened would take its place.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115
    codecs.register_error(_ANY_TEXT, _encode_any)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ANY_TEXT)
    warnings.showwarning = _show_warning


_ANY_TEXT = "flashmem-any-text"


def _encode_any(error: UnicodeError) -> tuple[str | bytes, int]:
    """A file name's bytes as they are; what the terminal's encoding lacks as an escape."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)


_show_any_warning = warnings.showwarning


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    if issubclass(category, FlashmemWarning):
        say(str(message))
    else:
        _show_any_warning(message, category, *where, **more)


def _flush() -> None:
    """What cannot be written to stdout is forgotten, or Python would try again, and complain, as it shuts down."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        raise


def _describe(error: OSError) -> str:
    what = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        what = "no space left on the disk; free some or write elsewhere"
    return f"{error.filename}: {what}" if error.filename else what


def _fail(message: str, code: int) -> NoReturn:
    say(" ".join(message.split()))
    sys.exit(code)
