"""Rates of the storage: reads of one file with and without O_DIRECT, by numbers of threads.

    python -m flashmem.profiler.phone_kit.storage FOLDER MEGABYTES

Prints one line of JSON for each: bytes per second, and whether the page cache was bypassed. The file is removed afterwards.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

THREADS = (1, 2, 4, 8)
BLOCK = 1 << 20
"""Bytes of a read: the planner's usual slice."""


def write_rate(path: Path, nbytes: int) -> float:
    """Write the file of random numbers, and return bytes per second until it is on the storage."""
    content = np.random.default_rng(0).integers(0, 256, BLOCK, np.uint8)
    begun = perf_counter()
    with path.open("wb") as file:
        for block in range(nbytes // BLOCK):
            content[:8] = np.frombuffer(block.to_bytes(8, "little"), np.uint8)  # no two equal blocks
            file.write(content.data)
        file.flush()
        os.fsync(file.fileno())
    return nbytes / (perf_counter() - begun)


def read_rate(path: Path, threads: int, *, direct: bool, cached: bool = False) -> float:
    """Bytes per second of reading all of the file by so many threads, in turn.

    `direct`: with O_DIRECT; else the file's pages are dropped before, unless `cached`.

    Raises:
        OSError: the file system has no O_DIRECT, or the storage fails.
    """
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        nbytes = os.fstat(descriptor).st_size
        if not direct and not cached:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        buffers = [mmap.mmap(-1, BLOCK) for _ in range(threads)]  # aligned, as O_DIRECT needs
        failures: list[OSError] = []

        def read(number: int) -> None:
            try:
                for offset in range(number * BLOCK, nbytes, threads * BLOCK):
                    if os.preadv(descriptor, [buffers[number]], offset) != BLOCK:
                        raise OSError(0, "a read ended early")
            except OSError as error:
                failures.append(error)

        workers = [threading.Thread(target=read, args=(number,)) for number in range(threads)]
        begun = perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        seconds = perf_counter() - begun
        if failures:
            raise failures[0]
        return nbytes / seconds
    finally:
        os.close(descriptor)


def rates(folder: Path, nbytes: int, threads: Sequence[int] = THREADS) -> Any:
    """Yield a measurement at a time, as data."""
    with tempfile.TemporaryDirectory(prefix="storage-", dir=folder) as name:
        path = Path(name, "file")
        yield {"what": "write", "bytes_per_second": write_rate(path, nbytes)}
        for direct in (False, True):
            for count in threads:
                row: dict[str, Any] = {"what": "read", "direct": direct, "threads": count}
                try:
                    yield row | {"bytes_per_second": read_rate(path, count, direct=direct)}
                except OSError as error:
                    yield row | {"bytes_per_second": None, "said": error.strerror}
        yield {
            "what": "read from the page cache",
            "threads": 1,
            "bytes_per_second": read_rate(path, 1, direct=False, cached=True),
        }


def main() -> None:
    """Measure, and print a line for each measurement."""
    folder, megabytes = sys.argv[1:]
    for row in rates(Path(folder), int(megabytes) << 20):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
