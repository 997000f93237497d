"""Files of the program cache, and the packed form of the same entries in a bundle (see `runtime.kernels.cache`)."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from flashmem.base.errors import FlashmemWarning
from flashmem.base.files import read_cached, written_whole
from flashmem.base.paths import VARIABLE, cache_folder, is_foreign, make_private

LIMIT_BYTES = 1_000_000_000
LIMIT_SHARE = 10
LEAST_BYTES = 50_000_000
"""Bytes that the cache may use even on a full disk: the kernels of one large model."""
_ENTRY_BYTES = 1 << 30  # larger than any kernel
_DAY = 86400.0
_MAGIC = b"flashmem program\n"
_LENGTH_BYTES = 8
_HASH_BYTES = 32
_HEADER_BYTES = len(_MAGIC) + 2 * _HASH_BYTES + _LENGTH_BYTES


class ProgramCache:
    """The entries in one folder. Files of another user are neither read nor written."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = cache_folder("programs") if folder is None else folder

    def holds(self, key: str) -> bool:
        """Whether `key` has an entry; reading may still find it damaged."""
        path = self._path(key)
        return path.is_file() and not (is_foreign(self.folder) or is_foreign(path))

    def read(self, key: str) -> bytes | None:
        """The binary stored under `key`; None if the entry is missing or damaged."""
        if is_foreign(self.folder):
            return None
        path = self._path(key)
        try:
            content = read_cached(path, _ENTRY_BYTES)
        except FileNotFoundError:
            return None
        except OSError:  # not a file that `write` made
            self.delete(key)
            return None
        binary = _unpack(key, content)
        if binary is None:
            self.delete(key)
        else:
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _DAY:
                    os.utime(path)  # `trim` removes least recently used entries
        return binary

    def write(self, key: str, binary: bytes) -> None:
        """Store `binary` under `key` atomically. Warns if the folder cannot be written."""
        try:
            if is_foreign(self.folder):
                raise PermissionError(errno.EPERM, "another user owns it")
            make_private(self.folder)
            with written_whole(self._path(key), private=True) as file:
                file.write(_pack(key, binary))
        except OSError as error:
            warnings.warn(
                f"the program cache {self.folder} cannot be written ({error.strerror}), so kernels are compiled again next "
                f"time; set {VARIABLE} to a folder that can",
                FlashmemWarning,
                stacklevel=2,
            )

    def delete(self, key: str) -> None:
        """Remove the entry of `key`, if it exists and can be removed."""
        if is_foreign(self.folder):
            return
        with suppress(OSError):
            self._path(key).unlink()

    def size(self) -> tuple[int, int]:
        """The number of entries and their bytes."""
        found = self._entries()
        return len(found), sum(nbytes for _, nbytes, _ in found)

    def limit(self) -> int:
        """The size limit in bytes: 1 GB, or a tenth of the disk space that would be free without the cache, but at least 50
        MB.
        """
        return self._limit(self.size()[1])

    def _limit(self, held: int) -> int:
        """The size limit if the entries have `held` bytes."""
        try:
            free = shutil.disk_usage(self.folder).free
        except OSError:
            return LIMIT_BYTES
        return min(LIMIT_BYTES, max(LEAST_BYTES, (free + held) // LIMIT_SHARE))

    def trim(self) -> None:
        """Remove least recently used entries until the cache is within its limit, and the temporary files of killed
        processes.
        """
        entries = self._entries()
        total = sum(nbytes for _, nbytes, _ in entries)
        most = self._limit(total)
        for _, nbytes, path in sorted(entries):
            if total <= most:
                break
            with suppress(OSError):
                Path(path).unlink()
                total -= nbytes
        for file in self._files(temporary=True):
            with suppress(OSError):
                if time.time() - file.stat().st_mtime > _DAY:
                    Path(file).unlink()

    def clear(self) -> tuple[int, int]:
        """Remove all entries, also while sessions are open, which have loaded theirs. Returns their number and bytes."""
        removed = nbytes = 0
        for _, size, path in self._entries():
            with suppress(OSError):
                Path(path).unlink()
                removed = removed + 1
                nbytes = nbytes + size
        return removed, nbytes

    def _entries(self) -> list[tuple[float, int, str]]:
        """The entries as (last use in seconds of `time.time()`, bytes, file)."""
        found = []
        for file in self._files(temporary=False):
            with suppress(OSError):
                status = file.stat()
                found.append((status.st_mtime, status.st_size, file.path))
        return found

    def _files(self, *, temporary: bool) -> list[os.DirEntry[str]]:
        if is_foreign(self.folder):
            return []
        try:
            with os.scandir(self.folder) as found:
                files = list(found)
        except OSError:
            return []
        return [file for file in files if (file.name.startswith(".") if temporary else file.name.endswith(".bin"))]

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.bin"


def packed_entries(entries: Mapping[str, bytes]) -> bytes:
    """Entries by key as one block of bytes, for a bundle."""
    return b"".join(_pack(key, entries[key]) for key in sorted(entries))


def unpacked_entries(content: bytes) -> dict[str, bytes]:
    """The entries in `content`, up to the first invalid one; the inverse of `packed_entries`."""
    entries = dict[str, bytes]()
    view = memoryview(content)
    start = 0
    while start < len(content):
        key = bytes(view[start + len(_MAGIC) :][:_HASH_BYTES]).hex()
        length = int.from_bytes(view[start + len(_MAGIC) + _HASH_BYTES :][:_LENGTH_BYTES], "little")
        end = start + _HEADER_BYTES + length
        binary = _unpack(key, bytes(view[start:end])) if end <= len(content) else None
        if binary is None:
            break
        entries[key] = binary
        start = end
    return entries


def _pack(key: str, binary: bytes) -> bytes:
    return b"".join(
        (_MAGIC, bytes.fromhex(key), len(binary).to_bytes(_LENGTH_BYTES, "little"), hashlib.sha256(binary).digest(), binary)
    )


def _unpack(key: str, content: bytes) -> bytes | None:
    """The binary in `content`, or None if it is not in the form of `_pack`."""
    binary = content[_HEADER_BYTES:]
    return binary if binary and _pack(key, binary) == content else None
