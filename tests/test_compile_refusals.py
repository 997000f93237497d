"""A budget that nothing fits is refused without work that cannot change the answer: counted, not timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from flashmem.base.errors import BudgetError
from flashmem.compiler.adaptive import tiling as adaptive_tiling
from flashmem.compiler.adaptive.plan_graph import plan_graph
from flashmem.compiler.options import Options
from flashmem.compiler.stages.pipeline import Pipeline
from flashmem.compiler.stages.reading import read_graph
from flashmem.compiler.tiling.choice import PatchChoice
from flashmem.planning import budget
from flashmem.planning.latency import bounds
from flashmem.planning.latency import first_answer as latency
from flashmem.request.request import BundleRequest
from flashmem.target.descriptor import load_descriptor


def chain_of_convolutions(path: Path) -> Path:
    """Four convolutions whose results are larger than their weights: chains of them in patches need less."""
    rng, channels = np.random.default_rng(0), (4, 32, 32, 32, 4)
    names = [f"x{n}" for n in range(5)]
    shapes = [(after, before, 3, 3) for before, after in pairwise(channels)]
    weights = [numpy_helper.from_array(rng.standard_normal(shape, np.float32), f"w{n}") for n, shape in enumerate(shapes)]
    nodes = [helper.make_node("Conv", [names[n], f"w{n}"], [names[n + 1]], f"conv{n}", pads=[1, 1, 1, 1]) for n in range(4)]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 4, 32, 32)) for name in (names[0], names[-1])]
    onnx.save(helper.make_model(helper.make_graph(nodes, "chain", ports[:1], ports[1:], weights)), path)
    return path


def test_a_refusal_makes_nothing_twice_and_proves_nothing_of_what_it_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each program, with patches and without, is planned once; strategies that fill a budget report their minimum."""
    counted: Counter[str] = Counter()
    patches: Counter[tuple[int, int, int]] = Counter()

    def count(owner: Any, name: str) -> None:
        made: Callable[..., Any] = getattr(owner, name)

        def counting(*args: Any, **named: Any) -> Any:
            counted[name] += 1
            return made(*args, **named)

        monkeypatch.setattr(owner, name, counting)

    def largest_patch(self: PatchChoice, chain: Any, output: Any, places: int) -> Any:
        patches[chain.first, chain.last, chain.starts[1]] += 1
        return found_largest(self, chain, output, places)

    found_largest = PatchChoice._largest_patch
    monkeypatch.setattr(PatchChoice, "_largest_patch", largest_patch)
    monkeypatch.setattr(adaptive_tiling, "LEAST_PATCH_BYTES", {"cpu": 1})
    count(Pipeline, "attempt")
    count(budget, "first_plan")
    monkeypatch.setattr(latency, "fastest_seconds", bounds.fastest_seconds)
    count(latency, "fastest_seconds")
    options = Options(load_descriptor("generic-cpu"), "map", BundleRequest(budget=1000))
    graph = read_graph(chain_of_convolutions(tmp_path / "chain.onnx"), options)
    with pytest.raises(BudgetError) as refusal:
        plan_graph(graph, options)
    assert refusal.value.smallest_bytes < (refusal.value.without_patches or 0)
    assert counted["attempt"] > 2 and counted["first_plan"] == counted["attempt"]
    assert counted["fastest_seconds"] <= 2 * counted["first_plan"]
    assert patches and set(patches.values()) == {1}
