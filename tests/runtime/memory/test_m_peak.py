"""M_peak: the streamed bytes that real sessions hold at a time never exceed it, in any transfer mode."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import flashmem
from flashmem.base import resources
from flashmem.base.errors import BudgetError
from flashmem.base.types import TransferMode
from flashmem.planning.memory.layout import lay_out_pools
from flashmem.program.program import fixed_bytes
from flashmem.runtime.opencl.discovery import find_device
from flashmem.schedule.residency import session_bytes
from tests.support.paths import DATA
from tests.support.zoo_data import examples

MODEL = DATA / "vit-tiny.onnx"
MODES: tuple[TransferMode, ...] = ("map", "alias", "dma", "interleave")


def _inputs(bundle: flashmem.Bundle) -> dict[str, NDArray[Any]]:
    generator = np.random.default_rng(7)
    return {port.name: generator.standard_normal(port.shape).astype(port.dtype) for port in bundle.program.inputs}


def _held(bundle: flashmem.Bundle, mode: TransferMode, m_peak: int) -> list[NDArray[Any]]:
    """The answer; checks that two runs stayed within W + M_peak + the fixed bytes."""
    with flashmem.Session(bundle, mode=mode) as session:
        for _ in range(2):
            outputs = session.run(None, _inputs(bundle))
            assert session.last_run is not None
            peak = session.last_run.memory.peak_bytes
            assert peak <= bundle.plan.layouts[mode].resident_bytes + m_peak + fixed_bytes(bundle.program)
    return outputs


@pytest.mark.parametrize("mode", MODES)
@given(m_peak=st.integers(1, 120_000), paper=st.booleans(), chunk=st.sampled_from([None, 4096, 65536]))
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_run_passes_m_peak(
    mode: TransferMode, m_peak: int, paper: bool, chunk: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("m")
    options: dict[str, Any] = {
        "device": "pocl", "memory_path": "buffer", "mode": mode, "chunk": chunk, "objective": "paper" if paper else "first",
        "build": False, "unfusion": False,
    }  # fmt: skip
    try:
        bundle = flashmem.compile(MODEL, folder / "m.flashmem", m_peak=m_peak, **options)
    except BudgetError as refused:
        assert refused.smallest_bytes > m_peak
        m_peak = refused.smallest_bytes
        bundle = flashmem.compile(MODEL, folder / "m.flashmem", m_peak=m_peak, **options)
    whole = flashmem.compile(MODEL, folder / "whole.flashmem", **options)
    with flashmem.Session(whole, mode=mode) as session:
        expected = session.run(None, _inputs(whole))
        again = session.run(None, _inputs(whole))
        assert session.last_run is not None
        # Without limits the planner's own plan keeps everything for later runs, which then read nothing.
        assert paper or not session.last_run.loads
    for got, wanted in zip(again, expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    for got, wanted in zip(_held(bundle, mode, m_peak), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("mode", MODES)
def test_what_a_limit_leaves_over_stays_for_later_runs(mode: TransferMode, tmp_path: Path) -> None:
    options: dict[str, Any] = {"device": "pocl", "memory_path": "buffer", "mode": mode, "build": False, "objective": "steady"}
    bundle = flashmem.compile(MODEL, tmp_path / "m.flashmem", m_peak=80_000, **options)
    most = bundle.plan.layouts[mode].resident_bytes + 80_000 + fixed_bytes(bundle.program)
    kept = {w.name for w in bundle.plan.weights if w.keep}
    assert kept and bundle.plan.objective_kind == "steady"
    with flashmem.Session(bundle, mode=mode) as session:
        answers = []
        for number in range(3):
            answers.append(session.run(None, _inputs(bundle)))
            assert session.last_run is not None and session.last_run.memory.peak_bytes <= most
            read = {span.name for span in session.last_run.loads}
            assert read & kept == (kept if number == 0 else set())
    for other in answers[1:]:
        for got, wanted in zip(other, answers[0], strict=True):
            np.testing.assert_array_equal(got, wanted)


def _apart(folder: Path) -> str:
    """The descriptor of PoCL as a device that shares no memory with its host."""
    text = resources.read_text("devices", "pocl.toml").replace("[modes]", "loader_threads = 3\n\n[modes]")
    text = re.sub(r"(?m)^(capacity_model|counted|tuned) = .*\n", "", text)
    text = re.sub(r"(?m)^buffer = .*$", 'buffer = ["dma", "interleave"]', text)
    (folder / "apart.toml").write_text(text.replace("shares_memory = true", "shares_memory = false"))
    return str(folder / "apart.toml")


@pytest.mark.parametrize("mode", ["dma", "interleave"])
def test_what_loads_pass_through_counts_where_memory_is_not_shared(
    mode: TransferMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned host memory, a part for each of the descriptor's threads."""
    options: dict[str, Any] = {"memory_path": "buffer", "mode": mode, "build": False, "unfusion": False}
    whole = flashmem.compile(MODEL, tmp_path / "whole.flashmem", device="pocl", **options)
    with flashmem.Session(whole, mode=mode) as session:
        expected = session.run(None, _inputs(whole))
    bundle = flashmem.compile(MODEL, tmp_path / "m.flashmem", device=_apart(tmp_path), m_peak=150_000, **options)
    layout = bundle.plan.layouts[mode]
    assert layout.threads == 3 and layout.ring_bytes > 0 and layout.ring_bytes % 3 == 0 and not layout.staging
    assert bool(layout.staging_slots) == (mode == "interleave")
    pocl = find_device("pocl")
    monkeypatch.setattr("flashmem.runtime.request.options.find_device", lambda *_, **__: replace(pocl, unified_memory=False))
    for got, wanted in zip(_held(bundle, mode, 150_000), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    monkeypatch.undo()  # it also runs on a device with shared memory, which has the ring too
    for got, wanted in zip(_held(bundle, mode, 150_000 + layout.ring_bytes), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_slots_keep_to_every_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Including unused space, since slices of different sizes share them in turn; answers equal the resident ones."""
    model, inputs = MODEL.with_name("gptneo-tiny.onnx"), examples("gptneo-tiny")
    device, pocl = _apart(tmp_path), find_device("pocl")
    modes: tuple[TransferMode, ...] = ("interleave", "dma")
    monkeypatch.setattr("flashmem.runtime.request.options.find_device", lambda *_, **__: replace(pocl, unified_memory=False))
    wasted = []
    for mode in modes:
        options: dict[str, Any] = {"device": device, "memory_path": "buffer", "mode": mode, "build": False}
        with pytest.raises(BudgetError) as refused:
            flashmem.compile(model, tmp_path / "none.flashmem", budget=1, **options)
        least = refused.value.smallest_bytes
        for number, budget in enumerate((least, int(1.1 * least), int(1.3 * least))):
            bundle = flashmem.compile(model, tmp_path / f"{mode}{number}.flashmem", budget=budget, **options)
            layout = bundle.plan.layouts[mode]
            assert session_bytes(bundle.program, layout, shares_memory=False) <= budget
            placed = lay_out_pools(bundle.program.slices, replace(bundle.plan, shares_memory=True), modes)[mode]
            wasted.append(layout.home_bytes + layout.all_staging_bytes - placed.home_bytes - placed.all_staging_bytes)
            with flashmem.Session(bundle, mode=mode, strategy="preload") as session:
                expected = session.run(None, inputs)
            with flashmem.Session(bundle, mode=mode, budget=budget) as session:
                for _ in range(2):
                    for got, wanted in zip(session.run(None, inputs), expected, strict=True):
                        np.testing.assert_array_equal(got, wanted)
                    assert session.last_run is not None and session.last_run.memory.peak_bytes <= budget
    assert max(wasted) > 0
