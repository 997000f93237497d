"""The weight file of a bundle: read by `pread`, or mapped and brought in and dropped page by page.

All calls that touch the disk release the GIL.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashmem.errors import BundleError, RunError

Bytes = NDArray[np.uint8]

_MADV_DONTNEED = 4
_MADV_POPULATE_READ = 22  # Linux 5.14
_TOUCH_STRIDE = mmap.PAGESIZE


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
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise BundleError(f"{path} cannot be opened ({error.strerror}); compile the model again") from error
        self._descriptor = self._file.fileno()
        if os.fstat(self._descriptor).st_size != nbytes:
            self._file.close()
            raise BundleError(f"{path} is not {nbytes} bytes long as its bundle says; compile the model again")
        self._mapped: Bytes | None = None
        self._address = 0
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._can_populate = True
        self._announcer: threading.Thread | None = None
        self._closing = False

    def read_into(self, data: Bytes, offset: int) -> None:
        """Fill `data` with the bytes at `offset`.

        Raises:
            RunError: the file is shorter than that by now, or the disk fails.
        """
        view = data.data
        while len(view):
            try:
                got = os.preadv(self._descriptor, [view], offset)
            except OSError as error:
                raise RunError(f"reading {len(view)} bytes at {offset} of {self.path} failed: {error.strerror}") from error
            if got == 0:
                raise RunError(f"short read: {self.path} ends before byte {offset + len(view)}; it was changed while in use")
            view = view[got:]
            offset += got

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
        mapped = self.mapped
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
        mapped[offset : offset + nbytes : _TOUCH_STRIDE].max()

    def drop(self, offset: int, nbytes: int) -> None:
        """Let pages of the mapping go; the page cache may keep them, but they are no longer this process's memory."""
        if self._libc.madvise(self._address + offset, nbytes, _MADV_DONTNEED) != 0:
            code = ctypes.get_errno()
            raise RunError(f"dropping {nbytes} bytes at {offset} of {self.path} failed: {os.strerror(code)}")

    def cached_bytes(self) -> int | None:
        """Bytes of the file in the page cache, whoever put them there; None where the system does not say."""
        pages = -(-self.nbytes // mmap.PAGESIZE)
        resident = np.zeros(pages, np.uint8)
        self._libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        if not pages or self._libc.mincore(self.mapped.ctypes.data, self.nbytes, resident.ctypes.data) != 0:
            return None
        return int((resident & 1).sum()) * mmap.PAGESIZE

    def close(self) -> None:
        """Close the file; the mapping goes with the last object that uses it."""
        self._closing = True
        if self._announcer is not None:
            self._announcer.join()  # it must not meet another file under the same descriptor
        self._mapped = None
        self._file.close()
