"""Where flashmem keeps files between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """The user's cache for `kind` of file: FLASHMEM_CACHE_DIR, else XDG_CACHE_HOME/flashmem, else ~/.cache/flashmem.

    The folder need not exist; whoever writes creates it.
    """
    explicit = os.environ.get("FLASHMEM_CACHE_DIR")
    if explicit:
        return Path(explicit) / kind
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "flashmem" / kind
