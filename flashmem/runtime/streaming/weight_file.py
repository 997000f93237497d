"""The weight file of a bundle: read by `pread`, or mapped and brought in and dropped page by page.

All calls that touch the disk release the GIL.

A mapped page that is cut off the file is gone for whoever reads it: the process ends with SIGBUS. So while kernels read the
mapping (`guarded`) a lease is held on the file: Linux lets nobody open it for writing or truncate it before it is given back,
at the next layer, where the run ends with a sentence. What remains: a system or a file system without leases, a file of
another user, or one that somebody had open for writing before. There its size is checked before each layer, and a cut in the
middle of one can still end the process; so can a layer that takes longer than the 45 s that Linux waits (/proc/sys/fs/lease-
break-time).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import BundleError, RunError
from flashmem.base.files import open_regular
from flashmem.base.pages import SYSTEM_PAGE
from flashmem.bundle.cache import forget
from flashmem.bundle.checksums import Checksum, ChecksummedRange, checksum
from flashmem.bundle.version_directories import hold_shared

Bytes = NDArray[np.uint8]

_COMPARED = 64 << 10
"""Bytes of two files that are compared at a time."""

_MADV_DONTNEED = 4
_MADV_POPULATE_READ = 22  # Linux 5.14
_F_SETLEASE, _F_GETLEASE = (getattr(fcntl, name, None) for name in ("F_SETLEASE", "F_GETLEASE"))
_RWF_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)  # Linux 4.14
_F_SETSIG = 10  # Linux; the module has no name for it


class Reader(Protocol):
    """What table rows are read from."""

    def expect(self, offset: int, nbytes: int) -> None:
        """These bytes will be wanted soon."""
        ...

    def read_into(self, data: Bytes, offset: int) -> None:
        """Fill `data` with the bytes at `offset`."""
        ...


class WeightFile:
    """`weights.bin`, open for reading. Offsets and sizes are bytes."""

    def __init__(self, path: Path, nbytes: int) -> None:
        """Open the file.

        Raises:
            BundleError: it is not there, or not `nbytes` long.
        """
        self.path = path
        self.nbytes = nbytes
        try:
            self._file = os.fdopen(open_regular(path, links=False), "rb", buffering=0)
        except OSError as error:
            raise BundleError(f"{path} cannot be opened ({error.strerror}); compile the model again") from error
        self._descriptor = self._file.fileno()
        status = os.fstat(self._descriptor)
        self._which = status.st_dev, status.st_ino
        self._same: WeakKeyDictionary[WeightFile, dict[tuple[int, int, int], bool]] = WeakKeyDictionary()  # what was compared
        if status.st_size != nbytes:
            self._file.close()
            raise BundleError(f"{path} is not {nbytes} bytes long as its bundle says; compile the model again")
        hold_shared(self._descriptor)  # the bundle cache keeps it
        self._mapped: Bytes | None = None
        self._address = 0
        self._guards = 0
        self._leased = False
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._can_populate = True
        self._not_waiting = _RWF_NOWAIT
        self.missed = False  # something was not in the page cache when it was read
        self._announcer: threading.Thread | None = None
        self._closing = False
        self._keepers, self._keeping = 1, threading.Lock()

    def read_into(self, data: Bytes, offset: int) -> None:
        """Fill `data` with the bytes at `offset`.

        Raises:
            RunError: the file is shorter than that by now, or the disk fails.
        """
        view = data.data
        if self._not_waiting:
            got = self._read_cached(view, offset)
            if got == len(view):
                return
            view, offset = view[got:], offset + got
        self.missed = True
        while len(view):
            try:
                got = os.preadv(self._descriptor, [view], offset)
            except OSError as error:
                raise RunError(f"reading {len(view)} bytes at {offset} of {self.path} failed: {error.strerror}") from error
            if got == 0:
                raise RunError(f"short read: {self.path} ends before byte {offset + len(view)}; it was changed while in use")
            view = view[got:]
            offset += got

    def _read_cached(self, view: memoryview, offset: int) -> int:
        """Fill `view` as far as it is in the page cache without a gap; how many bytes that is."""
        try:
            return os.preadv(self._descriptor, [view], offset, self._not_waiting)
        except BlockingIOError:
            return 0
        except OSError:  # a system or a file system that cannot say; a disk that fails does so again
            self._not_waiting = 0
            return 0

    def has_same(self, offset: int, other: WeightFile, there: int, nbytes: int) -> bool:
        """Whether the bytes at `offset` are those of `other` at `there`, where they can be read. Both are read once, in small
        blocks; that the two are one place of one file is known without.

        Raises:
            RunError: this file is shorter than it was, or the disk fails.
        """
        if (self._which, offset) == (other._which, there):
            return True
        compared, key = self._same.setdefault(other, {}), (offset, there, nbytes)
        if key not in compared:
            compared[key] = self._compare(offset, other, there, nbytes)
        return compared[key]

    def _compare(self, offset: int, other: WeightFile, there: int, nbytes: int) -> bool:
        mine, others = np.empty((2, min(nbytes, _COMPARED)), np.uint8)
        for first in range(0, nbytes, _COMPARED):
            count = min(_COMPARED, nbytes - first)
            self.read_into(mine[:count], offset + first)
            try:
                other.read_into(others[:count], there + first)
            except RunError:  # whoever uses that file is told
                return False
            if not np.array_equal(mine[:count], others[:count]):
                return False
        return True

    def expect(self, offset: int, nbytes: int) -> None:
        """Tell the kernel that these bytes will be wanted soon, so that the disk does not pause between loads."""
        os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def announce(self, parts: Iterable[tuple[int, int]]) -> None:
        """`expect` of each (offset, bytes), in this order, by a thread: the call waits wherever the disk's queue is full."""

        def work() -> None:
            for offset, nbytes in parts:
                if self._closing:
                    return
                self.expect(offset, nbytes)

        self._announcer = threading.Thread(target=work, name="flashmem-announcer", daemon=True)
        self._announcer.start()

    @property
    def mapped(self) -> Bytes:
        """The whole file, mapped read-only. Nothing is read until it is touched or populated."""
        if self._mapped is None:
            mapping = mmap.mmap(self._descriptor, self.nbytes, prot=mmap.PROT_READ)
            self._mapped = np.frombuffer(mapping, np.uint8)
            self._address = self._mapped.ctypes.data
        return self._mapped

    def populate(self, offset: int, nbytes: int) -> None:
        """Bring pages of the mapping in, so that kernels never wait for the disk. `offset` is a multiple of the page size.

        Raises:
            RunError: the file is shorter than that by now, or the disk fails.
        """
        mapped, self.missed = self.mapped, True
        if os.fstat(self._descriptor).st_size < offset + nbytes:
            raise RunError(f"short read: {self.path} ends before byte {offset + nbytes}; it was changed while in use")
        if self._can_populate:
            if self._libc.madvise(self._address + offset, nbytes, _MADV_POPULATE_READ) == 0:
                return
            code = ctypes.get_errno()
            if code != errno.EINVAL:
                raise RunError(f"reading {nbytes} bytes at {offset} of {self.path} failed: {os.strerror(code)}")
            self._can_populate = False  # a kernel older than 5.14: read ahead, then touch every page
        self.expect(offset, nbytes)
        mapped[offset : offset + nbytes : SYSTEM_PAGE].max()

    def drop(self, offset: int, nbytes: int) -> None:
        """Let pages of the mapping go; the page cache may keep them, but they are no longer this process's memory."""
        if self._libc.madvise(self._address + offset, nbytes, _MADV_DONTNEED) != 0:
            code = ctypes.get_errno()
            raise RunError(f"dropping {nbytes} bytes at {offset} of {self.path} failed: {os.strerror(code)}")

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """While it lasts the file keeps its size, as far as the system can promise that; `check` says when it cannot.

        Raises:
            RunError: the file is shorter than it was.
        """
        if self._guards == 0:
            self._leased = self._take_lease()
        self._guards += 1
        try:
            self._check_size()
            yield
        finally:
            self._guards -= 1
            if self._guards == 0:
                self._let_go()

    def check(self) -> None:
        """Raise RunError if somebody is about to change the file, or has cut it."""
        if self._leased and _F_GETLEASE is not None:
            if fcntl.fcntl(self._descriptor, _F_GETLEASE) != fcntl.F_RDLCK:
                raise RunError(f"another process wants to write to {self.path}, which is in use; run again when it is done")
        else:
            self._check_size()

    def _check_size(self) -> None:
        if os.fstat(self._descriptor).st_size < self.nbytes:
            raise RunError(f"short read: {self.path} ends before byte {self.nbytes}; it was changed while in use")

    def _let_go(self) -> None:
        if self._leased and _F_SETLEASE is not None:
            self._leased = False
            with suppress(OSError):
                fcntl.fcntl(self._descriptor, _F_SETLEASE, fcntl.F_UNLCK)

    def _take_lease(self) -> bool:
        if _F_SETLEASE is None:
            return False
        try:
            fcntl.fcntl(self._descriptor, _F_SETSIG, signal.SIGURG)  # SIGIO, the usual one, would end the process
            fcntl.fcntl(self._descriptor, _F_SETLEASE, fcntl.F_RDLCK)
        except OSError:
            return False
        return True

    def compare_checksum(self, what: str, value: Checksum, expected: Checksum) -> None:
        """Raise RunError if `what` has another checksum than it was written with; the bundle cache then forgets the bundle."""
        if value != expected:
            forget(self.path.parent)
            raise RunError(f"{self.path} is damaged: {what} is not what was written; compile the model again")

    def keep(self) -> None:
        """Have the file open for one more, who closes it."""
        with self._keeping:
            self._keepers += 1

    def close(self) -> None:
        """Close the file, once all who keep it do; the mapping goes with the last object that uses it."""
        with self._keeping:
            self._keepers -= 1
            if self._keepers:
                return
        self._closing = True
        if self._announcer is not None:
            self._announcer.join()  # it must not meet another file under the same descriptor
        self._mapped = None
        self._file.close()


class CheckedTable:
    """The table of one row gather, read by blocks whose checksums are compared."""

    def __init__(self, file: WeightFile, blocks: list[ChecksummedRange], checksums: tuple[Checksum, ...]) -> None:
        self._file, self._blocks, self._checksums = file, blocks, checksums
        self._size = blocks[0].nbytes  # of all but the last one
        self._held: int | None = None  # the block in `_scratch`
        self._scratch = np.empty(self._size, np.uint8)

    def expect(self, offset: int, nbytes: int) -> None:
        """These bytes will be wanted soon."""
        self._file.expect(offset, nbytes)

    def read_into(self, data: Bytes, offset: int) -> None:
        """Fill `data` with the bytes at `offset`.

        Raises:
            RunError: the file is damaged there, or shorter by now, or the disk fails.
        """
        done, start = 0, self._blocks[0].offset
        while done < data.nbytes:
            number, within = divmod(offset + done - start, self._size)
            block = self._block(number)[within:][: data.nbytes - done]
            data[done : done + block.nbytes] = block
            done += block.nbytes

    def _block(self, number: int) -> Bytes:
        part = self._blocks[number]
        content = self._scratch[: part.nbytes]
        if self._held != number:
            self._held = None
            self._file.read_into(content, part.offset)
            self._file.compare_checksum(part.name, checksum(content.data), self._checksums[number])
            self._held = number
        return content
