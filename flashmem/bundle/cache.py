"""The bundle cache: the folder `bundles/` in the user's cache (`base.paths`), with a size limit.

An entry is a bundle, MODEL-KEY.flashmem. The modification time of its manifest is the time of its last use. The limit is
FLASHMEM_CACHE_LIMIT bytes. Without that variable it is 10 GB, or a tenth of the disk space that would be free without the
cache, whichever is less. When a bundle is added, the least recently used ones are removed until the rest fits. The added bundle
is never removed, and neither is one that a session has open.
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
from flashmem.base.paths import VARIABLE, cache_folder, folder_until_exit, make_private, why_unusable
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
    """The bundle `name` of the cache; None if it is missing, damaged, of another format, or not right."""
    path = folder() / (name + _SUFFIX)
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
    if path.exists() and not (path / MANIFEST).is_file():
        shutil.rmtree(path, ignore_errors=True)  # a folder that is no bundle cannot be replaced by one
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
    if _is_kept(path) and current_version(path) == files.name:
        with suppress(OSError):
            os.truncate(path / MANIFEST, 0)


def _make_private(path: Path) -> None:
    """Allow access to a bundle's files for their owner only, for any umask."""
    with suppress(OSError):  # another process is replacing it
        for each in (path, *path.rglob("*")):
            each.chmod(0o700 if each.is_dir() else 0o600)


def _is_kept(path: Path) -> bool:
    return path.absolute().parent == folder().absolute()


def entries() -> list[Entry]:
    """The bundles in the cache, most recently used first."""
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
    known, most = entries(), limit()
    total = sum(entry.nbytes for entry in known)
    for entry in reversed(known):
        if total <= most:
            return
        if entry.path != keep and remove(entry.path):
            total -= entry.nbytes


def clear() -> tuple[list[Entry], list[Entry]]:
    """Remove every bundle that no session has open. Returns the removed entries and the kept ones."""
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
    weights = _weights(path)
    with held(weights) if weights is not None else held(path / MANIFEST) as unused:
        is_open = weights is not None and weights.exists() and not unused
    return Entry(path, model, _size(path), used, is_open)


def _size(path: Path) -> int:
    total = 0
    for file in path.rglob("*"):
        with suppress(OSError):
            total += file.stat().st_size if file.is_file() else 0
    return total
