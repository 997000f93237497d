"""What PoCL takes from the environment as it starts: its own cache, and where its threads run.

Where PoCL cannot write its cache's folder it has no device; with POCL_CACHE_DIR empty it ends the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flashmem.paths import can_be_written, folder_until_exit

VARIABLE = "POCL_CACHE_DIR"
_AFFINITY = "POCL_AFFINITY"


@contextmanager
def writable_pocl_cache() -> Iterator[Path | None]:
    """While inside, PoCL finds a folder that it can write; it asks for one once, as it starts.

    Yields a folder that is removed when this process ends, or None where PoCL's own can be written.
    """
    given = os.environ.get(VARIABLE)
    if given != "" and can_be_written(_pocl_folder(given)):
        yield None
        return
    folder = folder_until_exit("flashmem-pocl-")
    os.environ[VARIABLE] = str(folder)
    try:
        yield folder
    finally:
        if given is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = given


def one_thread_a_core() -> None:
    """Have PoCL keep each of its threads on a core of its own, unless the user has said otherwise or bound the process to some.

    A thread that is woken for a kernel may be put on the core of the one that woke it, where it waits until the kernel is over:
    kernels of a few milliseconds then ran on one core of two (docs/opencl-notes.md). Threads read the variable when they start.
    """
    if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == os.cpu_count():
        os.environ.setdefault(_AFFINITY, "1")


def _pocl_folder(given: str | None) -> Path:
    """Where PoCL keeps compiled kernels; `given` is the value of POCL_CACHE_DIR."""
    if given is not None:
        return Path(given)
    if home := os.environ.get("XDG_CACHE_HOME"):
        return Path(home, "pocl/kcache")
    if (home := os.environ.get("HOME")) is not None:
        return Path(home or "/", ".cache/pocl/kcache")
    return Path("/tmp/pocl/kcache")
