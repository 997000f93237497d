"""The bundle cache: the folder `bundles/` in the user's cache (`base.paths`), with a size limit.

An entry is a bundle, MODEL-KEY.flashmem. The modification time of its manifest is the time of its last use. The limit is
FLASHMEM_CACHE_LIMIT bytes. Without that variable it is 10 GB, or a tenth of the disk space that would be free without the
cache, whichever is less. When a bundle is added, the least recently used ones are removed until the rest fits. The added bundle
is never removed, and neither is one that a session has open.

A cache of another user is neither used nor changed, and an entry of another user is replaced: its owner could choose the code
that this process runs.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flashmem.base.errors import FlashmemWarning, UserError
from flashmem.base.files import read_regular
from flashmem.base.paths import VARIABLE, cache_folder, folder_until_exit, is_foreign, make_private, why_unusable
from flashmem.base.units import parse_size
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.version_directories import MANIFEST, MANIFEST_BYTES, current_version, held, remove_leftovers

LIMIT_BYTES = 10 * 1000**3
LIMIT_SHARE = 10
LIMIT_VARIABLE = "FLASHMEM_CACHE_LIMIT"
_SUFFIX = ".flashmem"


@dataclass(frozen=True)
class Entry:
    """A bundle in the cache. `used` is the time of its last use, in seconds of `time.time()`."""

    path: Path
    model: str
    nbytes: int
    used: float
    is_open: bool


def folder() -> Path:
    """The folder of the cache. It need not exist."""
    return cache_folder("bundles")


def place(name: str) -> Path:
    """The path for a bundle of this name: in the cache, or with a warning in a temporary folder if the cache cannot be written.

    Raises:
        UserError: no temporary folder can be written either.
    """
    reason = why_unusable(folder())
    if reason is None:
        return folder() / (name + _SUFFIX)
    warnings.warn(
        f"the bundle cache {folder()} {reason}, so the bundle is removed when this process ends; set {VARIABLE} to a "
        "folder that can be written",
        FlashmemWarning,
        stacklevel=4,
    )
    return folder_until_exit("flashmem-bundles-") / (name + _SUFFIX)


def find(name: str, is_right: Callable[[Bundle], bool]) -> Bundle | None:
    """The bundle `name` of the cache; None if it is missing, damaged, of another format or of another user, or not right."""
    path = folder() / (name + _SUFFIX)
    if not _is_own(path):
        return None
    try:
        bundle = Bundle.open(path)
    except UserError:
        return None
    if not is_right(bundle):
        return None
    with suppress(OSError):
        os.utime(path / MANIFEST)
    return bundle


def find_or_make(name: str, make: Callable[[Path], Bundle], is_right: Callable[[Bundle], bool] = lambda bundle: True) -> Bundle:
    """The bundle `name` of the cache, as `find` returns it, or else one that `make` writes.

    Raises:
        UserError: FLASHMEM_CACHE_LIMIT is not a size; and the errors of `make`.
    """
    if os.environ.get(LIMIT_VARIABLE):
        limit()  # refuse a bad limit before the work
    if (found := find(name, is_right)) is not None:
        return found
    path = place(name)
    if path.exists() and not ((path / MANIFEST).is_file() and _is_own(path)):
        _clear_place(path)  # a folder that is no bundle cannot be replaced by one, and another user's would stay theirs
    if _is_kept(path):
        make_private(folder())
    bundle = make(path)
    if _is_kept(path):
        _make_private(path)
        trim(keep=path)
    return bundle


def forget(files: Path) -> None:
    """Invalidate a damaged bundle of the cache, so that the next `find_or_make` compiles it again.

    `files` is its version directory.
    """
    path = files.parent
    if not (_is_kept(path) and _is_own(path)):
        return
    with held(path, wait=True), suppress(OSError):  # no writer replaces the bundle meanwhile
        if current_version(path) == files.name:
            descriptor = os.open(path / MANIFEST, os.O_WRONLY | os.O_NOFOLLOW)
            os.ftruncate(descriptor, 0)
            os.close(descriptor)


def _make_private(path: Path) -> None:
    """Allow access to a bundle's files for their owner only, for any umask."""
    with suppress(OSError):  # another process is replacing it
        for each in (path, *path.rglob("*")):
            each.chmod(0o700 if each.is_dir() else 0o600)


def _is_kept(path: Path) -> bool:
    return path.absolute().parent == folder().absolute()


def _is_own(path: Path) -> bool:
    """Whether the cache and its entry `path`, as far as they exist, belong to this user. A link belongs to no cache."""
    own = not path.is_symlink() and not any(map(is_foreign, (folder(), path, path / MANIFEST)))
    version = current_version(path) if own else None
    return own and (version is None or not is_foreign(path / version))


def _clear_place(path: Path) -> None:
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def entries() -> list[Entry]:
    """The bundles in the cache, most recently used first; none in the cache of another user."""
    if is_foreign(folder()):
        return []
    try:
        paths = [path for path in folder().iterdir() if path.name.endswith(_SUFFIX) and not path.name.startswith(".")]
    except OSError:
        return []
    return sorted((_entry(path) for path in paths if path.is_dir()), key=lambda entry: entry.used, reverse=True)


def limit() -> int:
    """The size limit of the cache in bytes.

    Raises:
        UserError: FLASHMEM_CACHE_LIMIT is not a size.
    """
    asked = os.environ.get(LIMIT_VARIABLE)
    if asked:
        return 0 if asked.strip() == "0" else parse_size(asked, what=LIMIT_VARIABLE)
    try:
        free = shutil.disk_usage(folder()).free
    except OSError:
        return LIMIT_BYTES
    return min(LIMIT_BYTES, (free + sum(entry.nbytes for entry in entries())) // LIMIT_SHARE)


def trim(keep: Path) -> None:
    """Remove least recently used bundles, except `keep`, until the cache is within its limit; remove abandoned drafts too.

    Raises:
        UserError: FLASHMEM_CACHE_LIMIT is not a size.
    """
    remove_leftovers(folder())
    known = entries()
    most = limit()
    total = sum(entry.nbytes for entry in known)
    for entry in reversed(known):
        if total <= most:
            return
        if entry.path != keep and remove(entry.path):
            total -= entry.nbytes


def clear() -> tuple[list[Entry], list[Entry]]:
    """Remove every bundle that no session has open. Returns the removed entries and the kept ones."""
    if is_foreign(folder()):
        return [], []
    remove_leftovers(folder())
    removed: list[Entry] = []
    kept: list[Entry] = []
    for entry in entries():
        (removed if remove(entry.path) else kept).append(entry)
    return removed, kept


def remove(path: Path) -> bool:
    """Remove one bundle of the cache unless a session has it open; returns whether it was removed."""
    weights = _weights(path)
    if weights is not None and weights.exists():
        with held(weights) as unused:
            if not unused:
                return False
            shutil.rmtree(path, ignore_errors=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


def _weights(path: Path) -> Path | None:
    version = current_version(path)
    return None if version is None else path / version / "weights.bin"


def _entry(path: Path) -> Entry:
    manifest = path / MANIFEST
    try:
        model = str(json.loads(read_regular(manifest, MANIFEST_BYTES))["meta"]["model_path"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        model = ""
    try:
        used = manifest.stat().st_mtime
    except OSError:
        used = 0.0  # not a usable bundle: removed first
    return Entry(path, model, _size(path), used, _is_open(path))


def _is_open(path: Path) -> bool:
    weights = _weights(path)
    if weights is None or not weights.exists():
        return False
    with held(weights) as unused:
        return not unused


def _size(path: Path) -> int:
    total = 0
    for file in path.rglob("*"):
        with suppress(OSError):
            total += file.stat().st_size if file.is_file() else 0
    return total
