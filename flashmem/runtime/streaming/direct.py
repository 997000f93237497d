"""Reads that bypass the page cache (O_DIRECT): the disk writes into the reader's memory, and no page of the file stays behind.

For a file that memory cannot hold. Its pages in the page cache serve no later read, and each costs processor time and memory.
docs/research/generation.md has both ways, measured.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

UNIT = 4096
"""Places in the file and in memory, and sizes, are multiples of this: that suffices for the blocks of all usual disks."""

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)  # Linux

_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
"""What a file system without such reads answers, at the opening or at the first read."""


class DirectReader:
    """A second descriptor of an open file, for reads that bypass the page cache. Any thread may read.

    `refused`: why there are no such reads; empty as long as there are. `nbytes`: bytes read so far.
    """

    def __init__(self, descriptor: int) -> None:
        """Open the file of `descriptor` once more. A refusal is noted, not raised."""
        self.refused = ""
        self.nbytes = 0
        self.descriptor = -1
        self._counting = threading.Lock()
        self._last = threading.local()  # `page` of each thread, for what is left of the last unit
        if not _O_DIRECT:
            self.refused = "this system has none"
            return
        try:
            self.descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | _O_DIRECT)
        except OSError as error:
            self.refused = error.strerror or str(error)

    def takes(self, data: Bytes, offset: int) -> bool:
        """Whether bytes from `offset` on can be read straight into `data`."""
        return not self.refused and not offset % UNIT and not data.ctypes.data % UNIT

    def read_into(self, data: Bytes, offset: int) -> int:
        """Fill `data` with the bytes at `offset`; returns how many were read: fewer at the end of the file or after a refusal.

        Raises:
            OSError: the disk fails.
        """
        whole = data.nbytes // UNIT * UNIT
        done = self._fill(data.data[:whole], offset)
        rest = data.nbytes - whole
        if done == whole and rest:
            page = self._page()
            got = min(rest, self._fill(memoryview(page), offset + whole))
            data.data[whole : whole + got] = page[:got]
            done += got
        self.count(done)
        return done

    def count(self, nbytes: int) -> None:
        """Count bytes that were read from `descriptor`."""
        with self._counting:
            self.nbytes += nbytes

    def _fill(self, view: memoryview, offset: int) -> int:
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self.descriptor, [view[done:]], offset + done)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                self.refused = error.strerror or str(error)
                return done
            done += got
            if got % UNIT or not got:  # the end of the file
                return done
        return done

    def _page(self) -> mmap.mmap:
        """A page of the calling thread."""
        page: mmap.mmap | None = getattr(self._last, "page", None)
        if page is None:
            page = self._last.page = mmap.mmap(-1, UNIT)
        return page

    def close(self) -> None:
        """Close the descriptor. No thread may be reading."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
