"""Batches for a model of batch size 1, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

import flashmem
from flashmem import Session
from flashmem.runtime.opencl.discovery import list_devices
from tests.support.state_models import recurrence

Array = NDArray[Any]


def model(batch: int | str) -> onnx.ModelProto:
    """y = softmax(x) * w along the second axis, k = the place of x's maximum, s = the sum of x; w is no part of the batch."""
    x, w = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [batch, 5]), ("w", [5])))
    b = helper.make_tensor_value_info("b", TensorProto.BOOL, [batch])
    kinds = {"y": TensorProto.FLOAT, "k": TensorProto.INT64, "s": TensorProto.FLOAT, "o": TensorProto.BOOL}
    outputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()]
    nodes = [
        helper.make_node("Softmax", ["x"], ["p"], axis=1),
        helper.make_node("Mul", ["p", "w"], ["y"]),
        helper.make_node("ArgMax", ["x"], ["k"], axis=1, keepdims=0),
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Not", ["b"], ["o"]),
    ]
    graph = helper.make_graph(nodes, "g", [x, w, b], outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def feeds(rows: int) -> dict[str, Array]:
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, 5)).astype(np.float32)
    return {"x": x, "w": rng.standard_normal(5).astype(np.float32), "b": rng.random(rows) < 0.5}


@pytest.fixture(params=range(len(list_devices())))
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    with Session(model(1), device=str(request.param)) as opened:
        yield opened


@pytest.mark.parametrize("rows", [0, 1, 2, 7])
def test_rows_are_run_one_by_one_and_stacked(rows: int, session: Session) -> None:
    names = ["k", "y", "o"]
    reference = onnxruntime.InferenceSession(model("n").SerializeToString())
    wanted = reference.run(names, feeds(rows)) if rows else [np.zeros(0, np.int64), np.zeros((0, 5)), np.zeros(0, bool)]
    for answers in (
        session.run(names, feeds(rows), batch="loop"),
        session.run_async(names, feeds(rows), batch="loop").result(60),
    ):
        for answer, right in zip(answers, wanted, strict=True):
            assert answer.shape == right.shape
            np.testing.assert_allclose(answer, right, rtol=1e-5, atol=1e-6)
    assert answers[0].dtype == np.int64 and answers[1].dtype == np.float32


def test_without_a_batch_there_is_one_run(session: Session) -> None:
    one = feeds(1)
    for answer, right in zip(session.run(None, one, batch="loop"), session.run(None, one), strict=True):
        np.testing.assert_array_equal(answer, right)
    lists = {name: array.tolist() for name, array in feeds(3).items()}
    assert session.run(["y"], lists, batch="loop")[0].shape == (3, 5)


def test_shape_variants_run_row_by_row_too() -> None:
    shapes = [{"x": (1, 5), "b": (1,)}, {"x": (4, 5), "b": (4,)}]
    bundle = flashmem.compile(model("n"), shapes=shapes, build=False)
    reference = onnxruntime.InferenceSession(model("n").SerializeToString())
    with Session(bundle) as session:
        for rows in (4, 3):  # at once, and row by row
            [answer] = session.run(["y"], feeds(rows), batch="loop")
            np.testing.assert_allclose(answer, reference.run(["y"], feeds(rows))[0], rtol=1e-5, atol=1e-6)


def test_what_is_no_batch_is_one_sentence(session: Session) -> None:
    three = feeds(3)
    wrong: list[tuple[str, Any, Any, Any]] = [
        ("batch 'all' is unknown; give 'loop'", ["y"], three, "all"),
        (r"output 's' has shape \(\), and batch='loop' stacks", None, three, "loop"),
        ("input 'x' has 3 rows and input 'b' has 2; a batch has as many", ["y"], three | {"b": np.ones(2, bool)}, "loop"),
        (r"input 'x' has shape \(3, 6\)", ["y"], three | {"x": np.ones((3, 6), np.float32)}, "loop"),
        ("input 'x' is float64", ["y"], three | {"x": np.ones((3, 5))}, "loop"),
        ("the model has no output 'z'", ["z"], three, "loop"),
        ("the model has no input 'a'", ["y"], three | {"a": np.ones((3, 5))}, "loop"),
        (r"input 'x' has shape \(3, 5\); the model was compiled for \(1, 5\)", ["y"], three, None),
    ]
    for message, names, inputs, batch in wrong:
        with pytest.raises(ValueError, match=message):
            session.run(names, inputs, batch=batch)
    assert len(session.run(None, feeds(1))) == 4


def test_a_model_with_states_is_refused() -> None:
    states = recurrence()
    with Session(states.proto, states=states.states) as session:
        with pytest.raises(ValueError, match="keeps states from one run to the next; leave batch='loop' out"):
            session.run(None, states.inputs(0), batch="loop")
        assert session.run(None, states.inputs(0))


def test_time_is_that_of_the_whole_batch(session: Session) -> None:
    with pytest.raises(TimeoutError):
        session.run(["y"], feeds(100_000), batch="loop", timeout=0.2)
    assert len(session.run(["y"], feeds(2), batch="loop")) == 1
