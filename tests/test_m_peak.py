"""M_peak is a limit: what real sessions hold beside W and what is fixed never passes it, in any transfer mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import flashmem
from flashmem.device import TransferMode
from flashmem.errors import BudgetError
from flashmem.program import fixed_bytes

MODEL = Path(__file__).parent / "data" / "vit-tiny.onnx"
MODES: tuple[TransferMode, ...] = ("map", "alias", "dma", "interleave")


def _inputs(bundle: flashmem.Bundle) -> dict[str, NDArray[Any]]:
    generator = np.random.default_rng(7)
    return {port.name: generator.standard_normal(port.shape).astype(port.dtype) for port in bundle.program.inputs}


def _held(bundle: flashmem.Bundle, mode: TransferMode, m_peak: int) -> list[NDArray[Any]]:
    """The answer, after two runs that kept to W + M_peak + what is fixed."""
    with flashmem.Session(bundle, mode=mode) as session:
        for _ in range(2):
            outputs = session.run(None, _inputs(bundle))
            assert session.last_run is not None
            peak = session.last_run.memory.peak_bytes
            assert peak <= bundle.plan.layouts[mode].resident_bytes + m_peak + fixed_bytes(bundle.program)
    return outputs


@pytest.mark.parametrize("mode", MODES)
@given(m_peak=st.integers(1, 600_000), paper=st.booleans(), chunk=st.sampled_from([None, 4096, 65536]))
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
    for got, wanted in zip(_held(bundle, mode, m_peak), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
