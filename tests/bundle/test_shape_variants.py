"""Shape variants: one bundle for several shapes, with common weights."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import flashmem
from flashmem import Bundle, Runtime, Session
from flashmem.base.errors import BundleError, UserError
from flashmem.bundle.shape_variants import checked_variants, find_variant, list_text, read_variants, stored_again
from flashmem.bundle.validation import check_variants
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import list_devices
from tests.support.bundle_changes import rewrite
from tests.support.command_line import Command, command_line
from tests.support.paths import ROOT

PLACES = [(device, path) for device in list_devices() for path in descriptor_for(device).memory_paths]
IDS = [f"{device.descriptor_name}-{path}" for device, path in PLACES]
SMALL, LARGE, ODD = {"x": (4, 64), "y": (4, 40)}, {"x": (32, 64), "y": (32, 40)}, {"x": (7, 64), "y": (7, 40)}

Arrays = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two products of weights with any number of rows; the second weight is transposed, a constant that is folded."""
    rng = np.random.default_rng(0)
    weights = {
        "w1": rng.standard_normal((64, 96)), "w2": rng.standard_normal((40, 96)), "b": rng.standard_normal(96),
    }  # fmt: skip
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"]),
        helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("Relu", ["c"], ["d"]),
        helper.make_node("Gemm", ["d", "w2", "y"], ["z"], transB=1),
    ]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size]) for name, size in (("x", 64), ("y", 40))]
    output = helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", 40])
    held = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "rows", ports, [output], held)
    path = tmp_path_factory.mktemp("shapes") / "rows.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


@pytest.fixture(scope="module")
def bundles(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    """The model for SMALL and LARGE, by device and memory path."""
    folder = tmp_path_factory.mktemp("bundles")
    return {
        name: flashmem.compile(
            model,
            folder / f"{name}.flashmem",
            device=device.descriptor_name,
            memory_path=path,
            shapes=[SMALL, LARGE],
            build=False,
        )
        for name, (device, path) in zip(IDS, PLACES, strict=True)
    }


def drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def expected(model: Path, inputs: Arrays) -> NDArray[Any]:
    return np.asarray(onnxruntime.InferenceSession(model).run(None, dict(inputs))[0])


def holds(answer: Sequence[NDArray[Any]], reference: NDArray[Any]) -> bool:
    return answer[0].shape == reference.shape and bool(np.abs(answer[0] - reference).max() <= 1e-4 * np.ptp(reference))


# Requested shapes.


def test_a_name_that_comes_again_begins_the_next_variant() -> None:
    assert read_variants([]) == ({},)
    assert read_variants(["x=1x2", "y=3"]) == ({"x": (1, 2), "y": (3,)},)
    assert read_variants(["x=1", "x=2", "x=3"]) == ({"x": (1,)}, {"x": (2,)}, {"x": (3,)})
    several = read_variants(["image=3", "ids=1", "mask=1", "ids=2", "mask=2"])
    assert several == ({"image": (3,), "ids": (1,), "mask": (1,)}, {"image": (3,), "ids": (2,), "mask": (2,)})
    with pytest.raises(UserError, match=r"the shapes x=1 are given twice"):
        read_variants(["x=1", "x=1"])
    with pytest.raises(UserError, match="empty list"):
        checked_variants([])


def test_the_variant_that_fits_exactly_is_found(bundles: dict[str, Bundle]) -> None:
    inputs = [variant.program.inputs for variant in bundles[IDS[0]].variants]
    assert [find_variant(inputs, drawn(shapes, 0)) for shapes in (SMALL, LARGE, ODD)] == [0, 1, None]
    assert find_variant(inputs, {"x": np.zeros((32, 64))}) == 1  # other inputs are drawn, or reported as missing
    assert list_text(inputs) == "x=4x64 y=4x40; x=32x64 y=32x40" and list_text(inputs[:1]) == "x=4x64 y=4x40"


# Answers, and the memory of a session.


@pytest.mark.parametrize(("device", "path"), PLACES, ids=IDS)
def test_every_variant_gives_onnxruntimes_answer(device: Any, path: str, model: Path, bundles: dict[str, Bundle]) -> None:
    bundle = bundles[f"{device.descriptor_name}-{path}"]
    asked = [drawn(shapes, seed) for seed, shapes in enumerate([SMALL, LARGE, LARGE, SMALL, LARGE])]
    for mode in descriptor_for(device).modes[path]:
        with Session(bundle, device=device.descriptor_name, mode=mode) as session:
            for inputs in asked:
                assert holds(session.run(None, inputs), expected(model, inputs)), mode
                assert session.last_run is not None
                program = session.bundle.program
                assert program.inputs[0].shape == inputs["x"].shape
                by_category = session.last_run.memory.by_category
                assert by_category["arena"] == program.arena_bytes and by_category["constants"] == program.constants_bytes
            # All weights were resident from the first run on, in places common to both variants.
            assert not session.last_run.loads, mode


@pytest.mark.parametrize("strategy", ["stream", "preload"])
def test_a_session_holds_one_variant_and_keeps_to_the_budget(strategy: str, model: Path, tmp_path: Path) -> None:
    whole = flashmem.compile(model, tmp_path / "whole.flashmem", shapes=[SMALL, LARGE], build=False)
    least = max(_smallest(whole, index) for index in (0, 1))
    bundle = flashmem.compile(model, tmp_path / "m.flashmem", shapes=[SMALL, LARGE], budget=least + 4096, build=False)
    with Session(bundle, strategy=strategy) as session:  # type: ignore[arg-type]
        for seed, shapes in enumerate([LARGE, SMALL, LARGE]):
            inputs = drawn(shapes, seed)
            assert holds(session.run(None, inputs), expected(model, inputs))
            assert session.last_run is not None
            if strategy == "stream":
                assert session.last_run.memory.peak_bytes <= least + 4096


def _smallest(bundle: Bundle, index: int) -> int:
    from flashmem.planning.carried_instance import carried_instance
    from flashmem.planning.replanning import smallest_budget

    one = bundle.variant(index)
    instance = carried_instance(one.program, one.plan, one.descriptor, one.meta["mode"], one.meta)
    assert instance is not None
    return smallest_budget(one.program, instance, one.meta["mode"], one.plan.asked)


def test_later_runs_of_every_variant_have_steady_launches_over_the_same_weights(tmp_path: Path) -> None:
    """A weight of two slices, which both variants join; a change of variant frees the prepared kernels."""
    weight = np.random.default_rng(4).standard_normal((512, 4096)).astype(np.float32)
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size]) for name, size in (("x", 512), ("z", 4096))]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"])]
    graph = helper.make_graph(nodes, "wide", ports[:1], ports[1:], [numpy_helper.from_array(weight, "w")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "m.onnx")
    device, few, many = PLACES[0][0].descriptor_name, {"x": (4, 512)}, {"x": (32, 512)}
    bundle = flashmem.compile(
        tmp_path / "m.onnx", tmp_path / "m.flashmem", device=device, memory_path="buffer", shapes=[few, many]
    )
    programs = [variant.program for variant in bundle.variants]
    assert stored_again(programs) == {} and programs[0].slices == programs[1].slices
    assert [[(each.first, each.last) for each in program.steady] for program in programs] == [[(1, 2)]] * 2
    for mode in descriptor_for(PLACES[0][0]).modes["buffer"]:
        answers: dict[int, NDArray[Any]] = {}
        with Session(bundle, device=device, mode=mode) as session:
            steady, read = [], []
            for turn, shapes in enumerate([few, few, many, many, few, many]):
                inputs = drawn(shapes, len(shapes["x"]))
                answer = session.run(None, inputs)
                assert holds(answer, inputs["x"] @ weight) and session.last_run is not None
                rows = shapes["x"][0]
                assert np.array_equal(answers.setdefault(rows, answer[0]), answer[0])
                steady.append(session.last_run.steady)
                read.append(bool(session.last_run.loads))
                if turn < 3:
                    session.prepared()
        assert steady == [False, True, False, True, False, False] and read == [True, *[False] * 5], mode


def test_shapes_that_are_not_there_get_one_sentence(model: Path, bundles: dict[str, Bundle]) -> None:
    with Session(bundles[IDS[0]], device=PLACES[0][0].descriptor_name) as session:
        with pytest.raises(
            ValueError, match=r"^the inputs are x=7x64 y=7x40; the bundle was compiled for: x=4x64 y=4x40; x=32x64"
        ):
            session.run(None, drawn(ODD, 0))
        mixed = drawn(SMALL, 0) | {"y": np.zeros((32, 40), np.float32)}
        with pytest.raises(ValueError, match="the inputs are x=4x64 y=32x40"):
            session.run(None, mixed)
        with pytest.raises(ValueError, match="input 'y' is missing"):
            session.run(None, {"x": np.zeros((32, 64), np.float32)})
        inputs = drawn(LARGE, 1)
        assert holds(session.run(None, inputs), expected(model, inputs))


def test_a_runtime_takes_the_variant_that_fits(model: Path, bundles: dict[str, Bundle]) -> None:
    device = PLACES[0][0].descriptor_name
    with Runtime(device=device) as runtime, runtime.open(bundles[IDS[0]]) as opened:
        asked = [drawn(shapes, seed) for seed, shapes in enumerate([LARGE, SMALL, SMALL, LARGE])]
        answers = [opened.submit(inputs) for inputs in asked]
        for inputs, answer in zip(asked, answers, strict=True):
            assert holds(answer.result(), expected(model, inputs))
        held = [loaded.bound.ledger.by_category.get("weights", 0) for loaded in opened.variants]  # type: ignore[union-attr]
        assert opened.loaded.opened.mode != "map" or (max(held) > 0 == min(held)), "both variants have them in common"
        with pytest.raises(ValueError, match="the bundle was compiled for: x=4x64"):
            opened.submit(drawn(ODD, 0))
        runtime.set_budget(max(loaded.smallest for loaded in opened.variants)).result()
        for inputs in asked[:2]:
            assert holds(opened.run(None, inputs), expected(model, inputs))
        assert runtime.budget is not None and runtime.held <= runtime.budget
    assert runtime.held == 0


# Weights, which are stored once in the file.


def test_weights_are_not_repeated(model: Path, bundles: dict[str, Bundle], tmp_path: Path) -> None:
    alone = flashmem.compile(model, tmp_path / "one.flashmem", device=PLACES[0][0].descriptor_name, shapes=LARGE, build=False)
    programs = [variant.program for variant in bundles[IDS[0]].variants]
    assert stored_again(programs) == {}
    assert {part.name: part.offset for part in programs[0].slices} == {part.name: part.offset for part in programs[1].slices}
    assert programs[1].weights_bytes == alone.program.weights_bytes and programs[1].slices == alone.program.slices


@pytest.mark.parametrize(("device", "optimize"), [("nvidia", "cold"), ("adreno740", "steady")])
def test_kernels_of_all_variants_read_the_packing_of_the_largest(device: str, optimize: Any, tmp_path: Path) -> None:
    """Convolutions and products whose best kernels depend on the number of rows; textures."""
    rng = np.random.default_rng(1)
    shapes = {"k1": (64, 3, 3, 3), "k2": (128, 64, 3, 3), "k3": (256, 128, 1, 1)}
    nodes = [
        helper.make_node("Conv", ["x", "k1"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "k2"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["c", "k3"], ["z"]),
    ]
    held = [numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name) for name, shape in shapes.items()]
    x, z = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", c, "h", "w"]) for name, c in (("x", 3), ("z", 256)))
    graph = helper.make_graph(nodes, "images", [x], [z], held)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "m.onnx")
    sizes = [{"x": (1, 3, size, size)} for size in (8, 128)]
    bundle = flashmem.compile(
        tmp_path / "m.onnx", tmp_path / "m.flashmem", device=device, shapes=sizes, build=False, optimize=optimize
    )
    few, many = (variant.program for variant in bundle.variants)
    assert stored_again([few, many]) == {} and {part.name for part in few.slices} == {part.name for part in many.slices}
    bundle.verify_weights()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_tables_and_quantised_weights_are_not_repeated(precision: Any, tmp_path: Path) -> None:
    """A table for host lookups, another that is also a head, and integers that are dequantised in registers."""
    rng = np.random.default_rng(3)
    tables = rng.standard_normal((2, 2100, 128)).astype(np.float32)
    held = {
        "table": tables[0], "other": tables[1],
        "codes": rng.integers(-99, 99, (128, 128)).astype(np.int8), "scale": np.full(128, 0.01, np.float32),
        "zero": rng.integers(-9, 9, 128).astype(np.int8),
    }  # fmt: skip
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["a"]),
        helper.make_node("Gather", ["other", "ids"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("DequantizeLinear", ["codes", "scale", "zero"], ["w"], axis=1),
        helper.make_node("MatMul", ["c", "w"], ["d"]),
        helper.make_node("Transpose", ["table"], ["head"]),
        helper.make_node("MatMul", ["d", "head"], ["z"]),
    ]
    ports = [
        helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"]),
        helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", 2100]),
    ]
    initializers = [numpy_helper.from_array(array, name) for name, array in held.items()]
    graph = helper.make_graph(nodes, "tokens", ports[:1], ports[1:], initializers)
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    sizes = [{"ids": (4,)}, {"ids": (32,)}]
    bundle = flashmem.compile(path, tmp_path / "m.flashmem", shapes=sizes, precision=precision, build=False)
    alone = flashmem.compile(path, tmp_path / "a.flashmem", shapes=sizes[1], precision=precision, build=False)
    few, many = (variant.program for variant in bundle.variants)
    assert stored_again([few, many]) == {} and [gather.offset for gather in few.host_embeddings] == [
        gather.offset for gather in many.host_embeddings
    ]
    assert len(few.host_embeddings) == 2 and many.weights_bytes == alone.program.weights_bytes
    with Session(bundle, verify_weights=True) as session:
        for size in (32, 4) if precision == "fp32" else (4,):  # each variant has kernels to build
            inputs = {"ids": rng.integers(0, 2100, size)}
            rows = tables[:, inputs["ids"]].sum(axis=0)
            reference = rows @ ((held["codes"].astype(np.int32) - held["zero"]) * np.float32(0.01)) @ tables[0].T
            error = np.abs(session.run(None, inputs)[0] - reference).max() / np.ptp(reference)
            assert error <= (1e-4 if precision == "fp32" else 1e-2)


def test_what_depends_on_shapes_is_stored_for_each_and_said(tmp_path: Path, flashmem_command: Command) -> None:
    """Positions cut to the length of the input: larger than a resident constant, and a different slice for each length."""
    table = np.random.default_rng(2).standard_normal((4000, 128)).astype(np.float32)
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"], start=0, end=1),
        helper.make_node("Slice", ["table", "zero", "shape", "zero"], ["cut"]),
        helper.make_node("Add", ["x", "cut"], ["z"]),
    ]
    held = [numpy_helper.from_array(table, "table"), numpy_helper.from_array(np.zeros(1, np.int64), "zero")]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 128]) for name in ("x", "z")]
    graph = helper.make_graph(nodes, "positions", ports[:1], ports[1:], held)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "m.onnx")
    sizes = ("--shape", "x=2500x128", "--shape", "x=3000x128")
    path = tmp_path / "m.flashmem"
    made = flashmem_command("compile", tmp_path / "m.onnx", "-o", path, *sizes, "--device", "generic-cpu", "--no-build")
    assert made.code == 0, made.err
    shown = flashmem_command("plan", path, "--json").json
    assert len(shown["variants"]) == 2 and 0 <= shown["stored_again_bytes"]["cut"] - 2500 * 128 * 4 <= 512
    text = flashmem_command("plan", path).out
    assert re.search(r"weight file +2\.82MB for all, 1\.28MB of them in more than one form: cut", text)


# The bundle.


def test_variants_that_do_not_belong_together_are_refused(bundles: dict[str, Bundle]) -> None:
    few, many = (variant.program for variant in bundles[IDS[0]].variants)
    check_variants([few, many])
    moved = replace(many.slices[0], offset=many.slices[1].offset)
    for changed, message in (
        (replace(many, inputs=few.inputs), "two of its shape variants are for the same shapes"),
        (replace(many, inputs=many.inputs[:1]), "other inputs or outputs"),
        (replace(many, precision="fp16"), "differ in precision"),
        (replace(many, slices=(moved, *many.slices[1:])), "another slice"),
    ):
        with pytest.raises(BundleError, match=message):
            check_variants([few, changed])


def test_damage_to_any_variant_is_found(model: Path, tmp_path: Path) -> None:
    bundle = flashmem.compile(model, tmp_path / "m.flashmem", device="generic-cpu", shapes=[SMALL, LARGE], build=False)
    assert Bundle.open(bundle.path).variant(1).plan == bundle.variants[1].plan
    path = bundle.files / "plan.1.json"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"1", b"2", 1))
    with pytest.raises(BundleError, match=r"plan\.1\.json is not what was written"):
        Bundle.open(bundle.path)
    path.write_bytes(content)
    rewrite(bundle.path, "manifest.json", lambda manifest: manifest.update(variants=[]))
    with pytest.raises(BundleError, match="does not describe its programs"):
        Bundle.open(bundle.path)


def test_two_variants_that_come_out_the_same_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="two of the requested variants are x=4x64 y=4x40; leave one out"):
        flashmem.compile(model, tmp_path / "m.flashmem", device="generic-cpu", shapes=[SMALL, {"x": (4, 64)}], build=False)


# The command line.


@pytest.fixture
def flashmem_command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return command_line(monkeypatch, capfd)


def test_commands_take_the_variant_that_is_meant(
    bundles: dict[str, Bundle], model: Path, tmp_path: Path, flashmem_command: Command
) -> None:
    bundle = bundles[IDS[0]].path
    device = ("--device", PLACES[0][0].descriptor_name)
    first = flashmem_command("run", bundle, *device, "--json").json
    assert first["shapes"] == {"x": [4, 64], "y": [4, 40]}
    named = flashmem_command("run", bundle, *device, "--shape", "x=32x64", "--verify", "--json").json
    assert named["shapes"]["y"] == [32, 40] and named["verify"]["ok"]
    inputs = drawn(LARGE, 3)
    np.savez(tmp_path / "x.npz", **inputs)
    ran = flashmem_command("run", bundle, *device, "--input", tmp_path / "x.npz", "--output", tmp_path / "z.npz")
    assert ran.code == 0 and re.search(r"shapes +x=32x64 y=32x40, one of 2 variants", ran.out)
    with np.load(tmp_path / "z.npz") as answer:
        assert holds([answer["z"]], expected(model, inputs))
    for words, message in (
        (("run", "--shape", "x=7x64"), "has no variant for x=7x64; it was compiled for: x=4x64 y=4x40; x=32x64 y=32x40"),
        (("simulate", "--shape", "x=4x64", "--shape", "x=32x64"), "names 2 variants of it; name one"),
    ):
        refused = flashmem_command(words[0], bundle, *words[1:])
        assert refused.code == 2 and message in refused.err
    np.savez(tmp_path / "odd.npz", **drawn(ODD, 3))
    refused = flashmem_command("run", bundle, *device, "--input", tmp_path / "odd.npz")
    assert refused.code == 2 and "odd.npz: the inputs are x=7x64 y=7x40; the bundle was compiled for" in refused.err
    simulated = flashmem_command("simulate", bundle, "--shape", "x=32x64", "--json").json
    assert simulated["shapes"]["x"] == [32, 64]
    assert flashmem_command("check", bundle, "--json").json["variants"] == [first["shapes"], named["shapes"]]
    plans = flashmem_command("plan", bundle, "--json").json
    assert [each["shapes"]["x"] for each in plans["variants"]] == [[4, 64], [32, 64]] and not plans["stored_again_bytes"]
    text = flashmem_command("plan", bundle, "--shape", "x=32x64").out
    assert "x=32x64 y=32x40" in text and len(re.findall(r"^shapes ", text, re.MULTILINE)) == 1
    assert flashmem_command("replan", bundle, "--budget", "10MB", "-o", tmp_path / "other.flashmem").code == 0
    other = Bundle.open(tmp_path / "other.flashmem")
    assert other.budget_bytes == 10_000_000 and len(other.variants) == 2


def test_runs_of_one_variant_teach_that_one(bundles: dict[str, Bundle], tmp_path: Path, flashmem_command: Command) -> None:
    flashmem_command("replan", bundles[IDS[0]].path, "--budget", "10MB", "-o", tmp_path / "m.flashmem")
    words = ("--device", PLACES[0][0].descriptor_name, "--shape", "x=32x64", "--repeat", "2", "--learn")
    assert flashmem_command("run", tmp_path / "m.flashmem", *words).code == 0
    few, many = Bundle.open(tmp_path / "m.flashmem").variants
    assert "learned" not in few.own and many.own["learned"]["runs"] == 2


def test_the_example_of_the_page(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/how-to/shapes.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    proto = onnx.load(model)
    del proto.graph.input[1]
    proto.graph.node[-1].input.pop()
    onnx.save(proto, tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(example, found)
    assert found["few"][0].shape == (4, 40) and found["many"][0].shape == (32, 40)
    assert json.loads((tmp_path / "model.flashmem/manifest.json").read_text())["variants"][1]["shapes"] == {"x": [32, 64]}
