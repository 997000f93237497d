"""Chains: in later runs one launch runs several small ones, with the same bits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import flashmem
from flashmem import Bundle, Session
from flashmem.bundle.kernel_source import check_source
from flashmem.program.kernel_text import KERNEL_MARK, kernel_texts
from flashmem.program.launches import Arg
from flashmem.program.tensors import State
from flashmem.runtime.kernels import chains
from flashmem.runtime.kernels.chains import with_chains
from flashmem.target.descriptor import load_descriptor
from tests.support.caches import launches_chained
from tests.support.compared import DEVICES
from tests.support.mini_bundle import write_mini_bundle

CPUS = [name for name, _ in DEVICES if load_descriptor(name).kind == "cpu"]
STEPS, FEATURES, HIDDEN = 6, 24, 32


@pytest.fixture(autouse=True)
def _chained(monkeypatch: pytest.MonkeyPatch) -> None:
    launches_chained(monkeypatch)


def _model(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """A tagger: rows of a table, a GRU, a normalisation, a product of 64 rows, and a Softmax; its inputs."""
    draw = np.random.default_rng(5)

    def weight(*shape: int) -> np.ndarray[Any, Any]:
        return (draw.laplace(0.02, 0.4, shape) / np.sqrt(shape[-1])).astype(np.float32)

    constants: Mapping[str, Any] = {
        "table": weight(50, FEATURES), "w": weight(1, 3 * HIDDEN, FEATURES), "r": weight(1, 3 * HIDDEN, HIDDEN),
        "b": weight(1, 6 * HIDDEN), "scale": 1 + weight(HIDDEN), "shift": weight(HIDDEN), "out": weight(HIDDEN, 40),
        "axes": np.array([1]),
    }  # fmt: skip
    nodes = [
        helper.make_node("Add", ["ids", "one"], ["next"]),
        helper.make_node("Gather", ["table", "next"], ["words"]),
        helper.make_node("GRU", ["words", "w", "r", "b"], ["all", "last"], hidden_size=HIDDEN, linear_before_reset=1),
        helper.make_node("Squeeze", ["all", "axes"], ["states"]),
        helper.make_node("LayerNormalization", ["states", "scale", "shift"], ["normal"], axis=-1),
        helper.make_node("MatMul", ["normal", "out"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["y"], axis=-1),
    ]
    inputs = [helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, [STEPS, 1])]
    outputs = [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)]
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    initializers.append(numpy_helper.from_array(np.array(1), "one"))
    graph = helper.make_graph(nodes, "tagger", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(onnx.shape_inference.infer_shapes(model), path)
    return {"ids": draw.integers(0, 48, (STEPS, 1))}


def _chained_layers(bundle: Bundle) -> list[tuple[int, int]]:
    program, _ = with_chains(bundle.program, bundle.source, bundle.descriptor, 2)
    return [(each.first, each.last) for each in program.steady if each.launch.kernel.startswith("chain_")]


@pytest.mark.parametrize("device", CPUS)
def test_later_runs_take_one_launch_for_many_and_have_the_same_bits(device: str, tmp_path: Path) -> None:
    feeds = _model(tmp_path / "m.onnx")
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "b", device=device, memory_path="buffer")
    launches = len(bundle.program.launches)
    covered = _chained_layers(bundle)
    assert sum(last - first + 1 for first, last in covered) >= launches - 3 >= 12
    right = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, feeds)[0]
    with Session(bundle, device=device, strategy="preload") as session:
        first = session.run(None, feeds)[0]
        session.prepared()
        later = [session.run(None, feeds)[0] for _ in range(3)]
        assert session.last_run is not None and session.last_run.steady
        other = {"ids": (feeds["ids"] + 11) % 48}
        changed = session.run(None, other)[0]
    np.testing.assert_allclose(first, right, rtol=0, atol=1e-6)
    assert all(np.array_equal(first, each) for each in later)
    with Session(bundle, device=device, prepare=False) as session:
        assert np.array_equal(changed, session.run(None, other)[0])


@pytest.mark.parametrize("device", CPUS)
def test_a_bad_index_in_a_chain_is_reported(device: str, tmp_path: Path) -> None:
    feeds = _model(tmp_path / "m.onnx")
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "b", device=device, memory_path="buffer")
    with Session(bundle, device=device, strategy="preload") as session:
        right = session.run(None, feeds)
        session.prepared()
        with pytest.raises(ValueError, match="Gather_words"):
            session.run(None, {"ids": feeds["ids"] + 50})
        assert np.array_equal(session.run(None, feeds)[0], right[0])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("tagger")
    _model(folder / "m.onnx")
    return flashmem.compile(folder / "m.onnx", folder / "b", device="generic-cpu", memory_path="buffer", build=False)


def test_only_launches_that_cost_less_than_their_launch_are_chained(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    one, *_ = _chained_layers(bundle)
    first, last = one
    large = replace(bundle.program.launches[first + 2], macs=10**8, global_size=(64, 64), local_size=(1, 1))
    launches = (*bundle.program.launches[: first + 2], large, *bundle.program.launches[first + 3 :])
    changed = replace(bundle.program, launches=launches)
    assert with_chains(changed, bundle.source, bundle.descriptor, 2)[0] is changed, "the large one is nearly all of a run"
    monkeypatch.setattr(chains, "WORTH", 0)
    cut, _ = with_chains(replace(bundle.program, launches=launches), bundle.source, bundle.descriptor, 2)
    assert [(each.first, each.last) for each in cut.steady][:2] == [(first, first + 2), (first + 4, last)]


def test_no_chain_is_longer_than_an_interrupted_run_may_wait(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _chained_layers(bundle)
    monkeypatch.setattr(chains, "LONGEST_SECONDS", 5e-6)
    parts = _chained_layers(bundle)
    assert len(parts) > len(whole)
    assert all(last > first for first, last in parts)
    assert all(one < other for (_, one), (other, _) in pairwise(parts))


def test_no_table_is_larger_than_any_device_has_for_constants(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _chained_layers(bundle)
    monkeypatch.setattr(chains, "MOST_NUMBERS", 80)
    program, source = with_chains(bundle.program, bundle.source, bundle.descriptor, 2)
    sizes = [int(size) for size in re.findall(r"__constant int chain_\w+_table\[(\d+)\]", source.plain)]
    assert len(sizes) == len(program.steady) > len(whole) and max(sizes) <= 80
    for each in program.steady:
        numbers = sum(chains._numbers(launch) for launch in program.launches[each.first - 1 : each.last])
        assert numbers + chains._HEAD in sizes


def test_a_program_has_few_chains_and_none_with_states(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "MOST_NUMBERS", 80)
    every = _chained_layers(bundle)
    monkeypatch.setattr(chains, "MOST_CHAINS", 2)
    monkeypatch.setattr(chains, "WORTH", 0)
    few = _chained_layers(bundle)
    assert len(few) == 2 < len(every) and set(few) < set(every)
    assert min(last - first for first, last in few) >= min(last - first for first, last in every)
    state = State("s", "t", (1,), "float32", bundle.program.tensors[0].name)
    kept = replace(bundle.program, states=(state,))
    assert with_chains(kept, bundle.source, bundle.descriptor, 2)[0] is kept


@pytest.mark.parametrize("line", ["barrier(CLK_LOCAL_MEM_FENCE);", "__local float shared[4];", "int n = get_num_groups(0);"])
def test_kernels_of_work_groups_are_not_chained(bundle: Bundle, line: str) -> None:
    (first, _), *_ = _chained_layers(bundle)
    launch = bundle.program.launches[first]
    texts = {launch.kernel: bundle.source.plain.split(f"//# {launch.kernel}\n")[1].split("\n//# ")[0]}
    wide = replace(launch, local_size=(2, 2)[: len(launch.global_size)])
    assert chains._fits(wide, texts)
    texts[launch.kernel] = texts[launch.kernel].replace(")\n{\n", f")\n{{\n    {line}\n", 1)
    assert not chains._fits(wide, texts)


def test_kernels_that_ask_for_the_number_of_work_items_are_not_chained(tmp_path: Path) -> None:
    """Neither in work-groups of one: a chain has one work-item."""
    model = write_mini_bundle(tmp_path / "m.flashmem")
    assert "get_global_size(0)" in kernel_texts(model.open().source.plain)["blend"]
    program, _ = with_chains(model.open().program, model.open().source, model.open().descriptor, 2)
    chained = [each for each in program.steady if each.launch.kernel.startswith("chain_")]
    blending = [layer for layer, each in enumerate(program.launches, start=1) if each.kernel == "blend"]
    assert chained and blending and not any(each.first <= layer <= each.last for each in chained for layer in blending)


def test_what_a_comment_holds_does_not_become_code() -> None:
    """Without its beginning, the rest of a comment would be read."""
    text = """//@ items 1
__kernel /* void f(int a)
#include <nowhere>
// */
void f(__global float* a) /* void g(int b) { \\
*/
{
    a[get_global_id(0)] = 1; // \\
#include <nowhere>
}
"""
    check_source(f"{KERNEL_MARK}f\n{text}")
    function = chains._function("f", text)
    assert "#" not in function.text and function.types == ("__global float*",)
    assert function.text.split()[:3] == ["static", "void", "f(const"] and "a[get_global_id(0)] = 1;" in function.text


@pytest.mark.parametrize("device", ["nvidia", "adreno750", "mali-g710"])
def test_other_devices_have_none(bundle: Bundle, device: str) -> None:
    program, source = with_chains(bundle.program, bundle.source, load_descriptor(device), 2)
    assert program is bundle.program and source is bundle.source


def test_a_table_has_all_of_a_number(bundle: Bundle) -> None:
    tensor = replace(bundle.program.tensors[0], offset=2**33 + 2**31 + 64)
    memory = chains._Memory(replace(bundle.program, tensors=(tensor,)))
    args = (Arg("tensor", tensor.name), Arg("int", -7), Arg("float", -0.125), Arg("constant", 64, 4))
    launch = replace(bundle.program.launches[0], args=args, global_size=(3, 2))
    assert chains._row(launch, 4, memory) == [4, 3, 2, 1, 0, -(2**31) + 64, 2, -7, -1107296256, 1, 64, 0]
    assert [arg.value for arg in memory.args] == ["states" if tensor.memory == "states" else "arena", "constants"]
