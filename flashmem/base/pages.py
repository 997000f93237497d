"""The size of a memory page: 4 KiB on most desktops, 16 KiB on phones from Android 15 on, 64 KiB on some arm64 systems.

All code that maps, reads, drops or moves pages uses `page_size`.
"""

from __future__ import annotations

import mmap
import os

from flashmem.base.errors import UserError

SYSTEM_PAGE = mmap.PAGESIZE
"""Bytes of a page of this system."""

VARIABLE = "FLASHMEM_PAGE_SIZE"
"""Environment variable with a larger page size, to rehearse another system: any multiple of this system's page size."""


def page_size() -> int:
    """The page size to use in bytes: the system's, or the larger one in `VARIABLE`.

    Raises:
        UserError: `VARIABLE` is not a power of two, or smaller than a page.
    """
    asked = os.environ.get(VARIABLE)
    if not asked:
        return SYSTEM_PAGE
    if not asked.isdecimal() or not is_page_size(int(asked)) or int(asked) < SYSTEM_PAGE:
        raise UserError(f"{VARIABLE} is {asked!r}; name a power of two from {SYSTEM_PAGE} to {LARGEST_PAGE}, or unset it")
    return int(asked)


LARGEST_PAGE = 1 << 16
"""Bytes of the largest page of any system that flashmem supports."""


def is_page_size(nbytes: int) -> bool:
    """Whether `nbytes` is a page size of some supported system."""
    return 4096 <= nbytes <= LARGEST_PAGE and nbytes & (nbytes - 1) == 0


def whole_pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    page = page_size()
    return -(-nbytes // page) * page
