"""Cache folders for tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashmem.base.paths import VARIABLE, cache_folder, make_private


def empty_bundle_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make `folder` the user's cache: without bundles, and with the compiled kernels of the whole test run.

    Building the kernels of a tiny model takes seconds in each test. Tests that empty the cache, or count builds, need their own
    cache.
    """
    kernels = cache_folder("programs")
    make_private(kernels)
    folder.mkdir(mode=0o700)
    (folder / "programs").symlink_to(kernels)
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder
