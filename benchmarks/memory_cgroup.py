"""Run one process under a memory limit that the kernel enforces: a memory cgroup (v1 or v2). Needs root."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from types import TracebackType

_ROOT = Path("/sys/fs/cgroup")
_SECONDS_TO_LEAVE = 10.0


class HardLimit:
    """A memory cgroup: processes inside may use `nbytes` of memory, including page cache (which the kernel reclaims first)."""

    def __init__(self, nbytes: int) -> None:
        self.v2 = (_ROOT / "cgroup.controllers").exists()
        self.nbytes = nbytes
        self.folder = (_ROOT if self.v2 else _ROOT / "memory") / f"flashmem-{os.getpid()}"

    def __enter__(self) -> HardLimit:
        self.folder.mkdir(exist_ok=True)
        try:
            (self.folder / ("memory.max" if self.v2 else "memory.limit_in_bytes")).write_text(str(self.nbytes))
            if self.v2 and (self.folder / "memory.swap.max").exists():
                (self.folder / "memory.swap.max").write_text("0")
        except OSError:
            self.folder.rmdir()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        deadline = time.monotonic() + _SECONDS_TO_LEAVE
        while True:
            try:
                self.folder.rmdir()
                return
            except OSError:  # a killed process exists for a moment longer
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run `command` inside the limit; the kernel kills it if it needs more."""
        procs = self.folder / "cgroup.procs"
        return subprocess.run(
            ["sh", "-c", f'echo $$ > {procs} && exec "$@"', "sh", *command], capture_output=True, text=True, check=False
        )


def why_no_limit() -> str | None:
    """The reason why no limit can be set here, usually missing root rights; None if one can."""
    try:
        with HardLimit(1 << 30):
            return None
    except OSError as error:
        return str(error)
