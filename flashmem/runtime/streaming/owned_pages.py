"""Memory of this process in place of pages of a mapped file, at the same addresses.

For a file that memory cannot hold. Its pages belong to the page cache, from which Linux takes them under a limit on memory,
also those of weights that are to stay. It cannot take memory of the process, unless there is swap space. A kernel of the device
that reads the mapping sees no difference.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import RunError
from flashmem.base.pages import SYSTEM_PAGE

Bytes = NDArray[np.uint8]

_MAP_FIXED = 0x10
"""Replace what is mapped at the address; the value that Linux has on all its common processors."""

_MAP_FAILED = ctypes.c_void_p(-1).value


class OwnedPages:
    """The ranges of one mapping that are memory of this process. Calls for different ranges may overlap in time."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: of the mapped file."""
        self._descriptor = descriptor
        self._ranges: dict[int, int] = {}  # bytes, by the offset in the file
        self._mmap = ctypes.CDLL(None, use_errno=True).mmap
        self._mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
        self._mmap.restype = ctypes.c_void_p

    @property
    def nbytes(self) -> int:
        """Bytes of all ranges."""
        return sum([*self._ranges.values()])

    def take(self, address: int, offset: int, nbytes: int) -> Bytes:
        """Replace the pages of the file from `offset` on, which are mapped at `address`, by memory of zeros, and return it.

        Raises:
            RunError: the system has no memory left.
        """
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, private, -1, 0)
        self._ranges[offset] = nbytes
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    def give_back(self, address: int, offset: int) -> bool:
        """Free the range that `take` made at `offset`, and map the file there again; whether there is one. Raises RunError."""
        nbytes = self._ranges.pop(offset, None)
        if nbytes is None:
            return False
        self._map(address, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, self._descriptor, offset)
        return True

    def _map(self, address: int, nbytes: int, access: int, kind: int, descriptor: int, offset: int) -> None:
        whole = -(-nbytes // SYSTEM_PAGE) * SYSTEM_PAGE
        if self._mmap(address, whole, access, kind | _MAP_FIXED, descriptor, offset) == _MAP_FAILED:
            raise RunError(f"{nbytes} bytes of memory for weights were refused: {os.strerror(ctypes.get_errno())}")
