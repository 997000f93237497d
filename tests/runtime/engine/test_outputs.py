"""Outputs: no copy if kernels use host memory, read early otherwise; correct, and owned by the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import flashmem
from flashmem import Bundle, Session
from flashmem.base.errors import BudgetError, BundleError, RunError
from flashmem.bundle.validation import check_bundle
from flashmem.profiler.descriptor import descriptor_toml
from flashmem.program.program import copied_outputs, fixed_bytes, output_bytes
from flashmem.runtime.memory import arena
from flashmem.runtime.opencl.context import Queue
from flashmem.runtime.opencl.discovery import find_device, list_devices
from flashmem.runtime.opencl.launching import PreparedLaunch
from flashmem.runtime.request import options
from flashmem.target.descriptor import load_descriptor

pytestmark = pytest.mark.build_apart

DEVICES = [device.descriptor_name for device in list_devices() if device.kind == "cpu"]
ROWS, COLUMNS = 67, 4099  # large outputs do not end at a page boundary
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Model:
    """A model compiled for one device, its inputs, and its expected answers."""

    bundle: Bundle
    device: str
    inputs: dict[str, Array]
    expected: dict[str, Array]


def write_model(path: Path) -> None:
    """Outputs of several types; one that later launches read, one that is an input, a constant, one without elements."""
    wide = [ROWS, COLUMNS]
    nodes = [
        helper.make_node("Abs", ["x"], ["early"]),
        helper.make_node("ReduceSum", ["early", "axis"], ["sums"], keepdims=0),
        helper.make_node("Add", ["early", "one"], ["late"]),
        helper.make_node("Greater", ["late", "x"], ["flags"]),
        helper.make_node("Add", ["n", "n"], ["doubled"]),
        helper.make_node("Identity", ["n"], ["same"]),
        helper.make_node("Identity", ["one"], ["constant"]),
        helper.make_node("Slice", ["x", "zero", "zero", "zero"], ["nothing"]),
        helper.make_node("Cast", ["late"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("Reshape", ["late", "flat"], ["seen_flat"]),
    ]
    outputs = [
        ("early", TensorProto.FLOAT, wide), ("sums", TensorProto.FLOAT, [ROWS]), ("late", TensorProto.FLOAT, wide),
        ("flags", TensorProto.BOOL, wide), ("doubled", TensorProto.INT64, [3]), ("same", TensorProto.INT64, [3]),
        ("constant", TensorProto.FLOAT, [1]), ("nothing", TensorProto.FLOAT, [0, COLUMNS]), ("half", TensorProto.FLOAT16, wide),
        ("seen_flat", TensorProto.FLOAT, [ROWS * COLUMNS]),
    ]  # fmt: skip
    constants = {
        "axis": np.array([1]), "one": np.ones(1, np.float32), "zero": np.array([0]), "flat": np.array([-1]),
    }  # fmt: skip
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, wide),
            helper.make_tensor_value_info("n", TensorProto.INT64, [3]),
        ],
        [helper.make_tensor_value_info(*output) for output in outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def answers(inputs: Mapping[str, Array]) -> dict[str, Array]:
    x, n = inputs["x"], inputs["n"]
    late = np.abs(x) + np.float32(1)
    return {
        "early": np.abs(x), "sums": np.abs(x).sum(1), "late": late, "flags": late > x, "doubled": n + n, "same": n,
        "constant": np.ones(1, np.float32), "nothing": x[:0], "half": late.astype(np.float16), "seen_flat": late.reshape(-1),
    }  # fmt: skip


def draw(seed: int) -> dict[str, Array]:
    generator = np.random.default_rng(seed)
    return {"x": generator.standard_normal((ROWS, COLUMNS), np.float32), "n": generator.integers(0, 2**40, 3)}


def assert_right(got: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    for name, array in got.items():
        assert array.dtype == expected[name].dtype and array.shape == expected[name].shape, name
        assert array.flags.writeable and array.flags.c_contiguous, name
        if name == "sums":
            np.testing.assert_allclose(array, expected[name], rtol=1e-5)
        else:
            np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.fixture(scope="module", params=DEVICES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("outputs")
    write_model(folder / "m.onnx")
    bundle = flashmem.compile(folder / "m.onnx", folder / "m.flashmem", device=request.param, mode="map")
    return Model(bundle, request.param, draw(0), answers(draw(0)))


@pytest.fixture(scope="module", params=DEVICES)
def apart(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The same, compiled for a device with its own memory, which the CPU simulates."""
    folder = tmp_path_factory.mktemp("apart")
    write_model(folder / "m.onnx")
    known = load_descriptor(request.param)
    own = replace(
        known,
        shares_memory=False,
        uses_host_memory=False,
        modes={"buffer": ("dma",)},
        memory_paths=("buffer",),
        capacity_model="",
        configs=(),
    )
    (folder / "own.toml").write_text(descriptor_toml(own, "# The CPU with memory of its own"))
    bundle = flashmem.compile(folder / "m.onnx", folder / "m.flashmem", device=str(folder / "own.toml"), build=False)
    return Model(bundle, request.param, draw(0), answers(draw(0)))


def test_outputs_count_once_and_are_the_users_own(model: Model) -> None:
    program = model.bundle.program
    assert program.hands_over
    copied = {port.name for port in copied_outputs(program)}
    assert copied == {"half", "sums", "doubled", "same", "constant"}  # stored as float32, or small
    assert output_bytes(program) == 2 * ROWS * COLUMNS + 4 * ROWS + 2 * 3 * 8 + 4
    kept: list[tuple[dict[str, Array], dict[str, Array]]] = []
    with Session(model.bundle, device=model.device) as session, Session(model.bundle, device=model.device) as other:
        for seed in range(4):
            inputs = draw(seed)
            expected = answers(inputs)
            for each in (session, other):
                got = dict(zip(expected, each.run(None, inputs), strict=True))
                assert each.last_run is not None and each.last_run.memory.peak_bytes <= fixed_bytes(program)
                if seed != 1:  # the others are dropped immediately
                    kept.append((got, expected))
        for got, _ in kept[2:4]:
            got["early"][:] = -1
            got["late"][:] = -1
        session.run(None, model.inputs)
        del kept[2:4]
    for got, expected in kept:  # also after the sessions
        assert_right(got, expected)
    spans = sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for got, _ in kept for a in got.values() if a.nbytes)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@pytest.mark.parametrize("names", [["late"], ["half", "late"], ["nothing"], ["same", "late", "same"]])
def test_some_outputs(model: Model, apart: Model, names: list[str]) -> None:
    for each in (model, apart):
        with Session(each.bundle, device=each.device, mode="dma" if each is apart else "auto") as session:
            for _ in range(2):
                got = session.run(names, each.inputs)
                assert len(got) == len(names)
                assert_right(dict(zip(names, got, strict=True)), each.expected)
            assert_right(dict(zip(each.expected, session.run(None, each.inputs), strict=True)), each.expected)


@pytest.mark.parametrize("names", [["sums"], ["late"], ["half", "doubled"]], ids=str)
def test_outputs_after_the_run_that_was_not_asked_for_them(model: Model, apart: Model, names: list[str]) -> None:
    """Those whose memory nothing else has used, once."""
    for each in (model, apart):
        with Session(each.bundle, device=each.device, mode="dma" if each is apart else "auto") as session:
            with pytest.raises(ValueError, match="the last run has no output 'early' left"):
                session.outputs("early")
            left = set()
            for name in each.expected:
                session.run(names, each.inputs)
                try:
                    found = session.outputs(name)
                except ValueError as error:
                    assert str(error) == f"the last run has no output {name!r} left; name it when you call run"
                    continue
                left.add(name)
                assert_right(found, {name: each.expected[name]})
                with pytest.raises(ValueError, match="left; name it when you call run"):
                    session.outputs(name)
            assert "late" in left or "late" in names
            if each is model and names == ["sums"]:  # it is copied, and leaves the pages of the others
                assert left == each.expected.keys() - {"sums"}
                session.run(names, each.inputs)
                assert_right(session.outputs("flags", "early", "nothing"), each.expected)
            assert left.isdisjoint(names)
            with pytest.raises(ValueError, match="the model has no output 'none'"):
                session.outputs("none")


def test_elsewhere_an_output_is_read_when_its_last_layer_has_run(apart: Model) -> None:
    program = apart.bundle.program
    assert not program.hands_over
    ready = {port.name: port.ready for port in program.outputs}
    assert ready["half"] is None and ready["nothing"] is None
    assert all(ready[name] for name in ("early", "late", "flags", "doubled"))
    places = {tensor.name: (tensor.offset, tensor.offset + tensor.nbytes) for tensor in program.tensors}
    first, last = (places[str(port.tensor)] for port in program.outputs if port.name in ("early", "late"))
    assert ready["early"] < ready["late"] and first != last  # type: ignore[operator]
    with Session(apart.bundle, device=apart.device) as session:
        for _ in range(2):
            assert_right(dict(zip(apart.expected, session.run(None, apart.inputs), strict=True)), apart.expected)


def test_an_output_that_was_read_gives_its_place_to_later_tensors(tmp_path: Path) -> None:
    """A chain in which every result is an output: the arena of a device with its own memory holds a few, not all."""
    links = 12
    nodes = [helper.make_node("Softmax", [f"y{i}"], [f"y{i + 1}"]) for i in range(links)]
    wide = [8, 1000]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("y0", TensorProto.FLOAT, wide)],
        [helper.make_tensor_value_info(f"y{i + 1}", TensorProto.FLOAT, wide) for i in range(links)],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "m.onnx")
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "m.flashmem", device="nvidia", memory_path="buffer", build=False)
    assert bundle.program.arena_bytes <= 3 * 33000
    x = np.random.default_rng(0).standard_normal(wide).astype(np.float32)
    expected = x
    with Session(bundle, device=DEVICES[0], mode="dma") as session:
        for got in session.run(None, {"y0": x}):
            expected = np.exp(expected) / np.exp(expected).sum(-1, keepdims=True)
            np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_an_output_that_is_written_in_parts_is_read_after_the_last(tmp_path: Path) -> None:
    """Parts of a Concat are in its memory; a Slice of it is read later still."""
    wide = [1, 4, 1024]
    nodes = [
        helper.make_node("Softmax", ["x"], ["a"]),
        helper.make_node("Softmax", ["a"], ["b"]),
        helper.make_node("Concat", ["a", "x", "b"], ["all"], axis=1),
        helper.make_node("Slice", ["all", "four", "eight", "one"], ["part"]),
        helper.make_node("Softmax", ["part"], ["c"]),
        helper.make_node("Softmax", ["c"], ["d"]),
        helper.make_node("Softmax", ["d"], ["e"]),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, wide)],
        [
            helper.make_tensor_value_info("all", TensorProto.FLOAT, [1, 12, 1024]),
            helper.make_tensor_value_info("e", TensorProto.FLOAT, wide),
        ],
        [numpy_helper.from_array(np.array([n]), name) for name, n in (("one", 1), ("four", 4), ("eight", 8))],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "m.onnx")
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "m.flashmem", device="nvidia", memory_path="buffer", build=False)
    ready = [port.ready for port in bundle.program.outputs]
    assert ready[0] is None or 0 < ready[0] < len(bundle.program.launches)
    x = np.random.default_rng(0).standard_normal(wide, np.float32)

    def softmax(array: Array) -> Array:
        return np.exp(array) / np.exp(array).sum(-1, keepdims=True)

    with Session(bundle, device=DEVICES[0], mode="dma") as session:
        got, last = session.run(None, {"x": x})
    np.testing.assert_allclose(got, np.concatenate([softmax(x), x, softmax(softmax(x))], 1), rtol=1e-5)
    np.testing.assert_allclose(last, softmax(softmax(softmax(x))), rtol=1e-5)


def test_a_program_for_a_cpu_runs_where_memory_is_apart(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    device = replace(next(d for d in list_devices() if d.descriptor_name == model.device), unified_memory=False)
    monkeypatch.setattr("flashmem.runtime.opencl.device.Device.uses_host_memory", False)
    monkeypatch.setattr("flashmem.runtime.request.options.find_device", lambda *_, **__: device)
    with Session(model.bundle, mode="dma") as session:
        assert_right(dict(zip(model.expected, session.run(None, model.inputs), strict=True)), model.expected)
        assert session.last_run is not None
        host = session.last_run.memory.host
        assert host is not None and host.by_category["outputs"] > 10 * ROWS * COLUMNS
    with pytest.raises(BudgetError):
        Session(model.bundle, mode="dma", budget=fixed_bytes(model.bundle.program, shares_memory=False) - 1)


@pytest.mark.parametrize("coherent", [True, False])
def test_the_host_uses_the_arena_in_place_where_it_is_the_only_copy(
    model: Model, coherent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without commands; also inputs that are not contiguous, and those that change after the run."""
    if not coherent:
        monkeypatch.setattr(options, "find_device", lambda *_, **__: replace(find_device(model.device), coherent=False))
    calls: list[str] = []
    with Session(model.bundle, device=model.device) as session:
        for name in ("write", "write_later", "read", "read_later"):
            made = getattr(Queue, name)
            monkeypatch.setattr(
                Queue, name, lambda *given, _name=name, _made=made, **options: calls.append(_name) or _made(*given, **options)
            )
        for seed in range(3):
            inputs = draw(seed)
            expected = answers(draw(seed))
            if seed == 1:
                inputs = {name: np.asfortranarray(array) for name, array in inputs.items()}
            if seed == 2:
                inputs["n"] = np.repeat(inputs["n"], 2)[::2]
            got = dict(zip(expected, session.run(None, inputs), strict=True))
            for array in inputs.values():
                array[...] = 0
            assert_right(got, expected)
            assert_right(dict(zip(["sums"], session.run(["sums"], draw(seed)), strict=True)), expected)
            assert_right(session.outputs("doubled", "half"), expected)
    assert bool(calls) != coherent


@pytest.mark.parametrize("how", ["pages cannot be moved", "the driver keeps a copy"])
def test_where_pages_cannot_be_moved_they_are_copied(model: Model, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "pages cannot be moved":
        monkeypatch.setattr(arena, "_MOVE", 1 << 20)  # the system lacks the flag
        monkeypatch.setattr(arena, "_PIECE_BYTES", 8192)
    else:
        map_buffer = Queue.map

        def elsewhere(queue: Queue, buffer: Any, nbytes: int, **rest: Any) -> Any:
            view = map_buffer(queue, buffer, nbytes, **rest)
            if not rest:
                queue.unmap(view)
                copy = np.lib.stride_tricks.as_strided(view.copy())
                monkeypatch.setattr(Queue, "unmap", lambda *_: monkeypatch.setattr(Queue, "unmap", unmap))
                return copy
            return view

        unmap = Queue.unmap
        monkeypatch.setattr(Queue, "map", elsewhere)
    with Session(model.bundle, device=model.device) as session:
        first = dict(zip(model.expected, session.run(None, model.inputs), strict=True))
        session.run(None, draw(5))
    assert_right(first, model.expected)


def test_a_run_that_fails_leaves_earlier_answers_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(model.bundle, device=model.device)
    kept = dict(zip(model.expected, session.run(None, model.inputs), strict=True))
    launch = Queue.launch_all

    def interrupted(queue: Queue, launches: Sequence[PreparedLaunch], **options: bool) -> None:
        launch(queue, launches, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Queue, "launch_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.run(None, draw(3))
    monkeypatch.undo()
    with pytest.raises(RunError, match="the session is closed"):
        session.run(None, model.inputs)
    assert_right(kept, model.expected)


def test_outputs_that_share_memory_or_are_read_after_no_layer_are_damage(model: Model) -> None:
    program, plan = model.bundle.program, model.bundle.plan
    ports = {port.name: port for port in program.outputs}
    shared = tuple(replace(port, tensor=ports["early"].tensor) if port.name == "late" else port for port in program.outputs)
    with pytest.raises(BundleError, match="'early' and 'late' share memory"):
        check_bundle(replace(program, outputs=shared), plan)
    for ready in (0, len(program.launches) + 1):
        late = tuple(replace(port, ready=ready) for port in program.outputs)
        with pytest.raises(BundleError, match="is read after no layer"):
            check_bundle(replace(program, outputs=late), plan)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9000)), max_size=6), st.booleans())
def test_any_places_move_out(gaps: list[tuple[int, int]], movable: bool) -> None:
    places, end = [], 0
    for gap, nbytes in gaps:
        places.append((end + 512 * gap, nbytes))
        end = -(-sum(places[-1]) // 512) * 512
    memory = arena.new_pages(end + 1)
    content = np.random.default_rng(end).integers(0, 256, memory.size, np.uint8)
    for _ in range(2):
        memory[:] = content
        with pytest.MonkeyPatch.context() as patch:
            if not movable:
                patch.setattr(arena, "_MOVE", 1 << 20)
            taken = arena.move_out(memory, places[::-1])
        memory[:] = 7
        for (offset, nbytes), array in zip(places[::-1], taken, strict=True):
            np.testing.assert_array_equal(array, content[offset : offset + nbytes])
            array[:] = 1
