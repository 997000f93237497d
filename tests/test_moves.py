"""Moves that are never made: graphs before and after the passes that drop them, by numpy; and whole models on every device."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from evaluate_graph import evaluate

from flashmem.graph.hoisting import hoist_moves
from flashmem.graph.ir import Graph
from flashmem.graph.layout import assign_layouts
from flashmem.graph.moves import drop_moves
from flashmem.graph.normalize import normalize
from flashmem.graph.onnx_import import import_model
from flashmem.graph.operators import why_unsupported
from flashmem.graph.parts import split_products

from random_graphs.graph import draw
from random_graphs.patterns import packed, turned, windows

PATTERNS = {
    "packed": (packed, "MatMul"),
    "windows": (windows, "LayerNormalization"),
    "turned": (turned, "Neg"),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_pass_changes_what_a_graph_computes(pattern: str, tmp_path: Path) -> None:
    how, op = PATTERNS[pattern]
    moved = []
    for seed in range(60):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            drawn = draw(random.Random(seed), 12, pool=[(1.0, how, (op,))])
        if any(value.own.dtype not in (np.float32, np.float64, np.int64) for value in drawn.values.values()):
            continue
        onnx.save(drawn.model, tmp_path / "graph.onnx")
        feeds = drawn.feeds
        graph = assign_layouts(normalize(import_model(tmp_path / "graph.onnx", {}, why_unsupported)))
        wanted, before = evaluate(graph, feeds), cost(graph)
        for apply in (hoist_moves, drop_moves, split_products):
            graph = apply(graph)
            for answer, expected in zip(evaluate(graph, feeds), wanted, strict=True):
                largest = np.nanmax(np.abs(expected), initial=1e-30)
                np.testing.assert_allclose(answer, expected, rtol=1e-9, atol=1e-9 * largest, err_msg=f"{seed} {apply}")
        moved.append((before, cost(graph)))
    assert len(moved) > 20
    assert sum(after for _, after in moved) < 0.8 * sum(before for before, _ in moved)


def cost(graph: Graph) -> int:
    """Elements that Transposes and Slices move."""
    return sum(node.outputs[0].size for node in graph.nodes if node.op in ("Transpose", "Slice"))
