"""The node tests of the onnx package, against `flashmem.tools.onnx_backend` and the checked-in list (`onnx_nodes.py`).

Most of the time is that of building programs, so the tests of a batch are merged into one model. Every test runs on the first
device. One test of each operator and element types also runs on the others, but for those named "expanded", which are the same
operators as graphs of simpler ones. Memory paths alternate. With `--thorough`, every test is also a model of its own, whose
kernels drivers optimise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import onnx
import pytest

import flashmem.tools.onnx_backend as backend
from flashmem.base.errors import NoDeviceError, UnsupportedModelError, UserError
from flashmem.runtime.opencl.discovery import list_devices
from tests.conformance.merged_nodes import batches, check_batch
from tests.conformance.onnx_nodes import (
    PASSES,
    PATHS,
    cases,
    operator,
    operators_summary,
    outcome,
    read_constants,
    read_list,
    totals_summary,
)
from tests.conftest import NODE_TESTS
from tests.support.caches import optimisation

DEVICES = sorted(list_devices(), key=lambda device: device.descriptor_name == "pocl")
LISTED = read_list()
CONSTANTS = read_constants()
BATCHES = batches()


@functools.cache
def _everywhere() -> frozenset[str]:
    """The first passing test of each operator and types of its inputs, for every device."""
    first: dict[object, str] = {}
    for op, name in LISTED[PASSES]:
        if name in cases() and "_expanded" not in name:
            first.setdefault((op, *(value.type.tensor_type.elem_type for value in cases()[name].model.graph.input)), name)
    return frozenset(first.values())


REFUSED = [(name, reason) for reason, tests in LISTED.items() if reason != PASSES for _, name in tests]


def test_every_test_is_listed_once(record_property: Callable[[str, object], None]) -> None:
    listed = sorted((name, op) for tests in LISTED.values() for op, name in tests)
    assert listed == sorted((name, operator(case)) for name, case in cases().items())
    record_property(NODE_TESTS, totals_summary())  # printed after all tests
    record_property(f"{NODE_TESTS}, by operator", operators_summary())


def test_nothing_is_listed_as_wrong() -> None:
    assert [reason for reason in LISTED if reason.startswith("WRONG")] == []


@pytest.mark.parametrize(("name", "reason"), REFUSED, ids=[name for name, _ in REFUSED])
def test_refused_for_the_listed_reason(name: str, reason: str) -> None:
    assert not reason.startswith("WRONG"), reason
    assert outcome(cases()[name], DEVICES[0].descriptor_name, "buffer") == (reason, ())


@pytest.mark.every_driver
@pytest.mark.parametrize("index", range(len(BATCHES)), ids=[names[0] for names in BATCHES])
def test_passes(index: int) -> None:
    path, other = PATHS[index % 2], PATHS[(index + 1) % 2]
    with optimisation.off():
        check_batch(BATCHES[index], DEVICES[0].descriptor_name, path)
        for device in DEVICES[1:]:
            check_batch([name for name in BATCHES[index] if name in _everywhere()], device.descriptor_name, other)


@pytest.mark.thorough
@pytest.mark.parametrize("index", range(len(BATCHES)), ids=[names[0] for names in BATCHES])
def test_passes_alone(index: int) -> None:
    for name in BATCHES[index]:
        assert outcome(cases()[name], DEVICES[0].descriptor_name, PATHS[(index + 1) % 2]) == (PASSES, CONSTANTS[name])


def _add(opset: int = 13) -> onnx.ModelProto:
    node = onnx.helper.make_node("Add", ["x", "y"], ["z"])
    ports = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n"]) for name in "xyz"]
    graph = onnx.helper.make_graph([node], "add", ports[:2], ports[2:])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=8)


def test_a_prepared_model_runs_again_with_other_shapes() -> None:
    prepared = backend.prepare(_add())
    for size in (3, 3, 5):
        x = np.arange(size, dtype=np.float32)
        (z,) = prepared.run([x, x])
        np.testing.assert_array_equal(z, x + x)
    prepared.close()


def test_other_data_in_an_input_that_became_a_constant() -> None:
    node = onnx.helper.make_node("Reshape", ["x", "shape"], ["y"])
    x = np.arange(6, dtype=np.float32)
    ports = [
        onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [6]),
        onnx.helper.make_tensor_value_info("shape", onnx.TensorProto.INT64, [2]),
    ]
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["a", "b"])
    graph = onnx.helper.make_graph([node], "g", ports, [y])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=8)
    with backend.prepare(model) as prepared:
        for shape in ((2, 3), (3, 2)):
            (y,) = prepared.run([x, np.array(shape, np.int64)])
            assert y.shape == shape
            assert prepared.constants == ("shape",)


def test_a_node_alone() -> None:
    x = np.array([-1.0, 2.0], np.float32)
    (y,) = backend.run_node(onnx.helper.make_node("Relu", ["x"], ["y"]), [x])
    np.testing.assert_array_equal(y, [0, 2])


@pytest.mark.parametrize("device", [device.descriptor_name for device in DEVICES] + ["CPU"])
def test_devices_that_are_here(device: str) -> None:
    assert backend.supports_device(device)


def test_what_the_caller_can_get_wrong() -> None:
    assert not backend.supports_device("abacus")
    with pytest.raises(NoDeviceError, match="abacus"):
        backend.prepare(_add(), "abacus")
    x = np.ones(2, np.float32)
    with backend.prepare(_add()) as prepared:
        with pytest.raises(UserError, match="2 inputs"):
            prepared.run([x])
        with pytest.raises(UserError, match="not a tensor"):
            prepared.run([x, [x]])
    with pytest.raises(UserError, match="no option 'fast'"):
        backend.prepare(_add(), fast=True)
    with pytest.raises(UserError, match="not valid ONNX"):
        backend.prepare(onnx.ModelProto())
    strange = _add()
    strange.graph.node[0].op_type = "Unique"
    with pytest.raises(UserError):
        backend.run_model(strange, [x, x])
    with pytest.raises(UnsupportedModelError, match="not implemented"):
        counted = {"max_gram_length": 1, "max_skip_count": 0, "min_gram_length": 1, "mode": "TF", "ngram_counts": [0]}
        counted |= {"ngram_indexes": [0], "pool_int64s": [2]}
        backend.run_node(onnx.helper.make_node("TfIdfVectorizer", ["x"], ["y"], **counted), [np.ones((2, 2), np.int64)])
