"""How the folder of a bundle changes: by one rename, so that there is always the old bundle or the new one.

    NAME.flashmem/
        manifest.json       names the folder of the files that belong to it
        3f2a90c1d5e7b846/   those files: a generation
    .NAME.flashmem-6b1f.../ a draft: a folder of the same form that somebody is writing

The first bundle of a name is a draft renamed. For every later one the draft's generation is moved into the bundle's folder,
where nothing names it yet; the draft's manifest then takes the place of the old one, and what the old one named is removed.

Whoever writes a draft holds a lock on it (flock, which ends with its process), and whoever changes a bundle's folder one on
that. What nobody holds was left by a process that was killed, and the next writer of that name removes it. Where the file
system has no locks nothing counts as left over.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flashmem.base.files import read_regular

MANIFEST = "manifest.json"
MANIFEST_BYTES = 64 << 20
"""The most that a manifest may have."""
_GENERATION = re.compile(r"[0-9a-f]{16}")
_DRAFT = re.compile(r"\..+-[0-9a-f]{16}")
_FLAT = ("program.json", "plan.json", "kernels.cl", "kernels_lane.cl", "weights.bin")
"""Files that stood beside the manifest up to format 1."""


def is_generation(name: object) -> bool:
    """Whether a manifest may name this folder."""
    return isinstance(name, str) and _GENERATION.fullmatch(name) is not None


class Draft:
    """A bundle in the making, which nobody sees until `publish`. Errors of the disk are raised as they come (OSError)."""

    def __init__(self, path: Path) -> None:
        """Begin the next generation of the bundle at `path`, and remove what killed writers of that name left."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent, path.name)
        self.generation = secrets.token_hex(8)
        self._lock: int | None
        self._root, self._lock = _locked_folder(path)
        self.folder = self._root / self.generation
        self.folder.mkdir()

    def write(self, name: str, content: bytes) -> None:
        """A file of the generation, whole on the disk."""
        _write(self.folder / name, content)

    def publish(self, manifest: bytes) -> None:
        """The draft becomes the bundle. `manifest` names `generation`."""
        _write(self._root / MANIFEST, manifest)
        _sync(self.folder)
        if self._becomes_first():
            self._release()
            return
        with held(self.path, wait=True):
            self.folder.rename(self.path / self.generation)
            (self._root / MANIFEST).replace(self.path / MANIFEST)
            _sync(self.path)
            _remove_unnamed(self.path, self.generation)
        self.discard()

    def _becomes_first(self) -> bool:
        """Whether nothing had the name, so that the whole draft could take it."""
        if self.path.exists():
            return False
        try:
            self._root.rename(self.path)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):  # somebody else was faster
                return False
            raise
        _sync(self.path.parent)
        return True

    def discard(self) -> None:
        """Nothing of the draft stays. Does nothing after `publish`."""
        if self._lock is not None:
            shutil.rmtree(self._root, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None


def named_generation(path: Path) -> str | None:
    """The generation that the bundle at `path` says it consists of; None if it does not say."""
    try:
        name = json.loads(read_regular(path / MANIFEST, MANIFEST_BYTES))["generation"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return name if is_generation(name) else None


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove drafts that nobody writes from `folder`, and generations that nothing names from the bundle `name`.

    Without a name: the drafts of every name.
    """
    for entry in _entries(folder):
        if _DRAFT.fullmatch(entry.name) and (name is None or entry.name[1:-17] == name):
            with held(entry) as mine:
                if mine:
                    shutil.rmtree(entry, ignore_errors=True)
    if name is not None and (kept := named_generation(folder / name)) is not None:
        with held(folder / name) as mine:
            if mine:
                _remove_unnamed(folder / name, named_generation(folder / name) or kept)


def _remove_unnamed(path: Path, kept: str) -> None:
    """Remove the generations of a bundle that its manifest no longer names, and the files of format 1."""
    for entry in _entries(path):
        if is_generation(entry.name) and entry.name != kept:
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
    """A new folder for a draft of `path`, and the descriptor that holds its lock."""
    while True:
        root = path.parent / f".{path.name}-{secrets.token_hex(8)}"
        root.mkdir()
        lock = os.open(root, os.O_RDONLY)
        if _lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB) is not False and _is(lock, root):
            return root, lock
        os.close(lock)  # taken for left over, in the moment before it was locked
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def held(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Whether nobody else holds `path` (a file or a folder), which is held for as long as the context lasts.

    With `wait` it is held as soon as the others let go. False where there is nothing, or no locks.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        yield _lock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)) is True
    finally:
        os.close(descriptor)


def hold_shared(descriptor: int) -> None:
    """Say that the open file `descriptor` is in use, for as long as it is open. Nothing happens where there are no locks."""
    _lock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _lock(descriptor: int, how: int) -> bool | None:
    """Whether the lock was taken; None where the file system has none."""
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is(descriptor: int, path: Path) -> bool:
    """Whether `path` still is what was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """A folder's entries reach the disk; what cannot be asked for is left to the system."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
