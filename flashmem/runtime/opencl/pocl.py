"""What PoCL takes from the environment as it starts: its own cache, and where its threads run.

PoCL writes what it compiles, and what it unpacks of a binary, into its cache's folder. Where it cannot make a file there it has
no device; where the disk is full, or POCL_CACHE_DIR empty, it ends the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flashmem.base.errors import RunError
from flashmem.base.paths import folder_until_exit, has_room, why_unusable

VARIABLE = "POCL_CACHE_DIR"
ROOM_BYTES = 64 << 20
"""What its cache must have free: a kernel takes 50 to 500 KB there, a model has up to a hundred."""
_AFFINITY = "POCL_AFFINITY"

_folder_in_use: Path | None = None
"""The folder that PoCL was started with."""


@contextmanager
def writable_pocl_cache() -> Iterator[Path | None]:
    """While inside, PoCL finds a folder that it can write and that has room; it asks for one once, as it starts.

    Yields a folder that is removed when this process ends, or None where PoCL's own is used.
    """
    global _folder_in_use
    given = os.environ.get(VARIABLE)
    own = _pocl_folder(given)
    usable = given is not None or why_unusable(own) is None  # one that the user names may be somebody else's
    if given != "" and usable and has_room(own, ROOM_BYTES):
        _folder_in_use = own
        yield None
        return
    folder = _folder_in_use = folder_until_exit("flashmem-pocl-", ROOM_BYTES)
    os.environ[VARIABLE] = str(folder)
    try:
        yield folder
    finally:
        if given is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = given


def check_room() -> None:
    """Raise RunError where PoCL's cache has no room: it would end this process."""
    if _folder_in_use is not None and not has_room(_folder_in_use, ROOM_BYTES):
        raise RunError(
            f"PoCL keeps compiled kernels in {_folder_in_use}, where less than {ROOM_BYTES >> 20} MiB are free; free some, or "
            f"set {VARIABLE} to a folder that has them"
        )


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
