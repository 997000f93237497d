"""Call sites: the lines of the program that led to a call, and the host thread."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

_HERE = str(Path(__file__).parent)
_MOST = 4
"""Number of named callers: the first is often a helper, and the next ones show the purpose of the call."""


@dataclass(frozen=True, slots=True)
class Site:
    """A call: lines of the program, the innermost first, and the name of the thread."""

    lines: tuple[tuple[str, int, str], ...]
    thread: str

    def __str__(self) -> str:
        named = [f"{_short(file)}:{line} in {function}" for file, line, function in self.lines]
        return f"{', from '.join(named)}; thread {self.thread}"


def call_site() -> Site:
    """The current call, from outside this package."""
    frame, lines = sys._getframe(1), []
    while frame is not None and len(lines) < _MOST:
        file = frame.f_code.co_filename
        if not file.startswith(_HERE):
            if lines and not file.startswith(str(ROOT)):  # the interpreter's own frames: thread starts, and pytest
                break
            lines.append((file, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return Site(tuple(lines), threading.current_thread().name)


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else file
