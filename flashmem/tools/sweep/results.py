"""The results file of a sweep: one CSV row for each finished point.

A row is appended by one write and synced, so that no finished point is lost when the process ends. If a crash of the machine
truncated the last line, it is removed when the file is opened again, and its point is repeated.
"""

from __future__ import annotations

import csv
import fcntl
import io
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from flashmem.base.errors import UserError
from flashmem.tools.sweep.grid import COLUMNS, KEY, Cell, Point, Row


class ResultFile:
    """An open results file. Only one sweep at a time can open it."""

    def __init__(self, path: Path) -> None:
        """Open or create `path`.

        Raises:
            UserError: the file cannot be written, is not the results file of a sweep, or is open in another sweep.
        """
        self.path = path
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}); name another output") from error
        try:
            self._begin()
        except BaseException:
            os.close(self._handle)
            raise

    def _begin(self) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another sweep is writing to {self.path}; name another output, or wait for it") from error
        content = self.path.read_bytes()
        header = _line(COLUMNS)
        whole = content[: content.rfind(b"\n") + 1]
        if not whole.startswith(header) and not (header.startswith(content) and not whole):
            raise UserError(
                f"{self.path} is not a file of this sweep: its first line is not the header {','.join(COLUMNS[:3])},…; "
                "name another output"
            )
        if len(whole) < len(content):
            os.ftruncate(self._handle, len(whole))
        if not whole:
            self._write(header)
        self._done = {_key(row) for row in read_rows(self.path)}

    def has(self, point: Point) -> bool:
        """Whether the file has a row for the point."""
        return _key(point.cells()) in self._done

    def add(self, row: Row) -> None:
        """Append a row, which has every column, and wait until it is on the disk."""
        self._write(_line([_text(row[column]) for column in COLUMNS]))
        self._done.add(_key(row))

    def _write(self, line: bytes) -> None:
        size = os.fstat(self._handle).st_size
        try:
            if os.write(self._handle, line) != len(line):
                raise OSError(None, "the disk is full")
            os.fsync(self._handle)
        except OSError as error:
            os.ftruncate(self._handle, size)
            raise UserError(f"{self.path} cannot be written ({error.strerror}); finished points are kept") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._handle)


def read_rows(path: Path) -> list[dict[str, str]]:
    """All rows of a results file, as text by column."""
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if None not in row and None not in row.values()]


def _key(row: Row) -> tuple[str, ...]:
    return tuple(_text(row[column]) for column in KEY)


def _text(value: Cell) -> str:
    """The text of a cell: floats in the shortest form that parses to the same value."""
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else str(value)


def _line(cells: Sequence[str]) -> bytes:
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerow(cells)
    return written.getvalue().encode()
