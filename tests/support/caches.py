"""Cache folders for tests."""

from __future__ import annotations

from pathlib import Path

import pytest

import flashmem
from flashmem.base.paths import VARIABLE, cache_folder, make_private
from flashmem.runtime.kernels.cache import CachedKernels


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


def kernels_built_by_runs(monkeypatch: pytest.MonkeyPatch, *, saved: bool = True) -> None:
    """Kernels are built where they first run: `compile` starts no processes that build them, and PoCL's are not saved.

    For tests of answers. To save a kernel, PoCL compiles it once more, for groups of any size; it has a cache of its own.
    `saved`: other drivers' kernels are.
    """
    defaults = flashmem.compile.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "build", False)
    save = CachedKernels.save

    def save_cheap_ones(kernels: CachedKernels) -> None:
        if not saved or kernels._context.device.compiles_at_launch:
            kernels.wait()
        else:
            save(kernels)

    monkeypatch.setattr(CachedKernels, "save", save_cheap_ones)
