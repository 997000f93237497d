"""Child processes of the phone kit: each step runs in its own, because a driver may crash or hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any


@dataclass(frozen=True)
class Ended:
    """How a child process ended. `code`: its exit code, negative for a signal, None if it was ended after its time.

    `said`: one sentence where the code is not 0.
    """

    out: str
    code: int | None
    said: str
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether it ended as it should."""
        return self.code == 0

    def lines(self) -> Iterator[dict[str, Any]]:
        """The JSON objects that it printed, one in a line. A driver may print other lines."""
        for line in self.out.splitlines():
            with suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    yield found


def run_child(command: Sequence[str | Path], seconds: float, environment: Mapping[str, str]) -> Ended:
    """Run a command for at most `seconds`; it and its own children are then ended."""
    begun = monotonic()
    with subprocess.Popen(
        list(map(str, command)), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=dict(environment), start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, errors = process.communicate(timeout=max(0.1, seconds))
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            _end(process)
            out, errors = process.communicate()
            code = None
        except BaseException:  # an interruption of the kit
            _end(process)
            raise
    text = out.decode(errors="replace")
    last = _last_line(errors.decode(errors="replace"))
    return Ended(text, code, _sentence(code, last, seconds), monotonic() - begun)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _sentence(code: int | None, last: str, seconds: float) -> str:
    if code == 0:
        return ""
    if code is None:
        return f"it did not end within {seconds:.0f} s"
    if code < 0:
        return f"signal {-code} ended the process" + (f" after: {last}" if last else "")
    return last or f"exit code {code}"
