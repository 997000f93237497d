"""Messages, exit codes and progress."""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress

import pytest

from flashmem.base.errors import BudgetError, DefectError, MissingFileError, NoDeviceError, RunError, UserError
from flashmem.base.streams import exit_codes
from flashmem.cli.output.console import emit_json, print_table, progress


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (UserError("budget 'lots' is not a size"), 2, "budget 'lots' is not a size"),
        (BudgetError("too small;\n  try 5MB", smallest_bytes=5, binding="layer"), 2, "too small; try 5MB"),
        (NoDeviceError("no device"), 2, "no device"),
        (MissingFileError("x.onnx: no such file"), 2, "x.onnx: no such file"),
        (FileNotFoundError("gone"), 2, "gone"),
        (PermissionError(errno.EACCES, "Permission denied", "/root/x"), 2, "/root/x: Permission denied"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/full/x"),
            2,
            "/full/x: no space left on the disk; free some or write elsewhere",
        ),
        (RunError("the device was lost"), 1, "the device was lost"),
        (DefectError("reading m.onnx failed\nby a defect"), 1, "reading m.onnx failed by a defect"),
        (MemoryError(), 1, "the process ran out of memory"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_an_error_is_one_sentence_and_a_code(
    error: BaseException, code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left, exit_codes():
        raise error
    printed = capsys.readouterr()
    assert (left.value.code, printed.err, printed.out) == (code, f"flashmem: {sentence}\n", "")


def test_a_defect_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), exit_codes():
        _ = 1 / 0


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    emit_json({"a": 1, "b": {"c": None}})
    assert json.loads(capsys.readouterr().out) == {"a": 1, "b": {"c": None}}
    with pytest.raises(ValueError, match="JSON"):
        emit_json({"a": float("nan")})


def test_progress_without_a_terminal_is_a_line_for_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("compiling x.onnx") as report:
        for stage, fraction in (("import", 0.0), ("pack", 0.1), ("pack", 0.9), ("plan", 0.0), ("pack", 1.0)):
            report(stage, fraction)
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [f"flashmem: compiling x.onnx: {stage}" for stage in ("import", "pack", "plan")]
    assert printed.out == ""


def _all_of(master: int) -> bytes:
    """The output in a pseudo-terminal that is already closed. One read may return a part of it."""
    seen = b""
    with suppress(OSError):  # EIO: no more data
        while part := os.read(master, 65536):
            seen += part
    os.close(master)
    return seen


def test_progress_on_a_terminal_is_a_bar_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a pseudo-terminal, like a user's terminal."""
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        with progress("compiling") as report:
            report("pack", 0.5)
    seen = _all_of(master).decode()
    assert "compiling: pack" in seen and "50%" in seen


def test_cells_may_hold_any_characters(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "n"), [("w[0]", 1), ("[bold]x[/]", 22)])
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["name", "n"],
        ["w[0]", "1"],
        ["[bold]x[/]", "22"],
    ]
