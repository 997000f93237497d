"""The size of a memory page: 4 KiB on most desktops, 16 KiB on phones of Android 15 and newer, 64 KiB on some arm64 systems.

Whoever maps, brings in, drops or moves pages asks `page_size`, and nobody else knows it.
"""

from __future__ import annotations

import mmap
import os

from flashmem.base.errors import UserError

SYSTEM_PAGE = mmap.PAGESIZE
"""Bytes of the pages that this system has."""

VARIABLE = "FLASHMEM_PAGE_SIZE"
"""Environment variable with a larger size to work in, to rehearse such a system: any multiple of its pages will do."""


def page_size() -> int:
    """Bytes of the pages to work in: this system's, or larger ones that a rehearsal asks for.

    Raises:
        UserError: `VARIABLE` is not a power of two, or less than a page.
    """
    asked = os.environ.get(VARIABLE)
    if not asked:
        return SYSTEM_PAGE
    if not asked.isdecimal() or not is_page_size(int(asked)) or int(asked) < SYSTEM_PAGE:
        raise UserError(f"{VARIABLE} is {asked!r}; name a power of two from {SYSTEM_PAGE} to {LARGEST_PAGE}, or unset it")
    return int(asked)


LARGEST_PAGE = 1 << 16
"""Bytes of the largest pages there are where flashmem runs."""


def is_page_size(nbytes: int) -> bool:
    """Whether some system has pages of `nbytes` bytes, or could."""
    return 4096 <= nbytes <= LARGEST_PAGE and nbytes & (nbytes - 1) == 0


def whole_pages(nbytes: int) -> int:
    """`nbytes` rounded up to pages."""
    page = page_size()
    return -(-nbytes // page) * page
