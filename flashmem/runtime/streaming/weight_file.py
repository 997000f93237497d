"""The weight file of a bundle: read by `pread`, or mapped, with pages read in and dropped singly.

All calls that access the disk release the GIL.

If a file is truncated, access to a mapped page behind its end kills the process with SIGBUS. So while kernels read the mapping
(`guarded`), the process holds a lease on the file. Linux then refuses to open it for writing or to truncate it until the lease
ends. That is at the next launch, where the run fails with a message. Some cases lack that protection: a system or a file system
without leases, a file of another user, or one that was open for writing before. Then the file's size is checked before each
launch, and a truncation during a launch can still kill the process. So can a launch that is longer than the 45 s that Linux
waits (/proc/sys/fs/lease-break-time).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from time import monotonic
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import BundleError, RunError
from flashmem.base.files import open_regular
from flashmem.base.interrupts import held_back
from flashmem.base.pages import SYSTEM_PAGE
from flashmem.base.threads import Thread, call_each, started
from flashmem.bundle.cache import forget
from flashmem.bundle.checksums import Checksum
from flashmem.bundle.version_directories import hold_shared
from flashmem.runtime.memory.pressure import available, room_for_files
from flashmem.runtime.streaming.cached_part import CachedPart, Range
from flashmem.runtime.streaming.direct import UNIT, DirectReader
from flashmem.runtime.streaming.owned_pages import OwnedPages

Bytes = NDArray[np.uint8]

_COMPARED = 64 << 10
"""Bytes of two files compared at a time."""

LOOK_SECONDS = 1.0
"""How often free memory is looked at."""

_MADV_DONTNEED = 4
_MADV_POPULATE_READ = 22  # Linux 5.14
_F_SETLEASE, _F_GETLEASE = (getattr(fcntl, name, None) for name in ("F_SETLEASE", "F_GETLEASE"))
_RWF_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)  # Linux 4.14
_F_SETSIG = 10  # Linux; the module has no name for it


class Reader(Protocol):
    """The source of table rows."""

    def expect(self, offset: int, nbytes: int) -> None:
        """Announce that these bytes will be read soon."""
        ...

    def read_each(self, places: Sequence[Bytes], offsets: Sequence[int]) -> None:
        """Fill each of `places` with the bytes at its offset. Raises RunError: the file is damaged, or the disk fails."""
        ...


class WeightFile:
    """`weights.bin`, open for reading. Offsets and sizes are in bytes."""

    def __init__(self, path: Path, nbytes: int) -> None:
        """Open the file.

        Raises:
            BundleError: the file is missing, or not `nbytes` long.
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
        self._same: WeakKeyDictionary[WeightFile, dict[tuple[int, int, int], bool]] = WeakKeyDictionary()  # comparisons
        if status.st_size != nbytes:
            self._file.close()
            raise BundleError(f"{path} is not {nbytes} bytes long as its bundle says; compile the model again")
        hold_shared(self._descriptor)  # protects it from the bundle cache's eviction
        self._mapped: Bytes | None = None
        self._mapping = threading.Lock()
        self._address = 0
        self._guards = 0
        self._leased = False
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._can_populate = True
        self._not_waiting = _RWF_NOWAIT
        self._byte = memoryview(bytearray(1))
        self.missed = False  # some bytes were not in the page cache when read
        self.stays = True  # in the page cache after its use, if memory has room
        self._looked = -inf
        self.cached = CachedPart()  # what passes through the page cache although the file does not stay there
        self.direct = DirectReader(self._descriptor)
        self._owned: OwnedPages | None = None  # once memory has no room for the file
        self._announcer: Thread | None = None
        self._closing = False
        self._keepers = 1
        self._keeping = threading.Lock()

    def look_at_memory(self, streamed: Callable[[], tuple[Sequence[Range], int] | None] = lambda: None) -> None:
        """Decide whether the file stays in the page cache: not if memory cannot hold all of it. The kernel would take pages of
        resident weights for it.

        Then a part of it passes through the page cache all the same (`cached`), the rest past it.

        Args:
            streamed: the ranges that each run reads from now on, and how many bytes of memory it takes for them beyond those
                that it holds. None: not known yet; what was chosen before stays.
        """
        now = monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        left = available()
        before = self.stays
        self.stays = left is None or left >= self.nbytes
        if self.stays != before:  # what Linux reads ahead beyond a range would take the place of others
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_NORMAL if self.stays else os.POSIX_FADV_RANDOM)
        if self.stays and not self.cached.nbytes:
            return
        known = ((), 0) if self.stays else streamed()
        if known is None:
            return
        ranges, needed = known
        free = (room_for_files() or 0) - needed if ranges else 0
        for offset, nbytes in self.cached.choose(ranges, free):
            self._let_pages_go(offset, nbytes)

    def _let_pages_go(self, offset: int, nbytes: int) -> None:
        if self._passes(offset):
            os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def read_into(self, data: Bytes, offset: int) -> None:
        """Fill `data` with the bytes at `offset`; past the page cache if they do not stay there.

        Raises:
            RunError: the file was truncated, or the disk fails.
        """
        if self._passes(offset) and self.direct.takes(data, offset):
            got = self._read_direct(data, offset)
            data = data[got:]
            offset = offset + got
        if data.nbytes:
            self._fill(data.data, offset)
            self._let_pages_go(offset, data.nbytes)

    def read_each(self, places: Sequence[Bytes], offsets: Sequence[int]) -> None:
        """See `Reader`. What is not cached is announced before any of it is read."""
        left = list(zip(places, offsets, strict=True))
        if self._not_waiting and self.stays:  # else pages must go after their use
            left = [(data, offset) for data, offset in left if self._read_cached(data.data, offset) < data.nbytes]
        for data, offset in left:
            self.expect(offset, data.nbytes)
        for data, offset in left:
            self.read_into(data, offset)

    def source(self, data: Bytes, offset: int) -> tuple[int, int]:
        """The descriptor from which `read_into` would fill `data` first, and how many bytes; `complete` must follow."""
        if self._passes(offset) and self.direct.takes(data, offset):
            return self.direct.descriptor, data.nbytes // UNIT * UNIT
        return self._descriptor, data.nbytes

    def complete(self, data: Bytes, offset: int, descriptor: int, got: int) -> None:
        """Others have read `got` bytes at `offset` from a descriptor of `source` into `data`: read the rest. As `read_into`."""
        if descriptor == self.direct.descriptor:
            self.missed = True
            self.direct.count(got)
        else:
            self._let_pages_go(offset, got)
        if got < data.nbytes:
            self.read_into(data[got:], offset + got)

    def is_cached(self, offset: int, nbytes: int) -> bool:
        """Whether the page cache has these bytes, judged by the last one. If not, that is noted as `missed`."""
        if self._not_waiting and self._read_cached(self._byte, offset + nbytes - 1):
            return True
        self.missed = True
        return False

    def _passes(self, offset: int) -> bool:
        """Whether the weights at `offset` do not stay in the page cache."""
        return not self.stays and not self.cached.has(offset)

    def _read_direct(self, data: Bytes, offset: int) -> int:
        """Fill `data` past the page cache, as far as the file system reads so; returns the bytes read."""
        self.missed = True
        try:
            return self.direct.read_into(data, offset)
        except OSError as error:
            raise self._unread(data.nbytes, offset, error) from error

    def _unread(self, nbytes: int, offset: int, error: OSError) -> RunError:
        return RunError(f"reading {nbytes} bytes at {offset} of {self.path} failed: {error.strerror}")

    def _fill(self, view: memoryview, offset: int) -> None:
        if self._not_waiting:
            got = self._read_cached(view, offset)
            if got == len(view):
                return
            view = view[got:]
            offset = offset + got
        self.missed = True
        while len(view):
            try:
                got = os.preadv(self._descriptor, [view], offset)
            except OSError as error:
                raise self._unread(len(view), offset, error) from error
            if got == 0:
                raise RunError(f"short read: {self.path} ends before byte {offset + len(view)}; it was changed while in use")
            view = view[got:]
            offset += got

    def _read_cached(self, view: memoryview, offset: int) -> int:
        """Fill `view` as far as the page cache has the bytes without a gap; returns their number."""
        try:
            return os.preadv(self._descriptor, [view], offset, self._not_waiting)
        except BlockingIOError:
            return 0
        except OSError:  # not supported here; or a disk error, which the next read repeats
            self._not_waiting = 0
            return 0

    def has_same(self, offset: int, other: WeightFile, there: int, nbytes: int) -> bool:
        """Whether the bytes at `offset` equal those of `other` at `there`; False if those cannot be read. Reads both once, in
        small blocks, unless they are the same place of the same file.

        Raises:
            RunError: this file was truncated, or the disk fails.
        """
        if (self._which, offset) == (other._which, there):
            return True
        compared = self._same.setdefault(other, {})
        key = (offset, there, nbytes)
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
            except RunError:  # users of that file get the error
                return False
            if not np.array_equal(mine[:count], others[:count]):
                return False
        return True

    def expect(self, offset: int, nbytes: int) -> None:
        """Announce to the kernel that these bytes will be read soon, so that the disk does not pause between loads."""
        os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def announce(self, parts: Iterable[tuple[int, int]]) -> None:
        """Call `expect` for each (offset, bytes), in order, in a thread: the call blocks while the disk's queue is full.

        Raises:
            RunError: the system has no more threads.
        """

        def work() -> None:
            for offset, nbytes in parts:
                if self._closing:
                    return
                self.expect(offset, nbytes)

        with held_back():
            self._announcer = started(work, "flashmem-announcer")

    @property
    def mapped(self) -> Bytes:
        """The whole file, mapped read-only, once. Nothing is read until an access or `populate`.

        Raises:
            RunError: the file was truncated, or the system has no room for the mapping.
        """
        with self._mapping:  # a second mapping would replace the first one, in use without a reference by imports
            if self._mapped is None:
                try:
                    mapping = mmap.mmap(self._descriptor, self.nbytes, prot=mmap.PROT_READ)
                except (OSError, ValueError) as error:
                    why = getattr(error, "strerror", None) or "it is shorter than its bundle says"
                    raise RunError(f"{self.path} cannot be mapped ({why}); was it changed while in use?") from error
                self._mapped = np.frombuffer(mapping, np.uint8)
                self._address = self._mapped.ctypes.data
            return self._mapped

    @property
    def owned_bytes(self) -> int:
        """Bytes of the mapping that are memory of this process, and not pages of the file."""
        return self._owned.nbytes if self._owned is not None else 0

    def populate(self, offset: int, nbytes: int) -> None:
        """Read pages of the mapping in, so that kernels never wait for the disk. `offset` is a multiple of the page size.

        If they do not stay in the page cache, they are memory of this process, until `drop` of the same range.

        Raises:
            RunError: the file was truncated, the disk fails, or no memory is left.
        """
        mapped = self.mapped
        self.missed = True
        if self._passes(offset):
            self.read_into(self._own().take(self._address + offset, offset, nbytes), offset)
            return
        if os.fstat(self._descriptor).st_size < offset + nbytes:
            raise RunError(f"short read: {self.path} ends before byte {offset + nbytes}; it was changed while in use")
        if not self.stays:
            self.expect(offset, nbytes)  # exactly this range, in large reads
        if self._can_populate:
            if self._libc.madvise(self._address + offset, nbytes, _MADV_POPULATE_READ) == 0:
                return
            code = ctypes.get_errno()
            if code != errno.EINVAL:
                raise RunError(f"reading {nbytes} bytes at {offset} of {self.path} failed: {os.strerror(code)}")
            self._can_populate = False  # a kernel older than 5.14: read ahead, then access every page
        self.expect(offset, nbytes)
        mapped[offset : offset + nbytes : SYSTEM_PAGE].max()

    def _own(self) -> OwnedPages:
        with self._mapping:
            self._owned = self._owned or OwnedPages(self._descriptor)
            return self._owned

    def drop(self, offset: int, nbytes: int) -> None:
        """Drop pages of the mapping. The page cache may keep them, but they are no longer this process's memory.

        Raises:
            RunError: the system refuses.
        """
        if self._owned is not None and self._owned.give_back(self._address + offset, offset):
            return
        if self._libc.madvise(self._address + offset, nbytes, _MADV_DONTNEED) != 0:
            code = ctypes.get_errno()
            raise RunError(f"dropping {nbytes} bytes at {offset} of {self.path} failed: {os.strerror(code)}")
        self._let_pages_go(offset, nbytes)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Keep the size of the file fixed, as far as the system can; `check` reports when it cannot.

        Raises:
            RunError: the file was truncated.
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
        """Raise RunError if the file is about to change, or was truncated."""
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
            fcntl.fcntl(self._descriptor, _F_SETSIG, signal.SIGURG)  # SIGIO, the default, would end the process
            fcntl.fcntl(self._descriptor, _F_SETLEASE, fcntl.F_RDLCK)
        except OSError:
            return False
        return True

    def compare_checksum(self, what: str, value: Checksum, expected: Checksum) -> None:
        """Raise RunError if the checksum of `what` differs from the expected one; the bundle cache then drops the bundle."""
        if value != expected:
            forget(self.path.parent)
            raise RunError(f"{self.path} is damaged: {what} is not what was written; compile the model again")

    def keep(self) -> None:
        """Count one more user of the open file, which will call `close`."""
        with self._keeping:
            self._keepers += 1

    def close(self) -> None:
        """Close the file after the last of its users; the mapping ends with the last object that uses it."""
        with self._keeping:
            self._keepers -= 1
            if self._keepers:
                return
        self._closing = True
        self._mapped = None
        # The announcer first: it must not use a descriptor that another file has reused.
        call_each(None if self._announcer is None else self._announcer.join, self.direct.close, self._file.close)
