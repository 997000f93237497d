"""Where flashmem keeps files between runs, and where while it runs."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from flashmem.errors import UserError

VARIABLE = "FLASHMEM_CACHE_DIR"


def cache_folder(kind: str) -> Path:
    """The user's cache for `kind` of file: FLASHMEM_CACHE_DIR, else XDG_CACHE_HOME/flashmem, else ~/.cache/flashmem.

    The folder need not exist; whoever writes creates it.
    """
    explicit = os.environ.get(VARIABLE)
    if explicit:
        return Path(explicit) / kind
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else _home() / ".cache") / "flashmem" / kind


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # no HOME, and a user whom the system does not know: containers call / the home of such a user
        return Path("/")


def can_be_written(folder: Path) -> bool:
    """Whether files can be made in `folder`, which need not exist yet. Makes nothing."""
    try:
        while not folder.exists():
            folder = folder.parent
    except OSError:  # a folder on the way may not be searched
        return False
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def folder_until_exit(prefix: str) -> Path:
    """A new temporary folder, removed when this process ends.

    Raises:
        UserError: no temporary folder can be written.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise no_temporary_folder(error) from error
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child ends before its parent does
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def no_temporary_folder(error: OSError) -> UserError:
    """What is said where a temporary folder could not be made."""
    return UserError(f"no temporary folder can be written ({error.strerror}); set TMPDIR to a folder that can")
