"""Random graphs compared with ONNX Runtime; `python -m tests.conformance.random_graphs` draws more."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from flashmem.runtime.opencl.discovery import list_devices
from tests.conformance.random_graphs import values
from tests.conformance.random_graphs.graph import draw
from tests.conformance.random_graphs.judge import Precision, judge
from tests.conformance.random_graphs.listed import listed

DEVICES = [device.descriptor_name for device in list_devices()]
PLACES: list[tuple[str, str, Precision]] = [(device, path, "fp32") for device in DEVICES for path in ("buffer", "texture")]
QUICK = "intel-cpu" if "intel-cpu" in DEVICES else DEVICES[0]
COUNTS = {"pocl": 10}
"""Building programs on PoCL takes most of the time, so it gets fewer graphs."""


@pytest.mark.parametrize(("device", "path", "precision"), [*PLACES, (QUICK, "buffer", "fp16")])
def test_random_graphs(device: str, path: str, precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: Counter[str] = Counter()
    count = int(os.environ.get("FLASHMEM_RANDOM_GRAPHS", 15 if precision == "fp16" else COUNTS.get(device, 30)))
    monkeypatch.setattr(values, "_rounding", values._rounding)
    values.set_precision(precision)

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(seed=st.integers(0, 2**32), nodes=st.integers(5, 20))
    def agree(seed: int, nodes: int) -> None:
        verdict = judge(draw(random.Random(seed), nodes, listed), device, path, precision)
        kinds[verdict.kind] += 1
        assert verdict.kind in ("agreed", "refused"), f"{verdict.culprit}: {verdict.reasons}"

    agree()
    assert kinds["agreed"] > 3 * kinds["refused"], kinds
