"""Drop files from the page cache, and measure the disk's rate (a virtual machine's host may still cache them)."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.worker import drop

MIB = 1 << 20
_MOST = 512 * MIB  # bytes of a file that are enough to measure


def cold_rate(path: Path) -> float:
    """Bytes per second of a cold read of `path`, by one thread or by two, whichever is faster."""
    return max(_rate(path, 1), _rate(path, 2))


def warm(path: Path) -> None:
    """Read the whole file, so that it is in the page cache as far as memory permits."""
    with path.open("rb", buffering=0) as file:
        while file.read(8 * MIB):
            pass


def _rate(path: Path, threads: int) -> float:
    """Read in pieces of 8 MiB, each announced before its read."""
    drop([path])
    size = min(path.stat().st_size, _MOST)
    handle = os.open(path, os.O_RDONLY)

    def read(offset: int) -> None:
        os.posix_fadvise(handle, offset, 16 * MIB, os.POSIX_FADV_WILLNEED)
        os.pread(handle, 8 * MIB, offset)

    begun = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(0, size, 8 * MIB)))
    seconds = time.perf_counter() - begun
    os.close(handle)
    return size / seconds
