"""One emitter for each form that is left after normalization: it turns a layer into launches."""

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
from flashmem.codegen.emitters.reduction import REDUCTIONS, emit_reduction
from flashmem.codegen.emitters.spatial import emit_pool, emit_resize
from flashmem.graph.fusion import Layer
from flashmem.graph.operators.elementwise import ELEMENTWISE

EMITTERS: dict[str, Callable[[Emitter, Layer], None]] = {
    **dict.fromkeys(ELEMENTWISE, emit_elementwise),
    **dict.fromkeys(REDUCTIONS, emit_reduction),
    "AveragePool": emit_pool,
    "Concat": emit_concat,
    "Conv": emit_convolution,
    "ConvTranspose": emit_convolution,
    "Expand": emit_expand,
    "Gather": emit_gather,
    "MatMul": emit_matmul,
    "MaxPool": emit_pool,
    "Pad": emit_pad,
    "Resize": emit_resize,
    "Slice": emit_slice,
    "Tile": emit_tile,
    "Transpose": emit_transpose,
}
