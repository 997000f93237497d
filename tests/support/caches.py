"""Cache folders for tests."""

from __future__ import annotations

from pathlib import Path

import pytest

import flashmem
from flashmem.base.paths import VARIABLE, cache_folder, make_private
from flashmem.runtime.kernels.cache import CachedKernels
from flashmem.runtime.serving.runtime import Runtime
from flashmem.runtime.session import Session


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


_save = CachedKernels.save


def kernels_built_by_runs(monkeypatch: pytest.MonkeyPatch, *, saved: bool = True) -> None:
    """Build kernels where they first run: `compile` and sessions start no processes for it, and PoCL's kernels are not saved.

    A process takes a second. To save a kernel, PoCL compiles it once more, for groups of any size; it has a cache of its own.
    `saved`: other drivers' kernels are.
    """

    def save_cheap_ones(kernels: CachedKernels) -> None:
        if not saved or kernels._context.device.compiles_at_launch:
            kernels.wait()
        else:
            _save(kernels)

    _set_defaults(monkeypatch, apart=False)
    monkeypatch.setattr(CachedKernels, "save", save_cheap_ones)


def kernels_built_as_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo `kernels_built_by_runs`."""
    _set_defaults(monkeypatch, apart=True)
    monkeypatch.setattr(CachedKernels, "save", _save)


def _set_defaults(monkeypatch: pytest.MonkeyPatch, *, apart: bool) -> None:
    for function, name in ((flashmem.compile, "build"), (Session.__init__, "build_apart"), (Runtime.__init__, "build_apart")):
        defaults = function.__kwdefaults__
        assert defaults is not None
        monkeypatch.setitem(defaults, name, apart)
