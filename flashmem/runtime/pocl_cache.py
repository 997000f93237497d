"""PoCL's own cache. Where PoCL cannot write its folder it has no device; with POCL_CACHE_DIR empty it ends the process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flashmem.paths import can_be_written, folder_until_exit

VARIABLE = "POCL_CACHE_DIR"


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


def _pocl_folder(given: str | None) -> Path:
    """Where PoCL keeps compiled kernels; `given` is the value of POCL_CACHE_DIR."""
    if given is not None:
        return Path(given)
    if home := os.environ.get("XDG_CACHE_HOME"):
        return Path(home, "pocl/kcache")
    if (home := os.environ.get("HOME")) is not None:
        return Path(home or "/", ".cache/pocl/kcache")
    return Path("/tmp/pocl/kcache")
