"""Runs in the background."""

from __future__ import annotations

import pytest

from flashmem.base.errors import RunError
from flashmem.runtime.engine.futures import BackgroundRuns
from tests.support.refused_threads import refuse_threads


def test_a_thread_that_cannot_start_fails_its_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch, "flashmem-async")
    runs = BackgroundRuns[str]()
    with pytest.raises(RunError, match="the thread flashmem-async could not be started"):
        runs.submit(lambda cancelled: "the first")
    assert runs.submit(lambda cancelled: "the second").result(20) == "the second"
