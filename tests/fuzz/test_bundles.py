"""Fuzzing of 200 changed bundles: each ends in one sentence or in an answer; a damaged one only in the right answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.fuzz import bundles as fuzz_bundles
from tests.support.mini_bundle import write_mini_bundle


def test_changed_bundles_end_in_a_sentence_or_an_answer(tmp_path: Path) -> None:
    result = fuzz_bundles.fuzz(fuzz_bundles.make_bases(tmp_path, compiled=False), 200, 8, tmp_path)
    assert result.findings == []
    assert sum(result.counts.values()) == 200
    assert result.counts["damaged", "sentence"] > 50 and result.counts["rewritten", "sentence"] > 40
    assert result.counts["damaged", "right"] > 0 and result.counts["rewritten", "right"] > 0
    assert result.peak_bytes < 2 << 30


@pytest.mark.parametrize(("patience", "how"), [(0.0, "hang"), (10.0, "crash")])
def test_a_worker_that_hangs_or_ends_is_seen(
    patience: float, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_mini_bundle(tmp_path / "m.flashmem")
    np.savez(tmp_path / "inputs.npz", **model.inputs())
    job = fuzz_bundles.Job(str(model.path), str(tmp_path / "inputs.npz"), str(tmp_path / "none.npz"), 0, "map")
    worker = fuzz_bundles.Worker()
    assert worker.run(job).kind == "traceback"  # the file of answers is missing
    assert worker._process is not None
    if how == "crash":
        worker._process.kill()
        worker._process.wait()
    assert worker.run(job, patience).kind == how
    assert worker.run(job).kind == "traceback"
    worker.close()
