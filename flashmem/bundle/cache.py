"""The bundle cache: `bundles/` in the user's cache folder (`base.paths`), bounded and repaired.

An entry is a bundle, MODEL-KEY.flashmem; its manifest's time is when it was last asked for. The cache may hold
FLASHMEM_CACHE_LIMIT bytes; without that variable 10 GB, or a tenth of what would be free on the disk without the cache,
whichever is less. When a bundle is added, those asked for longest ago go until the rest fits; never the one that was added,
never one that a session has open.
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
    """A bundle in the cache. `used` is when it was last asked for, in seconds of `time.time()`."""

    path: Path
    model: str
    nbytes: int
    used: float
    is_open: bool


def folder() -> Path:
    """Where they are. It need not exist."""
    return cache_folder("bundles")


def place(name: str) -> Path:
    """Where a bundle of this name goes: into the cache; where that cannot be written, with a warning, for this process only.

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


def find_or_make(name: str, make: Callable[[Path], Bundle]) -> Bundle:
    """The bundle `name` of the cache. Where it is missing, damaged or of another format, what `make` puts there.

    Raises:
        UserError: FLASHMEM_CACHE_LIMIT is not a size; and what `make` raises.
    """
    if os.environ.get(LIMIT_VARIABLE):
        limit()  # better refused before the work than after it
    path = place(name)
    try:
        bundle = Bundle.open(path)
    except UserError:
        if path.exists() and not (path / MANIFEST).is_file():
            shutil.rmtree(path, ignore_errors=True)  # what is no bundle at all cannot be replaced by one
        if _is_kept(path):
            make_private(folder())
        bundle = make(path)
        if _is_kept(path):
            _make_private(path)
            trim(keep=path)
        return bundle
    with suppress(OSError):
        os.utime(path / MANIFEST)
    return bundle


def forget(files: Path) -> None:
    """The bundle whose files lie in `files` is damaged: if it is one of the cache, the next call makes it again."""
    path = files.parent
    if _is_kept(path) and current_version(path) == files.name:
        with suppress(OSError):
            os.truncate(path / MANIFEST, 0)


def _make_private(path: Path) -> None:
    """The files of a bundle are its user's alone, whatever the umask is."""
    with suppress(OSError):  # another process replaces it
        for each in (path, *path.rglob("*")):
            each.chmod(0o700 if each.is_dir() else 0o600)


def _is_kept(path: Path) -> bool:
    return path.absolute().parent == folder().absolute()


def entries() -> list[Entry]:
    """What is in the cache, used last first."""
    try:
        paths = [path for path in folder().iterdir() if path.name.endswith(_SUFFIX) and not path.name.startswith(".")]
    except OSError:
        return []
    return sorted((_entry(path) for path in paths if path.is_dir()), key=lambda entry: entry.used, reverse=True)


def limit() -> int:
    """Most bytes that the cache may hold.

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
    """Hold the cache to its limit, `keep` being there whatever it takes; and remove what killed processes left.

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
    """Remove every bundle that no session has open; returns those removed and those kept."""
    remove_leftovers(folder())
    removed: list[Entry] = []
    kept: list[Entry] = []
    for entry in entries():
        (removed if remove(entry.path) else kept).append(entry)
    return removed, kept


def remove(path: Path) -> bool:
    """Remove one bundle of the cache, unless a session has it open; returns whether it is gone."""
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
    generation = current_version(path)
    return None if generation is None else path / generation / "weights.bin"


def _entry(path: Path) -> Entry:
    manifest = path / MANIFEST
    try:
        model = str(json.loads(read_regular(manifest, MANIFEST_BYTES))["meta"]["model_path"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        model = ""
    try:
        used = manifest.stat().st_mtime
    except OSError:
        used = 0.0  # nothing that can be used
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
