"""The command line as a function: arguments in; exit code, stdout and stderr out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flashmem.cli.main import main


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
