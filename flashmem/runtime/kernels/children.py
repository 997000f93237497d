"""A child process that works for a device: one job per line of its stdin, one answer per line of its stdout, both JSON.

A driver's compiler may take hundreds of megabytes, hang, or end the process; so it works in a child. Children have a session of
their own, where Ctrl-C does not reach them. Linux ends a child with the thread that started it (`child_processes.end_with`).
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from flashmem.base.child_processes import module_environment, python_module
from flashmem.runtime.opencl.compile_target import driver_variables
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.discovery import driver_for


class Child:
    """A running child. `close` ends it."""

    def __init__(self, module: str, device: Device, folder: Path, errors: Path) -> None:
        """Start `module` with the key of `device`, `folder`, the id of this process and the device's driver as arguments.

        It has the driver's variables of this process; `errors` receives its output.

        Raises:
            OSError: no process can be started.
        """
        self._errors = errors
        self.process = _start(module, device, folder, errors)

    def ask(self, job: dict[str, Any], longest: float) -> dict[str, Any] | None:
        """The answer to a job; None if the child has ended.

        Raises:
            TimeoutError: it took more than `longest` seconds; the child is ended.
        """
        child = self.process
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(f"{json.dumps(job)}\n".encode())
            child.stdin.flush()
        except OSError:
            return None
        line = b""
        end = time.monotonic() + longest
        with selectors.DefaultSelector() as selector:  # select() knows descriptors below 1024 only
            selector.register(child.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, end - time.monotonic())):
                    child.kill()
                    raise TimeoutError
                part = os.read(child.stdout.fileno(), 1 << 16)
                if not part:
                    return None
                line += part
        answer: dict[str, Any] = json.loads(line)
        return answer

    def only_when_idle(self) -> None:
        """Give it idle priority, where the system supports it."""
        _only_when_idle(self.process.pid)

    def last_line(self) -> str:
        """The last line of its output, in brackets, after it has ended."""
        self.process.wait()
        try:
            lines = self._errors.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return next((f" ({line.strip()})" for line in reversed(lines) if line.strip()), "")

    def was_killed(self) -> bool:
        """Whether another process, or a lack of memory, has killed it."""
        return self.process.wait() == -signal.SIGKILL

    def kill(self) -> None:
        """End it, without waiting."""
        self.process.kill()

    def close(self) -> None:
        """End it, and free what this process has of it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):  # the rest of a line that it did not read
                    pipe.close()


def _start(module: str, device: Device, folder: Path, errors: Path) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name not in driver_variables(device.platform)}
    arguments = (device.key, str(folder), str(os.getpid()), driver_for(device) or "")
    with errors.open("wb") as stderr:
        return subprocess.Popen(
            python_module(module, *arguments),
            env=module_environment({**environment, **device.variables}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )


def _only_when_idle(process: int) -> None:
    if hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):
            os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
