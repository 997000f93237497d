"""The arena of a session in host memory, and output arrays that reuse its pages without a copy.

The pages of an output are moved out of the arena into a separate mapping (mremap). The arena gets new, empty pages for the next
run. So an output counts once, and memory does not grow when it is returned. If the system cannot move pages, they are copied
piece by piece, and each piece is dropped from the arena after its copy.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flashmem.base.pages import page_size, whole_pages

Bytes = NDArray[np.uint8]
Place = tuple[int, int]
"""Offset and bytes."""

_MOVE = 1 | 2 | 4
"""MREMAP_MAYMOVE, MREMAP_FIXED, MREMAP_DONTUNMAP (Linux 5.7)."""

_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # the second one since Linux 5.14
_LARGE = 2 << 20
_POPULATED = 4 << 20  # bytes, half a millisecond
_PIECE_BYTES = 1 << 20


def new_pages(nbytes: int) -> Bytes:
    """Zeroed memory on its own pages. The system allocates them at the first touch and frees them with the last array on
    them.
    """
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return np.frombuffer(mmap.mmap(-1, whole_pages(nbytes), **private), np.uint8)


def large_pages(nbytes: int) -> Bytes:
    """Memory as of `new_pages`, all of it allocated now, in large pages where the system has them: that takes a third of the
    time, and while it lasts other threads run. Elsewhere each page is allocated at its first touch.
    """
    whole = new_pages(nbytes + _LARGE)
    memory = whole[-whole.ctypes.data % _LARGE :][:nbytes]
    libc = ctypes.CDLL(None)
    size = whole_pages(nbytes)
    libc.madvise(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(size), ctypes.c_int(_MADV_HUGEPAGE))
    for first in range(0, size, _POPULATED):  # no other thread can map memory, nor start one, during a call
        part = min(_POPULATED, size - first)
        libc.madvise(ctypes.c_void_p(memory.ctypes.data + first), ctypes.c_size_t(part), ctypes.c_int(_MADV_POPULATE_WRITE))
    return memory


def move_out(arena: Bytes, places: Sequence[Place]) -> list[Bytes]:
    """Move the bytes at `places` out of an `arena` from `new_pages`; writable arrays that are independent of it.

    The content of the arena on those pages is undefined afterwards.
    """
    taken: list[Bytes] = []
    blocks = {block: _move(arena, block) for block in _blocks(places)}
    for offset, nbytes in places:
        start = next(first for first, length in blocks if first <= offset and offset + nbytes <= first + length)
        block = next(moved for (first, _), moved in blocks.items() if first == start)
        taken.append(block[offset - start : offset - start + nbytes])
    return taken


def _blocks(places: Sequence[Place]) -> list[Place]:
    """The pages of `places`; places that share a page are joined."""
    blocks: list[Place] = []
    for offset, nbytes in sorted(places):
        first = offset // page_size() * page_size()
        end = whole_pages(offset + nbytes)
        if blocks and first < sum(blocks[-1]):
            start, length = blocks.pop()
            first = start
            end = max(end, start + length)
        blocks.append((first, end - first))
    return blocks


def _move(arena: Bytes, block: Place) -> Bytes:
    first, nbytes = block
    target = new_pages(nbytes)
    libc = ctypes.CDLL(None, use_errno=True)
    source = arena.ctypes.data + first
    if hasattr(libc, "mremap"):
        size = ctypes.c_size_t(nbytes)
        libc.mremap.restype = ctypes.c_void_p
        moved = libc.mremap(ctypes.c_void_p(source), size, size, ctypes.c_int(_MOVE), ctypes.c_void_p(target.ctypes.data))
        if moved == target.ctypes.data:
            return target
    for at in range(0, nbytes, _PIECE_BYTES):
        piece = min(_PIECE_BYTES, nbytes - at)
        source_bytes = arena[first + at : first + at + piece]  # the arena can end inside its last page
        target[at : at + source_bytes.nbytes] = source_bytes
        libc.madvise(ctypes.c_void_p(source + at), ctypes.c_size_t(piece), ctypes.c_int(_MADV_DONTNEED))
    return target
