"""Host memory that kernels use where it is, as the arena of a session, and the arrays that leave it.

An output is handed back without a copy: its pages move out of the arena into a mapping of their own (mremap), and the arena has
new, empty pages in their place for the next run. So an output counts once, and memory does not grow as it is handed back.
Where the system cannot move pages they are copied a piece at a time, and each piece is dropped from the arena behind the copy.
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
_PIECE_BYTES = 1 << 20


def new_pages(nbytes: int) -> Bytes:
    """Zeros on pages of their own, which the system gives as they are touched and takes back with the last array on them."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return np.frombuffer(mmap.mmap(-1, whole_pages(nbytes), **private), np.uint8)


def move_out(arena: Bytes, places: Sequence[Place]) -> list[Bytes]:
    """The bytes at `places` of `arena`, which `new_pages` gave, as writable arrays that it has no part in any more.

    The arena holds nothing that is defined on their pages afterwards.
    """
    taken: list[Bytes] = []
    blocks = {block: _moved(arena, block) for block in _blocks(places)}
    for offset, nbytes in places:
        start = next(first for first, length in blocks if first <= offset and offset + nbytes <= first + length)
        block = next(moved for (first, _), moved in blocks.items() if first == start)
        taken.append(block[offset - start : offset - start + nbytes])
    return taken


def _blocks(places: Sequence[Place]) -> list[Place]:
    """The pages of `places`, those that share one together."""
    blocks: list[Place] = []
    for offset, nbytes in sorted(places):
        first = offset // page_size() * page_size()
        end = whole_pages(offset + nbytes)
        if blocks and first < sum(blocks[-1]):
            start, length = blocks.pop()
            first, end = start, max(end, start + length)
        blocks.append((first, end - first))
    return blocks


def _moved(arena: Bytes, block: Place) -> Bytes:
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
        source_bytes = arena[first + at : first + at + piece]  # the arena may end before its last page
        target[at : at + source_bytes.nbytes] = source_bytes
        libc.madvise(ctypes.c_void_p(source + at), ctypes.c_size_t(piece), ctypes.c_int(_MADV_DONTNEED))
    return target
