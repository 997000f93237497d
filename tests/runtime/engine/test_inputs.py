"""Inputs and outputs: refusals, conversions, arrays passed without a copy; rows of tables."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashmem
from flashmem import Bundle, Runtime, Session
from flashmem.base.types import StoredType
from flashmem.program.tensors import HostEmbeddingLookup, Port, Tensor, numpy_dtype, port_dtype
from flashmem.runtime.engine import ports
from flashmem.runtime.engine.ports import from_device, gather_rows, to_device
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.streaming.weight_file import WeightFile
from tests.support.compared import Nodes
from tests.support.mini_bundle import TOKENS, VOCABULARY, WIDTH, MiniModel, write_mini_bundle

Inputs = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MiniModel:
    return write_mini_bundle(tmp_path_factory.mktemp("inputs") / "m.flashmem")


@pytest.fixture(scope="module")
def session(model: MiniModel) -> Iterator[Session]:
    with Session(model.path) as opened:
        yield opened


def _without(name: str) -> Callable[[Inputs], Inputs]:
    return lambda inputs: {key: value for key, value in inputs.items() if key != name}


def _with(name: str, value: Any) -> Callable[[Inputs], Inputs]:
    return lambda inputs: {**inputs, name: value}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without("x"), "input 'x' is missing; the model takes: tokens, x"),
        (_with("y", np.zeros(1)), "the model has no input 'y'"),
        (_with("x", np.zeros(WIDTH, np.float64)), "input 'x' is float64; the model takes float32"),
        (_with("x", {0.0}), "input 'x' is a set; give a numpy array, a tensor on the CPU, or a list of numbers"),
        (_with("x", np.zeros((1, WIDTH), np.float32)), r"input 'x' has shape \(1, 200\); the model was compiled for \(200,\)"),
        (_with("tokens", np.full((1, TOKENS), VOCABULARY)), "input 'tokens' holds index 70; its table has 70 rows"),
        (_with("tokens", np.full((1, TOKENS), -VOCABULARY - 1)), "input 'tokens' holds index -71"),
    ],
)
def test_a_wrong_input_is_named_and_the_session_stays_usable(
    session: Session, model: MiniModel, spoil: Callable[[Inputs], Inputs], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        session.run(None, spoil(dict(model.inputs())))
    inputs = model.inputs()
    np.testing.assert_allclose(session.run(["y"], inputs)[0], model.reference(inputs)[0], rtol=0, atol=2e-5)


def test_an_unknown_output_is_named(session: Session, model: MiniModel) -> None:
    with pytest.raises(ValueError, match=r"the model has no output 'z'; it gives: y, y16, n"):
        session.run(["z"], model.inputs())


def test_outputs_come_in_the_order_asked_for(session: Session, model: MiniModel) -> None:
    n, y, again = session.run(["n", "y", "n"], model.inputs())
    assert (n.shape, y.shape, again.shape) == ((1,), (WIDTH,), (1,))


def test_nan_passes_through(session: Session, model: MiniModel) -> None:
    inputs = model.inputs()
    inputs["x"][3] = np.nan
    assert np.isnan(session.run(["y"], inputs)[0]).all()


@pytest.mark.parametrize("names", [[], ()])
def test_a_run_for_no_output_is_refused(session: Session, model: MiniModel, names: Any) -> None:
    with pytest.raises(ValueError, match="no output is requested; name at least one, or give None for all"):
        session.run(names, model.inputs())
    with Runtime(prepare=False) as runtime, pytest.raises(ValueError, match="no output is requested"):
        runtime.open(model.path).submit(model.inputs(), names)


ORDERS: dict[str, Callable[[Any], Any]] = {
    "columns first": np.asfortranarray,
    "backwards": lambda x: np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1],
    "every other": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "the same row": lambda x: np.broadcast_to(x[:1], x.shape),
}


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """y = the sums of x's columns; x is 2 MiB, y 2 KiB."""
    nodes, folder = Nodes(), tmp_path_factory.mktemp("sums")
    axes = nodes.constant(np.array([0], np.int64))
    nodes.node("ReduceSum", nodes.input(np.zeros((1024, 512), np.float32)), axes, keepdims=0)
    (folder / "m.onnx").write_bytes(nodes.proto().SerializeToString())
    return flashmem.compile(folder / "m.onnx", folder / "m.flashmem", build=False)


@pytest.mark.parametrize("hands_over", [True, False])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("device", range(len(list_devices())))
def test_an_input_in_any_order_is_copied_to_its_place_and_nowhere_else(
    device: int, order: str, hands_over: bool, sums: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hands_over`: the device uses host memory; GPUs do not."""
    monkeypatch.setattr("flashmem.runtime.opencl.device.Device.uses_host_memory", hands_over)
    rng = np.random.default_rng(0)
    [name], x = [port.name for port in sums.program.inputs], ORDERS[order](rng.standard_normal((1024, 512), np.float32))
    assert not x.flags.c_contiguous
    with Session(sums, device=str(device), prepare=False) as opened:
        assert (opened._engine.bound.activations._host is not None) == hands_over
        [wanted] = opened.run(None, {name: np.ascontiguousarray(x)})
        tracemalloc.start()
        try:
            [y] = opened.run(None, {name: x})
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 1 << 20, "the input was copied as a whole"
    np.testing.assert_array_equal(y, wanted)
    exact, bound = x.astype(np.float64).sum(axis=0), 1024 * 2.0**-24 * np.abs(x.astype(np.float64)).sum(axis=0)
    assert (np.abs(y - exact) <= bound).all()


@pytest.mark.parametrize("dtype", ["bool", "int64", "int32", "uint8", "uint64", "bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("half", ["float16", "float32"])
def test_what_goes_to_the_device_and_back_is_unchanged(dtype: str, half: str) -> None:
    port = Port("p", (4,), dtype, "t")
    array = np.array([0, 1, 1, 0]).astype(numpy_dtype(dtype))
    stored: StoredType = port_dtype(port)
    if dtype == half == "float16":
        stored = "float16"
    on_device = to_device(Tensor("t", (4,), stored, 0, 512), array)
    assert on_device.dtype == (array.dtype if "float" not in dtype or dtype == half else np.float32)
    back = from_device(port, on_device)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 9),
    panel=st.sampled_from([1, 4, 7]),
    dtype=st.sampled_from(["float32", "float16"]),
    offset=st.integers(0, 50),
    together=st.sampled_from([1, 80, 1 << 17]),
    data=st.data(),
)
def test_gathered_rows_are_numpys(
    rows: int, columns: int, panel: int, dtype: Any, offset: int, together: int, data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    shape = data.draw(st.sampled_from([(), (0,), (3,), (2, 3)]))
    count = int(np.prod(shape))
    indices = np.array(data.draw(st.lists(st.integers(-rows, rows - 1), min_size=count, max_size=count)), np.int64)
    indices = indices.reshape(shape)
    table = np.random.default_rng(rows).standard_normal((rows, columns)).astype(dtype)
    padded = np.zeros((-(-rows // panel) * panel, columns), dtype)
    padded[:rows] = table
    packed = padded.reshape(-1, panel, columns).transpose(0, 2, 1) if panel > 1 else padded
    path = tmp_path_factory.mktemp("rows") / "weights.bin"
    path.write_bytes(bytes(offset) + packed.tobytes())
    pitch = table.itemsize * panel
    file = WeightFile(path, path.stat().st_size)
    gather = HostEmbeddingLookup("i", "t", offset, rows, columns, pitch * columns, pitch, dtype, panel)
    with mock.patch.object(ports, "_SCRATCH_BYTES", together):
        got = gather_rows(file, gather, indices, "float32")
    file.close()
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, table[indices].astype(np.float32))


def test_only_the_rows_asked_for_are_read(tmp_path: Path) -> None:
    """A sparse file of 64 GB: reading all of it would not end."""
    path = tmp_path / "weights.bin"
    rows, columns = 1 << 24, 1024
    with path.open("wb") as file:
        file.truncate(rows * columns * 4)
        file.seek(12345678 * columns * 4)
        file.write(np.arange(columns, dtype=np.float32).tobytes())
    opened = WeightFile(path, rows * columns * 4)
    gather = HostEmbeddingLookup("i", "t", 0, rows, columns, columns * 4, 4, "float32")
    got = gather_rows(opened, gather, np.array([12345678, rows - 1, 12345678], np.int64), "float32")
    opened.close()
    np.testing.assert_array_equal(got[0], np.arange(columns))
    np.testing.assert_array_equal(got[2], got[0])
    assert not got[1].any()
