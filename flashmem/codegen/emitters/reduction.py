"""Reductions, softmax and normalization over a run of neighbouring axes."""

from __future__ import annotations

import math

from flashmem.codegen.emitter import Emitter
from flashmem.graph.fusion import Layer
from flashmem.graph.operators.elementwise import VectorType
from flashmem.program import Arg, KernelShape

# (neutral element, contribution of an element v, how two join, the result from the total `$` over `columns` elements)
SIMPLE = {
    "ReduceL1": ("0.0f", "fabs(v)", "$a + $b", "$"),
    "ReduceL2": ("0.0f", "v * v", "$a + $b", "sqrt($)"),
    "ReduceLogSum": ("0.0f", "v", "$a + $b", "log($)"),
    "ReduceMax": ("-INFINITY", "v", "fmax($a, $b)", "$"),
    "ReduceMean": ("0.0f", "v", "$a + $b", "$ / (float)columns"),
    "ReduceMin": ("INFINITY", "v", "fmin($a, $b)", "$"),
    "ReduceProd": ("1.0f", "v", "$a * $b", "$"),
    "ReduceSum": ("0.0f", "v", "$a + $b", "$"),
    "ReduceSumSquare": ("0.0f", "v * v", "$a + $b", "$"),
}
REDUCTIONS = (*SIMPLE, "ReduceLogSumExp", "Softmax", "LogSoftmax", "Normalize")


def emit_reduction(emitter: Emitter, layer: Layer) -> None:
    """Rows if the reduced axes are the last ones, columns otherwise."""
    node = layer.main
    x = node.input(0)
    axes = node.attributes["axes"]
    outer, depth = math.prod(x.shape[: axes[0]]), math.prod(x.shape[axes[0] : axes[-1] + 1])
    inner = math.prod(x.shape[axes[-1] + 1 :])
    neutral, each, join, final = SIMPLE.get(node.op, ("", "", "", ""))
    context = {
        "op": node.op,
        "neutral": neutral,
        "each": each,
        "join": join,
        "final": final,
        "epsilon": VectorType(1).float_literal(node.attributes.get("epsilon", 0.0)),
    }
    pointers = [emitter.operand(x), emitter.tensor(layer.output)]
    if inner == 1:
        _emit_rows(emitter, layer, context, pointers, outer, depth)
    else:
        _emit_columns(emitter, layer, context, pointers, outer, depth, inner)


def _emit_rows(emitter: Emitter, layer: Layer, context: dict[str, str], pointers: list[Arg], outer: int, depth: int) -> None:
    lanes = emitter.descriptor.tile.lanes
    vector = emitter.vector_for(depth)
    tail = emitter.tail(layer, layer.main.attributes["axes"][0], vector)
    local = (lanes, 1)
    kernel = emitter.kernels.kernel(
        "reduce_rows",
        attributes=emitter.attributes(local),
        lanes=lanes,
        **context,
        **emitter.vectors(vector),
        **emitter.tail_context(tail),
    )
    args: list[Arg | int] = [*pointers, *emitter.operand_args(tail), outer, depth]
    shape = KernelShape(rows=outer, columns=layer.main.outputs[0].size // outer, depth=depth, run=depth, vector=vector)
    emitter.launch(layer, kernel, args, (lanes, outer), local, "hierarchical", shape)


def _emit_columns(
    emitter: Emitter,
    layer: Layer,
    context: dict[str, str],
    pointers: list[Arg],
    outer: int,
    depth: int,
    inner: int,
) -> None:
    vector = emitter.vector_for(inner)
    tail = emitter.tail(layer, layer.main.attributes["axes"][-1] + 1, vector)
    items = (-(-inner // vector), outer)
    local = emitter.work_group(items)
    kernel = emitter.kernels.kernel(
        "reduce_columns",
        attributes=emitter.attributes(local),
        **context,
        **emitter.vectors(vector),
        **emitter.tail_context(tail),
    )
    shape = KernelShape(rows=layer.main.outputs[0].size // inner, columns=inner, depth=depth, stride=inner, vector=vector)
    args: list[Arg | int] = [*pointers, *emitter.operand_args(tail), outer, depth, inner]
    emitter.launch(layer, kernel, args, items, local, "hierarchical", shape)
