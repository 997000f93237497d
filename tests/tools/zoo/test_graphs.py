"""Graphs from configurations: the planning problem of the exported files, and the published sizes."""

from __future__ import annotations

import math
import re
from itertools import accumulate, pairwise
from typing import Any

import pytest

from flashmem.base.errors import UserError
from flashmem.base.types import ITEMSIZE
from flashmem.compiler.frontend.importer import collect_unsupported, import_model
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.operators import why_unsupported
from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.passes.pipeline import prepare
from flashmem.compiler.stages.pipeline import generate
from flashmem.planning.instance import build_instance
from flashmem.program.program import Program
from flashmem.target.descriptor import load_descriptor
from flashmem.tools.zoo.graphs import GptNeo, Llama, ResNet, Vit, WhisperEncoder, WideVit, zoo_graph
from tests.support.paths import DATA


def program_of(graph: Graph, device: str = "pocl") -> Program:
    collect_unsupported(graph, why_unsupported)
    graph = prepare(graph)
    return generate(fuse(graph), load_descriptor(device)).program


def planned(program: Program) -> list[tuple[Any, ...]]:
    """The planner's input for each layer."""
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
    ("name", "weights"),  # in millions; without the parts of position tables beyond 128 tokens that files lack
    [
        ("resnet50", 25.5), ("vit-b16", 86.5), ("vit-103m", 102.8), ("deepvit-204m", 203.6), ("vit-8b", 7520),
        ("whisper-medium-encoder", 307.2), ("whisper-tiny-encoder", 8.21), ("gptneo-125m", 162.5), ("gpt2", 123.75),
        ("opt-125m", 123.76), ("mobilenetv2", 3.488), ("mobilenetv3-large", 5.471), ("gptneo-1.3b", 1414),
        ("gptneo-2.7b", 2781), ("llama2-13b", 13016), ("llama2-70b", 68977),
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
    made = generate(fuse(graph), load_descriptor("pocl"), precision=precision)
    needed = max(_needed(made.program, made.source.plain))
    assert made.program.live_bytes == pytest.approx(needed, rel=0.01)
    assert needed <= made.program.arena_bytes <= 1.03 * needed


def _needed(program: Program, source: str) -> list[int]:
    """At each layer, the bytes of the arena that it reads or writes, or that are read later.

    The launches of one operator, which write parts of its result, are one step.
    """
    tensors = {t.name: (t.offset, t.offset + ITEMSIZE[t.dtype] * math.prod(t.shape)) for t in program.tensors}
    writes = {
        name: ["const" not in parameter for parameter in parameters.split(",")]
        for name, parameters in re.findall(r"void (\w+)\s*\(([^)]*)\)\s*{", source)
    }
    last = len(program.launches) + 1
    uses = [(*tensors[port.tensor], 0, True) for port in program.inputs if port.tensor is not None]
    uses += [(*tensors[gather.tensor], 0, True) for gather in program.host_embeddings]
    for layer, launch in enumerate(program.launches, start=1):
        for is_written, arg in zip(writes[launch.kernel], launch.args, strict=True):
            if arg.kind == "tensor":
                again = layer > 1 and program.launches[layer - 2].operators == launch.operators
                uses.append((*tensors[str(arg.value)], layer, is_written and not again))
    uses += [(*tensors[port.tensor], last, False) for port in program.outputs if port.tensor is not None]
    change = [0] * (last + 2)
    for start, end in pairwise(sorted({edge for use in uses for edge in use[:2]})):
        here = sorted({(layer, not is_new) for low, high, layer, is_new in uses if low <= start and end <= high})
        held = -1  # the last layer that is counted
        for (before, _), (layer, is_read) in pairwise([here[0], *here] if here else []):
            first = max(held + 1, before if is_read else layer)
            if first <= layer:
                change[first] += end - start
                change[layer + 1] -= end - start
                held = layer
    return list(accumulate(change))


def test_grouped_queries_share_their_keys() -> None:
    graph = Llama(1, 64, 8, 2, 96, 50).graph("tiny", 8)
    weights = {value.name: value.shape for value in graph.constants()}
    assert weights["layers.0.k_proj.weight"] == (64, 16) and weights["layers.0.q_proj.weight"] == (64, 64)
    program = program_of(graph)
    instance = build_instance(program, load_descriptor("pocl"), chunk_bytes=1024, m_peak=1 << 20)
    # seven matrices, the head, attention, which reads each key in place, and the token table, looked up by rows on the host
    assert sum(launch.macs > 0 for launch in program.launches) == 7 + 1 + 1
    assert not any("repeat" in tensor.name or len(tensor.shape) == 5 for tensor in program.tensors)
    assert len({part.weight for part in program.slices}) == 7 + 1 == len(instance.weights)


def test_every_name_can_be_asked_for_and_others_are_refused() -> None:
    for name in ("gptneo-125m", "gptneo-1.3b", "gptneo-2.7b", "vit-8b", "llama2-13b", "llama2-70b"):
        assert zoo_graph(name).nodes
    with pytest.raises(UserError, match="choose one of"):
        zoo_graph("llama9")
