"""Where flashmem keeps files between runs, and where while it runs."""

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
_PRIVATE = 0o700
_PROBE_BYTES = 1 << 16
_TEMPORARY = ("/var/tmp", "/dev/shm")
"""Folders for temporary files beside the one that Python knows."""


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


def why_unusable(folder: Path) -> str | None:
    """Why a cache's folder is not used, as the end of a sentence, or None. One that another user owns is not: who can write
    there says what this process runs.
    """
    if not can_be_written(folder):
        return "cannot be written"
    return "belongs to another user" if is_foreign(folder) else None


def is_foreign(folder: Path) -> bool:
    """Whether another user owns `folder`; False where there is none yet."""
    try:
        return folder.stat().st_uid != os.geteuid()
    except OSError:
        return False


def make_private(folder: Path) -> None:
    """Make a cache's folder, and what is missing above it, for this user alone, whatever the umask is. Raises OSError."""
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
    """Whether files can be made in `folder`, which need not exist yet, and `nbytes` bytes are free there. Leaves nothing."""
    if not can_be_written(folder):
        return False
    while not folder.exists():
        folder = folder.parent
    try:
        status = os.statvfs(folder)
        if status.f_bavail * status.f_frsize < nbytes:
            return False
        with tempfile.TemporaryFile(dir=folder) as file:  # a quota may be used up where the disk is not
            file.write(bytes(min(nbytes, _PROBE_BYTES)))
    except OSError:
        return False
    return True


def temporary_parent(nbytes: int) -> Path | None:
    """A folder for temporary folders that has room for `nbytes` bytes: the system's, else another. None if there is none: it is
    left to the system's then, and to who writes there.
    """
    found: list[str] = []
    with suppress(OSError):  # there is none that can be written
        found.append(tempfile.gettempdir())
    candidates = [Path(each) for each in (*found, *_TEMPORARY)]
    return next((each for each in candidates if each.is_dir() and has_room(each, nbytes)), None)


def folder_until_exit(prefix: str, nbytes: int = 0) -> Path:
    """A new temporary folder, removed when this process ends; where there is room for `nbytes` bytes, if that is anywhere.

    Raises:
        UserError: no temporary folder can be written.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=temporary_parent(nbytes)))
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
