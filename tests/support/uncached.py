"""Files that the page cache does not have, and what it has of a file."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashmem.runtime.streaming.direct import UNIT


def write_uncached(path: Path, content: NDArray[np.uint8]) -> Path:
    """Write a file that the page cache does not have afterwards; returns `path`."""
    with path.open("wb") as file:
        file.write(content.tobytes())
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def cached_pages(path: Path) -> int:
    """The pages of a file in the page cache (mincore)."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        pages = (ctypes.c_ubyte * -(-len(mapped) // UNIT))()
        address = ctypes.c_void_p(np.frombuffer(mapped, np.uint8).ctypes.data)
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(mapped)), pages) == 0
    return sum(page & 1 for page in pages)
