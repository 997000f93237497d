"""The command line as a function: arguments in; exit code, stdout and stderr out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from flashmem.base.streams import exit_codes
from flashmem.cli.main import call, main


@dataclass(frozen=True)
class Outcome:
    """The result of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The JSON object on stdout; fails unless stdout is exactly one object."""
        return json.loads(self.out)


Command = Callable[..., Outcome]


def command_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Returns a function that runs `command("run", path)` in this process; a traceback is a failure."""

    def command(*words: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["flashmem", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        printed = capfd.readouterr()
        assert "Traceback" not in printed.err, printed.err
        code = left.value.code
        return Outcome(code if isinstance(code, int) else 0, printed.out, printed.err)

    return command


def invoke(*words: str | Path) -> Outcome:
    """Run a command in this process, without replacing `sys.argv`."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left, exit_codes():
        sys.exit(call([*map(str, words)]))
    return Outcome(int(left.value.code or 0), out.getvalue(), err.getvalue())
