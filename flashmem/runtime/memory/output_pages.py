"""Pinned host memory for large outputs, on a device with memory of its own.

A copy to fresh pages of the process takes a driver six times as long as one to pinned pages (25.7 MB on an H200: 2.9 and 0.5
ms), and pinning takes longer still. So arrays that a caller has dropped lend their pages to later runs.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.apart import Apart
from flashmem.base.errors import RunError
from flashmem.program.program import LARGE_OUTPUT
from flashmem.runtime.memory.arena import Bytes, large_pages
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.handles import Buffer

MOST = 2
"""Arrays of one output at a time: the caller may hold that of one run during the next one."""


class OutputPages:
    """The pages of the outputs of one program. Arrays stay valid when it is closed."""

    def __init__(self, ledger: Ledger, sizes: Mapping[str, int]) -> None:
        """Begin to allocate the pages for one array of each large output, in a thread: 26 MB take 4 ms.

        `ledger` counts host memory, and has reserved these arrays. `sizes`: bytes of each output's array, by its name.
        """
        self._ledger = ledger
        self._allocating = {
            name: Apart("flashmem-outputs", large_pages, nbytes) for name, nbytes in sizes.items() if nbytes >= LARGE_OUTPUT
        }
        self._free: dict[str, list[Bytes]] = {}  # by output; any thread may return some
        self._made: dict[str, int] = {}
        self._handles: list[Buffer] = []
        self.replaced = 0  # bytes of these arrays whose reservation pages have replaced

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
        """An array for the output `name`, with any content; None if it is small, or memory for it is not to be had."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < LARGE_OUTPUT:
            return None
        self._made.setdefault(name, 0)
        free = self._free.setdefault(name, [])
        pages = free.pop() if free else self._new(name, nbytes)
        if pages is None:
            return None
        lent: Any = (ctypes.c_ubyte * nbytes).from_address(pages.ctypes.data)
        weakref.finalize(lent, free.append, pages).atexit = False  # arrays over it hold it
        return np.frombuffer(lent, dtype).reshape(shape)

    def _new(self, name: str, nbytes: int) -> Bytes | None:
        if self._made[name] >= MOST:
            return None
        begun = self._allocating.pop(name, None)
        first = not self._made[name]
        pages = large_pages(nbytes) if begun is None else begun.result()
        if first:
            self._ledger.release("outputs", nbytes)
        try:
            self._handles.append(self._ledger.wrapped("outputs", pages, "pages of an output"))
        except RunError:  # beyond the host budget, or the device's limit: arrays of the process serve as well
            self._made[name] = MOST
            if first:
                self._ledger.reserve("outputs", nbytes, "the array of an output")
            return None
        self.replaced += nbytes * first
        self._made[name] += 1
        return pages

    def close(self) -> None:
        """Pin no pages any longer. No copy may be under way."""
        self._ledger.free(self._handles)
        self._allocating.clear()
        self._handles = []
        self._free = {}
        self._made = {}
        self.replaced = 0
