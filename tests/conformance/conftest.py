"""How tests of conformance build kernels."""

from __future__ import annotations

import pytest

from tests.support.caches import kernels_built_by_runs


@pytest.fixture(autouse=True)
def _kernels_built_by_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_built_by_runs(monkeypatch)
