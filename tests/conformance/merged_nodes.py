"""Node tests of the onnx package merged into models of many, because most of their time is that of building programs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx.compose
from numpy.typing import NDArray
from onnx import numpy_helper

import flashmem.tools.onnx_backend as backend
from tests.conformance.onnx_nodes import PASSES, cases, check, outcome, read_constants, read_list

BATCH = 16
CONSTANTS = read_constants()


def batches() -> list[list[str]]:
    """The tests that pass by the checked-in list, a model's worth each."""
    passing = [name for _, name in read_list()[PASSES]]
    return [passing[first : first + BATCH] for first in range(0, len(passing), BATCH)]


def check_batch(names: Sequence[str], device: str, path: str) -> None:
    """Run the tests `names` on a device: as one model for each operator set, but some alone (see `_is_alone`).

    Raises:
        AssertionError: an answer is wrong.
    """
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for name in (name for name in names if name in cases()):
        sets = sorted((entry.domain, entry.version) for entry in cases()[name].model.opset_import)
        alike[f"{name} alone" if _is_alone(cases()[name]) else f"{sets}"].append(name)
    for each in alike.values():
        if _is_alone(cases()[each[0]]):
            assert outcome(cases()[each[0]], device, path) == (PASSES, CONSTANTS[each[0]])
        else:
            _check_merged(each, device, path)


def _is_alone(case: Any) -> bool:
    """Whether a test cannot be merged: onnx's own merging does not rename values inside branches, and has one set of data."""
    return _has_subgraph(case.model) or len(case.data_sets) != 1


def _has_subgraph(model: onnx.ModelProto) -> bool:
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    return any(attribute.HasField("g") or attribute.graphs for node in nodes for attribute in node.attribute)


def _check_merged(names: Sequence[str], device: str, path: str) -> None:
    """Run the tests `names` as one model, with the inputs that must be constants."""
    merged = onnx.ModelProto()
    feeds: dict[str, NDArray[Any]] = {}
    for number, name in enumerate(names):
        model = onnx.ModelProto()
        model.CopyFrom(cases()[name].model)
        graph, prefix = model.graph, f"test{number}_"
        arrays = dict(zip([value.name for value in graph.input], cases()[name].data_sets[0][0], strict=True))
        for fixed in CONSTANTS[name]:
            graph.initializer.append(numpy_helper.from_array(np.asarray(arrays.pop(fixed)), fixed))
            graph.input.remove(next(value for value in graph.input if value.name == fixed))
        feeds |= {prefix + key: array for key, array in arrays.items()}
        model = onnx.compose.add_prefix(model, prefix)
        if number == 0:
            merged.CopyFrom(model)
            continue
        merged.ir_version = max(merged.ir_version, model.ir_version)
        merged.functions.extend(model.functions)
        for field in ("node", "initializer", "input", "output", "value_info"):
            getattr(merged.graph, field).extend(getattr(model.graph, field))
    with backend.prepare(merged, device, memory_path=path) as prepared:  # type: ignore[arg-type]
        outputs = iter(prepared.run(feeds))
        assert prepared.constants == ()
    for name in names:
        expected = cases()[name].data_sets[0][1]
        check(cases()[name], [next(outputs) for _ in expected], expected)
