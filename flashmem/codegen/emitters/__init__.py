"""One emitter for each kernel that an operator's declaration names: it turns a layer into launches."""

from __future__ import annotations

from collections.abc import Callable

from flashmem.codegen.emitter import Emitter
from flashmem.codegen.emitters.contraction import emit_convolution, emit_matmul
from flashmem.codegen.emitters.elementwise import emit_elementwise
from flashmem.codegen.emitters.movement import (
    emit_concat,
    emit_expand,
    emit_gather,
    emit_pad,
    emit_slice,
    emit_tile,
    emit_transpose,
)
from flashmem.codegen.emitters.recurrent import emit_recurrent
from flashmem.codegen.emitters.reduction import emit_reduction
from flashmem.codegen.emitters.spatial import emit_pool, emit_resize
from flashmem.graph.fusion import Layer
from flashmem.graph.operators import REGISTRY

EMITTERS: dict[str, Callable[[Emitter, Layer], None]] = {
    "concat": emit_concat,
    "convolution": emit_convolution,
    "expand": emit_expand,
    "gather": emit_gather,
    "matmul": emit_matmul,
    "pad": emit_pad,
    "pool": emit_pool,
    "recurrent": emit_recurrent,
    "reduction": emit_reduction,
    "resize": emit_resize,
    "slice": emit_slice,
    "tile": emit_tile,
    "transpose": emit_transpose,
}
"""By the name that declarations use (`graph.operators.registry.Operator.kernel`)."""


def emit(emitter: Emitter, layer: Layer) -> None:
    """Append the launches of `layer` to the program."""
    operator = REGISTRY[layer.main.op]
    (EMITTERS[operator.kernel] if operator.kernel else emit_elementwise)(emitter, layer)
