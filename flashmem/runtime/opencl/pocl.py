"""Environment of PoCL: its cache folder, and the placement of its threads.

PoCL writes what it compiles and what it unpacks from a binary to its cache folder. If it cannot create files there, it has no
device. If the disk is full, or POCL_CACHE_DIR is empty, it ends the process.
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
"""Bytes that must be free for PoCL's cache: a kernel uses 50 to 500 KB there, and a model has up to a hundred kernels."""
AFFINITY = "POCL_AFFINITY"

_folder_in_use: Path | None = None
"""The cache folder that PoCL was started with."""


@contextmanager
def writable_pocl_cache() -> Iterator[Path | None]:
    """In the body, POCL_CACHE_DIR is a writable folder with free space. PoCL reads it once, at its start.

    Yields a temporary folder that is removed when this process ends, or None if PoCL's own folder is used.
    """
    global _folder_in_use
    given = os.environ.get(VARIABLE)
    own = _pocl_folder(given)
    usable = given is not None or why_unusable(own) is None  # a folder that the user named may belong to another user
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
    """Raise RunError if PoCL's cache has no free space, because PoCL would end this process."""
    if _folder_in_use is not None and not has_room(_folder_in_use, ROOM_BYTES):
        raise RunError(
            f"PoCL keeps compiled kernels in {_folder_in_use}, where less than {ROOM_BYTES >> 20} MiB are free; free some, or "
            f"set {VARIABLE} to a folder that has them"
        )


def one_thread_a_core() -> None:
    """Make PoCL bind each of its threads to one core, unless the user chose otherwise or bound the process to some cores.

    A thread woken for a kernel can be scheduled on the core of the thread that woke it. It waits there until the kernel is
    done: kernels of a few milliseconds then ran on one core of two (docs/research/opencl-notes.md). Threads read the variable
    at their start.
    """
    if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == os.cpu_count():
        os.environ.setdefault(AFFINITY, "1")


def _pocl_folder(given: str | None) -> Path:
    """PoCL's cache folder; `given` is the value of POCL_CACHE_DIR."""
    if given is not None:
        return Path(given)
    if home := os.environ.get("XDG_CACHE_HOME"):
        return Path(home, "pocl/kcache")
    if (home := os.environ.get("HOME")) is not None:
        return Path(home or "/", ".cache/pocl/kcache")
    return Path("/tmp/pocl/kcache")
