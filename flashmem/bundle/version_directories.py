"""Atomic replacement of a bundle's files: a reader finds the old bundle or the new one, also after a crash.

    NAME.flashmem/
        manifest.json       names the version directory
        3f2a90c1d5e7b846/   version directory: all other files of the bundle
    .NAME.flashmem-6b1f.../ draft: a folder of the same form that a process is writing

To write the first bundle of a name, the draft is renamed. To replace a bundle, the draft's version directory is moved into the
bundle's folder, where the manifest does not name it yet. The draft's manifest then replaces the old manifest by one rename, and
the old version directory is removed.

A writer holds a lock on its draft (flock, which ends with the process), and one on the bundle's folder while it changes that.
A draft without a lock was left by a killed process; the next writer of that name removes it. On file systems without locks
nothing is removed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flashmem.base.files import read_regular

MANIFEST = "manifest.json"
MANIFEST_BYTES = 64 << 20
"""The largest size of a manifest."""
_TRIES = 50
_TRY_SECONDS = 0.01
_VERSION_NAME = re.compile(r"[0-9a-f]{16}")
_DRAFT = re.compile(r"\..+-[0-9a-f]{16}")
_FLAT = ("program.json", "plan.json", "kernels.cl", "kernels_lane.cl", "weights.bin")
"""Files next to the manifest in bundles of format 1."""


def is_version_name(name: object) -> bool:
    """Whether `name` is valid as the name of a version directory."""
    return isinstance(name, str) and _VERSION_NAME.fullmatch(name) is not None


class Draft:
    """A bundle that is being written, invisible to readers until `publish`. Errors of the disk are raised as OSError."""

    def __init__(self, path: Path) -> None:
        """Begin the next version of the bundle at `path`, and remove the drafts that killed writers left."""
        self.path = path
        self.version = secrets.token_hex(8)
        self._lock: int | None
        self._root, self._lock = begin_folder(path)
        self.folder = self._root / self.version
        self.folder.mkdir()

    def write(self, name: str, content: bytes) -> None:
        """Write a new file of the version directory and wait until it is on the disk."""
        _write(self.folder / name, content)

    def publish(self, manifest: bytes) -> None:
        """Make the draft the bundle. `manifest` must name the version directory `version`."""
        _write(self._root / MANIFEST, manifest)
        _sync(self.folder)
        if self._becomes_first():
            self._release()
            return
        with held(self.path, wait=True):
            self.folder.rename(self.path / self.version)
            (self._root / MANIFEST).replace(self.path / MANIFEST)
            _sync(self.path)
            _remove_unnamed(self.path, self.version)
        self.discard()

    def _becomes_first(self) -> bool:
        """Rename the draft to the bundle's name if that name is free; returns whether it did."""
        if self.path.exists():
            return False
        try:
            self._root.rename(self.path)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):  # another process was faster
                return False
            raise
        _sync(self.path.parent)
        return True

    def discard(self) -> None:
        """Remove the draft. Does nothing after `publish`."""
        if self._lock is not None:
            shutil.rmtree(self._root, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None


def current_version(path: Path) -> str | None:
    """The version directory that the manifest of the bundle at `path` names; None without a readable manifest."""
    try:
        name = json.loads(read_regular(path / MANIFEST, MANIFEST_BYTES))["version_directory"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return name if is_version_name(name) else None


def begin_folder(path: Path) -> tuple[Path, int]:
    """A new folder beside the bundle `path`, and the descriptor of its lock: without that, the next writer removes it.

    Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent, path.name)
    return _locked_folder(path)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove abandoned drafts of the bundle `name` from `folder`, and version directories that its manifest does not name.

    Without `name`, remove the abandoned drafts of every bundle.
    """
    for entry in _entries(folder):
        if _DRAFT.fullmatch(entry.name) and (name is None or entry.name[1:-17] == name):
            with held(entry) as mine:
                if mine:
                    shutil.rmtree(entry, ignore_errors=True)
    if name is not None and (kept := current_version(folder / name)) is not None:
        with held(folder / name) as mine:
            if mine:
                _remove_unnamed(folder / name, current_version(folder / name) or kept)


def _remove_unnamed(path: Path, kept: str) -> None:
    """Remove the version directories of a bundle except `kept`, and the files of format 1."""
    for entry in _entries(path):
        if is_version_name(entry.name) and entry.name != kept:
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name in _FLAT:
            with suppress(OSError):
                entry.unlink()


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _locked_folder(path: Path) -> tuple[Path, int]:
    """Create and lock a folder for a draft of `path`. Returns the folder and the descriptor that holds the lock."""
    while True:
        root = path.parent / f".{path.name}-{secrets.token_hex(8)}"
        root.mkdir()
        lock = os.open(root, os.O_RDONLY)
        if _lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB) is not False and _is(lock, root):
            return root, lock
        os.close(lock)  # another process removed it as abandoned before the lock
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def held(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold an exclusive lock on a file or a folder in the body; yields whether the lock was taken.

    With `wait`, wait until other processes release it. False where `path` does not exist or the file system has no locks.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # which a pipe's writer need not end
    except OSError:
        yield False
        return
    try:
        yield _lock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)) is True
    finally:
        os.close(descriptor)


def hold_shared(descriptor: int) -> None:
    """Take a shared lock that marks an open file as in use until it is closed. No effect on file systems without locks.

    A process that asks whether the file is in use has it locked for an instant; this waits for that, but not for ever.
    """
    for _ in range(_TRIES):
        if _lock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB) is not False:
            return
        time.sleep(_TRY_SECONDS)


def _lock(descriptor: int, how: int) -> bool | None:
    """Whether the lock was taken; None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is(descriptor: int, path: Path) -> bool:
    """Whether `path` still names the file that was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:  # a file of that name is not ours
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Write the entries of a folder to the disk, where the system supports that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
