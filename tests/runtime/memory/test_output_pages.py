"""Pinned pages for outputs: lent to arrays that stay independent, and returned when callers drop them."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import flashmem
from flashmem.base.errors import RunError
from flashmem.program.program import LARGE_OUTPUT, output_bytes, pinned_output_bytes
from flashmem.runtime.memory.accounts import Budget
from flashmem.runtime.memory.arena import large_pages
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.memory.output_pages import MOST, OutputPages
from flashmem.runtime.opencl.context import Bytes, Context
from flashmem.runtime.opencl.discovery import find_device
from tests.support.own_memory import descriptor_with_own_memory, give_own_memory

SHAPE, FLOAT = (512, 1024), np.dtype(np.float32)
NBYTES = 512 * 1024 * 4


def pages_of(limit: int | None) -> tuple[OutputPages, Ledger]:
    ledger = Ledger(Context(find_device("pocl")), Budget(limit, "host budget"))
    ledger.reserve("outputs", NBYTES, "the array of the output")
    return OutputPages(ledger, {"y": NBYTES, "small": 64}), ledger


def test_a_dropped_array_lends_its_pages_to_the_next_one_and_two_may_be_held() -> None:
    pages, ledger = pages_of(None)
    assert NBYTES >= LARGE_OUTPUT and pages.array("small", (4, 4), FLOAT) is None
    assert ledger.total == NBYTES  # reserved
    one = pages.array("y", SHAPE, FLOAT)
    two = pages.array("y", SHAPE, FLOAT)
    assert one is not None and two is not None and pages.array("y", SHAPE, FLOAT) is None
    assert ledger.total == MOST * NBYTES and not np.shares_memory(one, two)
    one[:], two[:] = 1, 2
    part, address = one[3:5].T, one.ctypes.data
    del one
    assert pages.array("y", SHAPE, FLOAT) is None and part.max() == 1  # a view holds the pages
    del part
    gc.collect()
    three = pages.array("y", SHAPE, FLOAT)
    assert three is not None and three.ctypes.data == address and three.flags.writeable
    assert two.min() == two.max() == 2 and ledger.total == MOST * NBYTES
    pages.close()
    assert ledger.total == 0 and pages.replaced == 0
    three[:] = 3
    assert two.max() == 2 and three.min() == 3  # arrays outlive it


@pytest.mark.parametrize("room", [0, 1])
def test_beyond_a_host_budget_arrays_are_the_process_own(room: int) -> None:
    pages, ledger = pages_of(NBYTES + room)
    one = pages.array("y", SHAPE, FLOAT)
    assert one is not None and ledger.total == NBYTES and pages.replaced == NBYTES
    assert pages.array("y", SHAPE, FLOAT) is None and ledger.total == NBYTES
    del one
    assert pages.array("y", SHAPE, FLOAT) is not None
    pages.close()


def test_where_the_driver_pins_nothing_arrays_are_the_process_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Context, data: Bytes) -> None:
        raise RunError("the driver refuses")

    monkeypatch.setattr(Context, "scratch", refuse)
    pages, ledger = pages_of(NBYTES)
    assert pages.array("y", SHAPE, FLOAT) is None and ledger.total == NBYTES  # it keeps its reservation
    assert pages.array("y", SHAPE, FLOAT) is None and ledger.total == NBYTES


def test_large_pages_are_zero_and_begin_at_a_page() -> None:
    for nbytes in (1, 4096, 3 << 20):
        memory = large_pages(nbytes)
        assert memory.nbytes == nbytes and not memory.any() and memory.ctypes.data % (2 << 20) == 0
        memory[:] = 1


def test_outputs_of_a_device_with_memory_of_its_own_are_right_in_every_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, columns = 512, 640
    weight = np.random.default_rng(1).integers(-9, 9, (16, columns)).astype(np.float32)  # sums are exact in any order
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [rows, columns])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    options = {"device": descriptor_with_own_memory(tmp_path), "memory_path": "buffer", "build": False}
    bundle = flashmem.compile(model, tmp_path / "m.flashmem", **options)  # type: ignore[arg-type]
    give_own_memory(monkeypatch, find_device("pocl"))
    monkeypatch.setattr("flashmem.runtime.opencl.device.Device.uses_host_memory", False)
    assert pinned_output_bytes(bundle.program) in (0, rows * columns * 4)  # none where kernels use host memory
    held, inputs = [], [np.full((rows, 16), n, np.float32) for n in range(6)]
    with flashmem.Session(bundle, mode="dma") as session:
        for run, x in enumerate(inputs):
            held.append(session.run(None, {"x": x})[0])
            if run == 3:
                del held[1:3]
            assert session.last_run is not None and session.last_run.memory.host is not None
        use = session.last_run.memory.host
        nbytes = rows * columns * 4
        assert use.by_category["outputs"] == MOST * nbytes > output_bytes(bundle.program) or use.peak_bytes >= nbytes
    expected = [x @ weight for x in inputs]
    for got, number in zip(held, (0, 3, 4, 5), strict=True):
        np.testing.assert_array_equal(got, expected[number])
    assert len({array.ctypes.data for array in held}) == len(held)
