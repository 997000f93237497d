"""Inputs and outputs bound to memory: ONNX Runtime's `io_binding`, outputs that stay on the device, DLPack."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import flashmem
from flashmem import Bundle, Session
from flashmem.base.errors import RunError
from flashmem.runtime.engine.output_values import OutputValue
from flashmem.runtime.opencl.context import Queue
from flashmem.runtime.opencl.discovery import list_devices

Array = NDArray[Any]
ROWS, WIDTH = 129, 128  # outputs large enough to be handed over


def recurrence() -> onnx.ModelProto:
    """after = tanh(h W + x), early = 2 h, count = the positive elements of `after`."""
    weight = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8
    h, x = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [ROWS, WIDTH]) for name in ("h", "x"))
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("after", "early")]
    outputs.append(helper.make_tensor_value_info("count", TensorProto.INT64, None))
    nodes = [
        helper.make_node("Add", ["h", "h"], ["early"]),
        helper.make_node("MatMul", ["h", "w"], ["p"]),
        helper.make_node("Add", ["p", "x"], ["s"]),
        helper.make_node("Tanh", ["s"], ["after"]),
        helper.make_node("Greater", ["after", "zero"], ["positive"]),
        helper.make_node("Cast", ["positive"], ["ones"], to=TensorProto.INT64),
        helper.make_node("ReduceSum", ["ones"], ["count"], keepdims=0),
    ]
    constants = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.float32(0), "zero")]
    graph = helper.make_graph(nodes, "g", [h, x], outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def inputs(number: int) -> dict[str, Array]:
    rng = np.random.default_rng(number)
    return {name: rng.standard_normal((ROWS, WIDTH)).astype(np.float32) for name in ("h", "x")}


def steps(count: int) -> list[Array]:
    """`after` of `count` runs by ONNX Runtime, each with the last one's as `h`."""
    reference = onnxruntime.InferenceSession(recurrence().SerializeToString())
    feeds, found = inputs(0), []
    for _ in range(count):
        feeds["h"] = reference.run(["after"], feeds)[0]
        found.append(feeds["h"])
    return found


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return flashmem.compile(recurrence(), tmp_path_factory.mktemp("bound") / "m.flashmem", build=False, budget="2MB")


@pytest.fixture(params=[(n, host) for n in range(len(list_devices())) for host in (True, False)], ids=str)
def session(bundle: Bundle, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """On each device, as one that computes in host memory and as one that does not."""
    device, host = request.param
    monkeypatch.setattr("flashmem.runtime.opencl.device.Device.uses_host_memory", host)
    with Session(bundle, device=str(device)) as opened:
        yield opened


def in_host_memory(session: Session) -> bool:
    return session._engine.opened.uses_host_memory


def test_outputs_go_into_the_next_run_without_the_host(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    feeds, wanted = inputs(0), steps(4)
    written: list[int] = []
    write = Queue.write
    monkeypatch.setattr(
        Queue, "write", lambda self, buffer, data, **at: (written.append(data.nbytes), write(self, buffer, data, **at))
    )
    monkeypatch.setattr(Queue, "read", fail_to_read)
    binding = session.io_binding()
    binding.bind_cpu_input("h", feeds["h"])
    binding.bind_cpu_input("x", feeds["x"])
    binding.bind_output("after", "cuda")
    for _ in wanted:
        session.run_with_iobinding(binding)
        [after] = binding.get_outputs()
        binding.bind_ortvalue_input("h", after)
    rows = feeds["h"].nbytes
    assert written.count(rows) == (0 if in_host_memory(session) else 1 + len(wanted))  # there the host writes in place
    monkeypatch.undo()
    assert (after.host is not None) == in_host_memory(session)
    assert (after.shape, after.data_type(), after.is_tensor()) == ((ROWS, WIDTH), "tensor(float)", True)
    assert after.device_name() == ("cpu" if in_host_memory(session) else session.device.name)
    np.testing.assert_allclose(after.numpy(), wanted[-1], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], after.numpy())
    np.testing.assert_array_equal(session.run(["after"], {"h": after, "x": feeds["x"]})[0].shape, (ROWS, WIDTH))


def fail_to_read(*_: Any, **__: Any) -> None:
    raise AssertionError("an output was read")


def test_outputs_of_every_kind_in_the_order_of_their_binding(session: Session) -> None:
    feeds, kinds = inputs(1), ("cpu", "opencl")
    wanted = dict(zip(("after", "early", "count"), session.run(None, feeds), strict=True))
    for first in kinds:
        for second in kinds:
            binding = session.io_binding()
            for name, array in feeds.items():
                binding.bind_cpu_input(name, array)
            order = {"count": first, "early": second, "after": first}
            for name, kind in order.items():
                binding.bind_output(name, kind)
            session.run_with_iobinding(binding)
            for name, value in zip(order, binding.get_outputs(), strict=True):
                assert (value.dtype, value.shape) == (wanted[name].dtype, wanted[name].shape)
                np.testing.assert_array_equal(value.numpy(), wanted[name])
                np.testing.assert_array_equal(np.asarray(value), wanted[name])


def test_memory_on_the_device_is_counted_until_it_is_dropped(session: Session) -> None:
    binding = session.io_binding()
    for name, array in inputs(2).items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("after", "opencl")
    session.run_with_iobinding(binding)
    session.run_with_iobinding(binding)
    budget = session._engine.device.budget
    before = budget.total
    values = binding.get_outputs()
    binding.clear_binding_outputs()
    assert budget.total == before
    del values
    gc.collect()
    assert (before - budget.total >= ROWS * WIDTH * 4) == (not in_host_memory(session))


def test_no_room_for_an_output_leaves_the_session_open(session: Session) -> None:
    binding, feeds = session.io_binding(), inputs(3)
    for name, array in feeds.items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("after", "opencl")
    budget = session._engine.device.budget
    session.run_with_iobinding(binding)
    budget.limit = session._plans.ready.needed() + binding.get_outputs()[0].nbytes
    if in_host_memory(session):
        session.run_with_iobinding(binding)
    else:
        with pytest.raises(RunError, match=r"the output 'after' that stays on the device needs .* raise the budget"):
            session.run_with_iobinding(binding)
    assert len(session.run(None, feeds)) == 3


def test_addresses_of_host_memory(session: Session) -> None:
    feeds = inputs(4)
    [wanted] = session.run(["after"], feeds)
    filled = np.zeros((ROWS, WIDTH), np.float32)
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_input(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
    binding.bind_output("after", "cpu", 0, np.float32, filled.shape, filled.ctypes.data)
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(filled, wanted)
    assert np.shares_memory(binding.get_outputs()[0].numpy(), filled)
    binding.bind_output("after", "cpu", 0, np.float32, (ROWS,), filled.ctypes.data)
    with pytest.raises(ValueError, match=r"output 'after' is bound to memory for float32 \(129,\); it is float32 \(129, 128\)"):
        session.run_with_iobinding(binding)


def test_dlpack_shares_host_memory(session: Session) -> None:
    feeds = inputs(5)
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("after")
    binding.bind_output("early", "opencl")
    session.run_with_iobinding(binding)
    after, early = binding.get_outputs()
    assert after.__dlpack_device__() == (1, 0)
    assert np.shares_memory(np.from_dlpack(after), after.numpy())
    wanted = session.run(["early"], feeds)[0]
    if in_host_memory(session):
        np.testing.assert_array_equal(np.from_dlpack(early), wanted)
    else:
        assert early.__dlpack_device__()[0] == 4
        with pytest.raises(BufferError, match=r"whose memory no other library reads; call numpy\(\) first"):
            early.__dlpack__()
        capsule = early.__dlpack__(dl_device=(1, 0))
        assert type(capsule).__name__ == "PyCapsule"
    [array] = session.run(["after"], feeds)  # numpy's arrays have DLPack themselves
    assert np.shares_memory(np.from_dlpack(array), array)


def test_a_value_of_one_session_is_an_input_of_another(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashmem.runtime.opencl.device.Device.uses_host_memory", False)
    feeds = inputs(6)
    with Session(bundle) as one, Session(bundle) as other:
        binding = one.io_binding()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        binding.bind_output("after", "opencl")
        one.run_with_iobinding(binding)
        [after] = binding.get_outputs()
        assert after.host is None
        [got] = other.run(["after"], {"h": after, "x": feeds["x"]})
        [right] = other.run(["after"], {"h": after.numpy(), "x": feeds["x"]})
        np.testing.assert_array_equal(got, right)
    np.testing.assert_allclose(after.numpy(), onnx_first(feeds), rtol=1e-4, atol=1e-5)  # the session is closed


def onnx_first(feeds: dict[str, Array]) -> Array:
    answers: list[Array] = onnxruntime.InferenceSession(recurrence().SerializeToString()).run(["after"], feeds)
    return answers[0]


def test_wrong_bindings_are_one_sentence(session: Session) -> None:
    binding, feeds = session.io_binding(), inputs(7)
    wrong: list[tuple[str, Any]] = [
        ("no output is bound; call bind_output", lambda: session.run_with_iobinding(binding)),
        ("device type 'tpu' is unknown; name one of: cpu, opencl, gpu, cuda", lambda: binding.bind_output("after", "tpu")),
        ("bound to an address on 'cuda'", lambda: binding.bind_output("after", "cuda", buffer_ptr=1)),
        ("give its element_type and its shape", lambda: binding.bind_output("after", buffer_ptr=1)),
        ("call bind_ortvalue_input", lambda: binding.bind_input("h", "cuda", 0, np.float32, (1,), 1)),
        ("is called by an int", lambda: binding.bind_cpu_input(3, feeds["h"])),  # type: ignore[arg-type]
    ]
    for message, act in wrong:
        with pytest.raises(ValueError, match=message):
            act()
    for kind in ("cpu", "opencl"):
        binding.clear_binding_outputs()
        binding.bind_output("z", kind)
        with pytest.raises(ValueError, match="the model has no output 'z'; it gives: after, early, count"):
            session.run_with_iobinding(binding)
    binding.clear_binding_outputs()
    binding.bind_output("after")
    with pytest.raises(ValueError, match="input 'h' is missing"):
        session.run_with_iobinding(binding)
    binding.bind_ortvalue_input("h", OutputValue.in_host_memory(np.zeros(3, np.float32)))
    binding.bind_cpu_input("x", feeds["x"])
    with pytest.raises(ValueError, match=r"input 'h' has shape \(3,\)"):
        session.run_with_iobinding(binding)
    binding.clear_binding_inputs()
    assert not binding.inputs and len(session.run(None, feeds)) == 3


def test_values_that_are_not_float32_and_early_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision on the device: outputs are converted on the way to the host, and copied as they are between runs."""
    monkeypatch.setattr("flashmem.runtime.opencl.device.Device.uses_host_memory", False)
    bundle = flashmem.compile(recurrence(), tmp_path / "m.flashmem", precision="fp16", build=False)
    feeds = inputs(8)
    with Session(bundle) as session:
        [wanted] = session.run(["after"], feeds)
        again = session.run(["after"], {"h": wanted, "x": feeds["x"]})[0]
        binding = session.io_binding()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        binding.bind_output("after", "opencl")
        session.run_with_iobinding(binding)
        [after] = binding.get_outputs()
        np.testing.assert_array_equal(after.numpy(), wanted)
        np.testing.assert_array_equal(session.run(["after"], {"h": after, "x": feeds["x"]})[0], again)
