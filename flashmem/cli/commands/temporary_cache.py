"""Temporary cache for commands whose result is not the compiled model itself."""

from __future__ import annotations

import os

from flashmem.base.paths import VARIABLE, cache_folder, folder_until_exit, why_unusable
from flashmem.base.streams import say


def have_cache() -> None:
    """If the user's cache cannot be written, use a temporary one until this process ends, and print a line about it.

    Child processes use the same one.

    Raises:
        UserError: no temporary folder can be written either.
    """
    folder = cache_folder("bundles")
    reason = why_unusable(folder)
    if reason is not None:
        os.environ[VARIABLE] = str(folder_until_exit("flashmem-cache-"))
        say(f"{folder.parent} {reason}, so nothing is kept after this command; set {VARIABLE} to a folder that can")
