"""The processors of this machine, as /proc/cpuinfo lists them (Linux)."""

from __future__ import annotations

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def processors() -> list[dict[str, str]]:
    """The fields of each processor that are not empty; no processor without that file."""
    try:
        blocks = CPUINFO.read_text(encoding="utf-8", errors="replace").split("\n\n")
    except OSError:
        return []
    listed = ((line.partition(":") for line in block.splitlines()) for block in blocks)
    return [{key.strip(): value.strip() for key, _, value in lines if value.strip()} for lines in listed]
