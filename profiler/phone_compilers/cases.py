"""One kernel of each family and of each kernel config in a device descriptor, as OpenCL C, without a model."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from flashmem.base.types import TEXEL_BYTES
from flashmem.bundle.language import LOGITS
from flashmem.compiler.configs.listed import configs_of
from flashmem.compiler.frontend.importer import import_model
from flashmem.compiler.frontend.language.candidates import with_candidates
from flashmem.compiler.ir.builder import constant
from flashmem.compiler.ir.graph import Graph, GraphPort
from flashmem.compiler.kernels.contraction.configs import FEW_ROWS, SlicedContraction
from flashmem.compiler.kernels.indexing.quantised_rows import row_bytes
from flashmem.compiler.lowering.templates import KernelLibrary
from flashmem.compiler.operators import why_unsupported
from flashmem.profiler.cases import Precision, targets_of
from flashmem.profiler.phone_kit.models import families
from flashmem.profiler.shapes import Attention, RowSoftmax
from flashmem.profiler.sketch import Sketch
from flashmem.program.kernel_text import kernel_texts
from flashmem.target.descriptor import DeviceDescriptor

ROWS = 128
DEPTH = 256
COLUMNS = 256
PLACES = 14
HEAD = 64
"""Sizes divisible by every listed config, so that no case uses a smaller tile: ViT's and ResNet's have such sizes."""

CONTRACTIONS = ("matmul", "conv", "matmul_dynamic")


def kernels_of(descriptor: DeviceDescriptor) -> dict[str, str]:
    """Kernels by family and config, for instance `matmul-8x4`: the tile, each listed config, and a few other families."""
    return {name: _text(name, *case) for name, case in _cases(descriptor)}


def family_kernels_of(descriptor: DeviceDescriptor) -> dict[str, str]:
    """A kernel of each template that `kernels_of` lacks, for instance `kit-scatter`, and a convolution in groups of channels.

    Each is the longest of its template in the phone kit's model, which has every family.
    """
    present = {template_of(text) for text in kernels_of(descriptor).values()}
    with tempfile.TemporaryDirectory() as folder:
        graph = import_model(families().save(Path(folder)), {}, why_unsupported)
        targets = targets_of(graph, descriptor, "fp32", "phones", "kit")
    found = {"conv-grouped": _text("conv-grouped", _grouped_convolution(), descriptor, "fp32")}
    for text in kernel_texts(targets[0].source.plain).values():
        name = f"kit-{template_of(text)}"
        if template_of(text) not in present and len(text) > len(found.get(name, "")):
            found[name] = text
    return found


def template_of(text: str) -> str:
    """The file name, without its folder and ending, of the template that made the kernel in `text`."""
    names: list[str] = re.findall(r"\bvoid (\w+)_[0-9a-f]+\(", text)
    return names[-1]


def interleaved_kernels_of(descriptor: DeviceDescriptor) -> dict[str, str]:
    """The same products, convolutions and attention with interleaved copy streams, as transfer mode `interleave` runs them.

    Those with weights in textures copy to textures of the weights' type, others to buffers.
    """
    cases = [case for case in _cases(descriptor) if case[0].partition("-")[0] in (*CONTRACTIONS, "depthwise", "attention")]
    return {name: _text(name, *case, lane=True) for name, case in cases}


def lane_kernels_of(descriptor: DeviceDescriptor) -> dict[str, str]:
    """The kernels that only copy weights: to buffers, and to textures of each channel type."""
    source = KernelLibrary(descriptor.code).source("buffer", tuple(TEXEL_BYTES))
    return {name: text for name, text in kernel_texts(source.lane).items() if name.startswith("lane_copy")}


_Case = tuple[Graph, DeviceDescriptor, Precision]


def _cases(descriptor: DeviceDescriptor) -> Iterator[tuple[str, _Case]]:
    for family in CONTRACTIONS:
        for config in configs_of(descriptor, family):
            if isinstance(config, SlicedContraction):
                yield f"{family}-{config.name}", (_of_few_rows(1), descriptor, "fp32")
                yield f"{family}-{config.name}-checked", (_of_few_rows(FEW_ROWS), descriptor, "fp32")
                continue
            precision: Precision = "fp16" if "half" in config.needs else "fp32"
            yield f"{family}-{config.name}", (_contraction(family), replace(descriptor, only=config.name), precision)
        buffers = descriptor.on_path("buffer")
        if family != "matmul_dynamic" and buffers.memory_paths != descriptor.memory_paths:
            yield f"{family}-tile-buffer", (_contraction(family), replace(buffers, only="tile"), "fp32")
    for config in configs_of(descriptor, "attention"):
        many = Attention(12, ROWS, HEAD, ROWS)
        attention = many if config.fits(many.workload("buffer")) else Attention(12, 1, HEAD, ROWS)
        yield f"attention-{config.name}", (attention.graph(), replace(descriptor, only=config.name), "fp32")
    for config in configs_of(descriptor, "reduce_rows"):
        yield f"reduce_rows-{config.name}", (RowSoftmax(1024, 768).graph(), replace(descriptor, only=config.name), "fp32")
    for family, graph in _others():
        yield family, (graph, descriptor, "fp32")


def _contraction(family: str) -> Graph:
    """A contraction whose operand another operator computes, and so stores in half if the precision is fp16."""
    g = Sketch()
    if family == "matmul":
        x = g.node("Tanh", [g.input(1, ROWS, DEPTH)], (1, ROWS, DEPTH))
        return g.finish(g.node("MatMul", [x, g.weight(DEPTH, COLUMNS)], (1, ROWS, COLUMNS)))
    if family == "conv":
        shape = (1, HEAD, PLACES, PLACES)
        x = g.node("Tanh", [g.input(*shape)], shape)
        weight = g.weight(HEAD, HEAD, 3, 3)
        return g.finish(g.node("Conv", [x, weight], shape, kernel_shape=[3, 3], pads=[1] * 4))
    left = (1, 12, ROWS, HEAD)
    right = (1, 12, HEAD, ROWS)
    a = g.node("Tanh", [g.input(*left)], left)
    b = g.node("Tanh", [g.input(*right)], right)
    return g.finish(g.node("MatMul", [a, b], (1, 12, ROWS, ROWS)))


def _of_few_rows(rows: int) -> Graph:
    """A product of few rows with weights of 4 bits."""
    g = Sketch()
    return g.finish(g.node("MatMul", [g.input(1, rows, DEPTH), g.nibbles(DEPTH, COLUMNS, 32)], (1, rows, COLUMNS)))


def _others() -> Iterator[tuple[str, Graph]]:
    """A graph for some families that have no configs."""
    rows = (1, ROWS, COLUMNS)
    image = (1, HEAD, PLACES, PLACES)
    g = Sketch()
    yield "elementwise", g.finish(g.node("Gelu", [g.node("Add", [g.input(*rows), g.input(*rows)], rows)], rows))
    g = Sketch()
    yield "movement", g.finish(g.node("Transpose", [g.input(1, ROWS, 12, HEAD)], (1, 12, ROWS, HEAD), perm=[0, 2, 1, 3]))
    g = Sketch()
    yield "movement-transpose", g.finish(g.node("Transpose", [g.input(ROWS, COLUMNS)], (COLUMNS, ROWS), perm=[1, 0]))
    g = Sketch()
    depthwise = g.node("Conv", [g.input(*image), g.weight(HEAD, 1, 3, 3)], image, kernel_shape=[3, 3], pads=[1] * 4, group=HEAD)
    yield "depthwise", g.finish(depthwise)
    g = Sketch()
    halved = {"kernel_shape": [5, 5], "pads": [2] * 4, "strides": [2, 2], "group": HEAD}
    strided = g.node("Conv", [g.input(*image), g.weight(HEAD, 1, 5, 5)], (1, HEAD, PLACES // 2, PLACES // 2), **halved)
    yield "depthwise-strided", g.finish(strided)
    g = Sketch()
    photo = g.input(1, 3, 224, 224)
    filters = g.weight(HEAD, 3, 7, 7)
    first = g.node("Conv", [photo, filters], (1, HEAD, 112, 112), kernel_shape=[7, 7], pads=[3] * 4, strides=[2, 2])
    yield "conv-first", g.finish(first)
    g = Sketch()
    pooled = (1, HEAD, PLACES // 2, PLACES // 2)
    yield "pool", g.finish(g.node("MaxPool", [g.input(*image)], pooled, kernel_shape=[2, 2], strides=[2, 2]))
    g = Sketch()
    k = constant("k", np.array([ROWS // 4]))
    yield "rank_among_runs", g.finish(g.node("TopK", [g.input(1, ROWS * COLUMNS), k], (1, ROWS // 4)))
    g = Sketch()
    yield "reduce_columns", g.finish(g.node("ReduceMean", [g.input(*rows)], (1, 1, COLUMNS), axes=[1]))
    yield from _of_decoders()


def _of_decoders() -> Iterator[tuple[str, Graph]]:
    """Rotary positions in both forms, alone and with writes into caches; an RMS norm whose kernel also computes and writes the
    residual sum before it, a write into a cache in int8, and both steps of candidates among a vocabulary.
    """
    heads = (1, ROWS, 12, HEAD)
    rows = (1, ROWS, COLUMNS)
    for name, interleaved in (("rotary", False), ("rotary-interleaved", True)):
        g = Sketch()
        tables = [g.input(1, ROWS, 1, HEAD // 2) for _ in range(2)]
        yield name, g.finish(g.node("Rotary", [g.input(*heads), *tables], heads, half=HEAD // 2, interleaved=interleaved))
        yield name.replace("rotary", "rotary_scatter"), _with_caches(interleaved)
    g = Sketch()
    total = g.node("Add", [g.input(*rows), g.input(*rows)], rows)
    norm = g.node("NormalizeRms", [total], rows, axes=(2,), epsilon=1e-5)
    product = g.node("MatMul", [g.node("Mul", [norm, g.weight(COLUMNS)], rows), g.weight(COLUMNS, COLUMNS)], rows)
    yield "reduce_rows-sum-and-rms-norm", g.finish(g.node("Add", [product, total], rows))
    g = Sketch()
    cache = (1, 2, ROWS, row_bytes(HEAD))
    places = (2 * ROWS, ROWS, 1)
    written = [g.input(*cache, dtype="int8"), g.input(2, 3, dtype="int64"), g.input(2, HEAD)]
    plan = {"items": (), "index": (), "update": (), "target": (), "steps": 2, "index_step": 3, "update_step": ((2, HEAD),)}
    plan |= {"update_start": 0}
    plan |= {"sizes": cache[:3], "strides": places, "stride": row_bytes(HEAD), "places": 2 * ROWS, "size": HEAD}
    plan |= {"reduction": "none", "ordered": True, "covered": False, "fill": None}
    yield "scatter_quantised", g.finish(g.node("ScatterQuantised", written, cache, **plan))
    g = Sketch()
    logits = g.node("Neg", [g.input(1, 8, 128_256)], (1, 8, 128_256))
    graph = with_candidates(replace(g.finish(logits), outputs=[GraphPort(LOGITS, "float32", logits)]))
    yield from ((family, graph) for family in ("candidates_by_rank", "join_candidates"))


def _with_caches(interleaved: bool) -> Graph:
    """Rotary positions of one token's 10 heads of queries and 2 of keys, and the writes of keys and values into two states."""
    g = Sketch()
    heads = (1, 1, 12, HEAD)
    cache = (1, 2, ROWS, HEAD)
    tables = [g.input(1, 1, 1, HEAD // 2) for _ in range(2)]
    x = g.input(*heads)  # read again later, as a model reads its values there
    turned = g.node("Rotary", [x, *tables], heads, half=HEAD // 2, interleaved=interleaved)
    at = g.input(2, 3, dtype="int64")
    values = g.input(1, 1, 2, HEAD)
    caches = [g.input(*cache) for _ in range(2)]
    plan = {"items": (HEAD,), "index": (0,), "update": (1,), "target": (1,), "steps": 2, "index_step": 3}
    plan |= {
        "update_step": ((2, HEAD),),
        "sizes": cache[:3],
        "strides": (2 * ROWS, ROWS, 1),
        "stride": HEAD,
        "places": 2 * ROWS,
    }
    plan |= {"reduction": "none", "ordered": True, "covered": False, "fill": None}
    new = [(turned, 10 * HEAD), (values, 0)]
    written = [
        g.node("ScatterAt", [past, at, updates], cache, **plan, update_start=start)
        for past, (updates, start) in zip(caches, new, strict=True)
    ]
    ports = [GraphPort(f"present{number}", each.dtype, each) for number, each in enumerate(written)]
    states = tuple((past.name, port.name) for past, port in zip(caches, ports, strict=True))
    graph = g.finish(g.node("Add", [turned, x], heads))
    return replace(graph, outputs=[*graph.outputs, *ports], states=states)


def _grouped_convolution() -> Graph:
    """A convolution in groups of 16 channels."""
    g = Sketch()
    image = (1, HEAD, PLACES, PLACES)
    x = g.input(*image)
    weight = g.weight(HEAD, 16, 3, 3)
    return g.finish(g.node("Conv", [x, weight], image, kernel_shape=[3, 3], pads=[1] * 4, group=HEAD // 16))


def _text(name: str, graph: Graph, descriptor: DeviceDescriptor, precision: Precision, *, lane: bool = False) -> str:
    """The text of the last kernel of the case's family. `lane`: with an interleaved copy stream."""
    family = name.partition("-")[0]
    found = [each for each in targets_of(graph, descriptor, precision, "phones", name) if each.launch.shape.family == family]
    source = found[-1].source
    return kernel_texts(source.lane if lane else source.plain)[found[-1].launch.kernel]
