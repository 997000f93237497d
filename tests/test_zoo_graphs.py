"""Graphs from configurations: the same planning problem as the exported files, and sizes that are the published ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from flashmem.codegen.program import generate
from flashmem.device import load_descriptor
from flashmem.errors import UserError
from flashmem.graph.fusion import fuse
from flashmem.graph.ir import Graph
from flashmem.graph.onnx_import import collect_unsupported, import_model
from flashmem.graph.operators import why_unsupported
from flashmem.graph.passes import prepare
from flashmem.planning.problem import build_problem
from flashmem.program import ITEMSIZE, Program
from flashmem.zoo.graphs import GptNeo, Llama, ResNet, Vit, WhisperEncoder, WideVit, zoo_graph

DATA = Path(__file__).parent / "data"


def program_of(graph: Graph, device: str = "pocl") -> Program:
    collect_unsupported(graph, why_unsupported)
    graph = prepare(graph)
    return generate(graph, fuse(graph), load_descriptor(device)).program


def planned(program: Program) -> list[tuple[Any, ...]]:
    """What a planner sees of each layer."""
    sizes = {part.name: part.nbytes for part in program.slices}
    return [
        (launch.operator_class, launch.macs, launch.bytes, len(launch.operators), launch.global_size,
         [sizes[str(arg.value)] for arg in launch.args if arg.kind == "slice"])
        for launch in program.launches
    ]  # fmt: skip


@pytest.mark.parametrize("device", ["pocl", "generic-gpu"])
@pytest.mark.parametrize(
    ("file", "graph"),
    [
        ("gptneo-tiny.onnx", GptNeo(2, 32, 4, 307, window=8).graph("tiny", 16)),
        ("vit-tiny.onnx", Vit(2, 32, 4, 64, 8, 10).graph("tiny", 32)),
        ("deepvit-tiny.onnx", WideVit(2, 32, 4, 64, 8, 10, mixing=True).graph("tiny", 32)),
        ("whisper-tiny-encoder.onnx", WhisperEncoder(2, 32, 4, 64, bins=8).graph("tiny", 32)),
        ("resnet-tiny.onnx", ResNet((1, 1), (16, 32), 8, 10).graph("tiny", 32)),
    ],
)
def test_a_graph_from_a_configuration_is_planned_as_the_exported_file(file: str, graph: Graph, device: str) -> None:
    exported = program_of(import_model(DATA / file, {}, why_unsupported), device)
    described = program_of(graph, device)
    assert planned(described) == planned(exported)
    assert [part.nbytes for part in described.slices] == [part.nbytes for part in exported.slices]
    assert described.arena_bytes == exported.arena_bytes and described.weights_bytes == exported.weights_bytes


@pytest.mark.parametrize(
    ("name", "weights"),  # in millions; without what the file's tables of positions leave out beyond 128 tokens
    [
        ("resnet50", 25.5), ("vit-b16", 86.5), ("vit-103m", 102.8), ("deepvit-204m", 203.6), ("vit-8b", 7520),
        ("whisper-medium-encoder", 307.2), ("gptneo-125m", 162.5), ("gptneo-1.3b", 1414), ("gptneo-2.7b", 2781),
        ("llama2-13b", 13016), ("llama2-70b", 68977),
    ],
)  # fmt: skip
def test_models_have_the_published_number_of_weights(name: str, weights: float) -> None:
    graph = zoo_graph(name)
    found = sum(math.prod(value.shape) for value in graph.constants() if value.dtype == "float32")
    assert found / 1e6 == pytest.approx(weights, rel=0.005)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["resnet50", "vit-b16", "deepvit-204m", "whisper-medium-encoder", "gptneo-125m"])
def test_the_arena_is_hardly_larger_than_what_is_needed_at_once(name: str, precision: Any) -> None:
    graph = prepare(zoo_graph(name))
    program = generate(graph, fuse(graph), load_descriptor("pocl"), precision=precision).program
    touched = max(_touched(program))
    assert touched <= program.live_bytes <= program.arena_bytes <= 1.03 * touched


def _touched(program: Program) -> list[int]:
    """At each layer, the bytes of the arena in tensors that were used before, or now, and are used later, or now."""
    tensors = {tensor.name: tensor for tensor in program.tensors}
    last = len(program.launches) + 1
    layers: dict[str, list[int]] = {}
    for port, layer in [*((port, 0) for port in program.inputs), *((port, last) for port in program.outputs)]:
        if port.tensor is not None:
            layers.setdefault(port.tensor, []).append(layer)
    for gather in program.row_gathers:
        layers.setdefault(gather.tensor, []).append(0)
    for layer, launch in enumerate(program.launches, start=1):
        for arg in launch.args:
            if arg.kind == "tensor":
                layers.setdefault(str(arg.value), []).append(layer)
    found = []
    for layer in range(last + 1):
        used = [tensors[name] for name, each in layers.items() if min(each) <= layer <= max(each)]
        end = total = 0
        for start, nbytes in sorted((t.offset, ITEMSIZE[t.dtype] * math.prod(t.shape)) for t in used):
            total += max(0, start + nbytes - max(end, start))
            end = max(end, start + nbytes)
        found.append(total)
    return found


def test_grouped_queries_share_their_keys() -> None:
    graph = Llama(1, 64, 8, 2, 96, 50).graph("tiny", 8)
    weights = {value.name: value.shape for value in graph.constants()}
    assert weights["layers.0.k_proj.weight"] == (64, 16) and weights["layers.0.q_proj.weight"] == (64, 64)
    program = program_of(graph)
    problem = build_problem(program, load_descriptor("pocl"), chunk_bytes=1024, m_peak=1 << 20)
    # seven matrices, the head, attention, which reads each key where it lies, and, row by row on the host, the table of tokens
    assert sum(launch.macs > 0 for launch in program.launches) == 7 + 1 + 1
    assert not any("repeat" in tensor.name or len(tensor.shape) == 5 for tensor in program.tensors)
    assert len({part.weight for part in program.slices}) == 7 + 1 == len(problem.weights)


def test_every_name_can_be_asked_for_and_others_are_refused() -> None:
    for name in ("gptneo-125m", "gptneo-1.3b", "gptneo-2.7b", "vit-8b", "llama2-13b", "llama2-70b"):
        assert zoo_graph(name).nodes
    with pytest.raises(UserError, match="choose one of"):
        zoo_graph("llama9")
