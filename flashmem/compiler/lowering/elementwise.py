"""Elementwise layers: the whole layer is one expression."""

from __future__ import annotations

from flashmem.compiler.ir.broadcast import best_split, matrix_of
from flashmem.compiler.lowering.context import Emitter
from flashmem.compiler.lowering.pointwise import Expression
from flashmem.compiler.operators.vector import STORED, Vector
from flashmem.compiler.passes.fusion import Layer
from flashmem.program.launches import Arg, KernelShape


def emit_elementwise(emitter: Emitter, layer: Layer) -> None:
    """One launch for the layer's whole expression."""
    domain = layer.output.shape or (1,)
    inside = {node.outputs[0] for node in layer.nodes}
    values = [v for node in layer.nodes for v in node.inputs if v is not None and v not in inside]
    split = best_split(domain, values)
    rows, columns = matrix_of(domain, split)
    vector = emitter.vector_for(columns)
    overwritten = emitter.places.overwritten.get(layer.main)
    expression = Expression(layer.nodes, None, domain, split, vector, emitter.storage, overwritten=overwritten)
    items = (-(-columns // vector), rows)
    local = emitter.work_group(items)
    kernel = emitter.kernels.kernel(
        "elementwise",
        attributes=emitter.attributes(local),
        stored=emitter.stored(layer.output),
        vector=vector,
        vec=Vector(vector).named(STORED[layer.output.dtype]),
        **emitter.tail_context(expression),
    )
    args: list[Arg | int] = [emitter.tensor(layer.output), *emitter.operand_args(expression), rows, columns]
    shape = KernelShape(rows=rows, columns=columns, run=columns, vector=vector)
    nbytes = emitter.nbytes(layer.output) + sum(map(emitter.nbytes, values))
    emitter.launch(layer, kernel, args, items, local, shape, nbytes=nbytes)
