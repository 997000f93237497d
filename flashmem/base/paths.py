"""Folders for caches and temporary files."""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from flashmem.base.errors import UserError

VARIABLE = "FLASHMEM_CACHE_DIR"
TEMPLATES = "templates"
"""The kind of cache folder that compiled kernel templates are in."""

_PRIVATE = 0o700
_PROBE_BYTES = 1 << 16
_TEMPORARY = ("/var/tmp", "/dev/shm")
"""Folders for temporary files, next to the default one of `tempfile`."""


def cache_folder(kind: str) -> Path:
    """The user's cache folder for a `kind` of file: FLASHMEM_CACHE_DIR, else XDG_CACHE_HOME/flashmem, else ~/.cache/flashmem.

    The folder need not exist; the first writer creates it.
    """
    explicit = os.environ.get(VARIABLE)
    if explicit:
        return Path(explicit) / kind
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else _home() / ".cache") / "flashmem" / kind


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # HOME is unset and the user has no account entry, as in containers / the user's home
        return Path("/")


def can_be_written(folder: Path) -> bool:
    """Whether files can be created in `folder`, which need not exist yet. Creates nothing."""
    try:
        while not folder.exists():
            folder = folder.parent
    except OSError:  # a parent folder cannot be searched
        return False
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def why_unusable(folder: Path) -> str | None:
    """Why a cache folder cannot be used, as the end of a sentence; None if it can.

    A folder of another user is refused: its owner could choose the code that this process runs.
    """
    if not can_be_written(folder):
        return "cannot be written"
    return "belongs to another user" if is_foreign(folder) else None


def is_foreign(path: Path) -> bool:
    """Whether another user owns the folder or the file `path`; False if it does not exist."""
    try:
        return path.stat().st_uid != os.geteuid()
    except OSError:
        return False


def make_private(folder: Path) -> None:
    """Create a cache folder and its missing parents with access for this user only, for any umask. Raises OSError."""
    missing = [folder]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for each in reversed(missing):
        with suppress(FileExistsError):
            each.mkdir(mode=_PRIVATE)
    status = folder.stat()
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != _PRIVATE:
        folder.chmod(_PRIVATE)


def has_room(folder: Path, nbytes: int) -> bool:
    """Whether `nbytes` bytes can be written in `folder`, which need not exist yet. Leaves nothing behind."""
    if not can_be_written(folder):
        return False
    while not folder.exists():
        folder = folder.parent
    try:
        status = os.statvfs(folder)
        if status.f_bavail * status.f_frsize < nbytes:
            return False
        with tempfile.TemporaryFile(dir=folder) as file:  # a quota can be exhausted although the disk has space
            file.write(bytes(min(nbytes, _PROBE_BYTES)))
    except OSError:
        return False
    return True


def temporary_parent(nbytes: int) -> Path | None:
    """A parent for temporary folders with `nbytes` bytes of free space: the system's default, else another one.

    None if there is none; the writer then gets the error of the system's default folder.
    """
    found: list[str] = []
    with suppress(OSError):  # none of them can be written
        found.append(tempfile.gettempdir())
    candidates = [Path(each) for each in (*found, *_TEMPORARY)]
    return next((each for each in candidates if each.is_dir() and has_room(each, nbytes)), None)


def folder_until_exit(prefix: str, nbytes: int = 0) -> Path:
    """A new temporary folder that is removed when this process ends, if possible where `nbytes` bytes are free.

    Raises:
        UserError: no temporary folder can be written.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=temporary_parent(nbytes)))
    except OSError as error:
        raise no_temporary_folder(error) from error
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not in a forked child, which ends before its parent
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def no_temporary_folder(error: OSError) -> UserError:
    """The error for a temporary folder that cannot be created."""
    return UserError(f"no temporary folder can be written ({error.strerror}); set TMPDIR to a folder that can")
