"""One emitter for each kernel that an operator's declaration names: it turns a layer into launches."""

from __future__ import annotations

from collections.abc import Callable

from flashmem.compiler.lowering.attention import emit_attention
from flashmem.compiler.lowering.context import Emitter
from flashmem.compiler.lowering.contraction import emit_deform_convolution, emit_matmul
from flashmem.compiler.lowering.convolution import emit_convolution
from flashmem.compiler.lowering.elementwise import emit_elementwise
from flashmem.compiler.lowering.indexing import emit_gather_at, emit_place, emit_scatter
from flashmem.compiler.lowering.movement import (
    emit_concat,
    emit_expand,
    emit_frames,
    emit_gather,
    emit_pad,
    emit_slice,
    emit_tile,
    emit_transpose,
)
from flashmem.compiler.lowering.recurrent import emit_recurrent
from flashmem.compiler.lowering.reduction import emit_determinant, emit_group_normalization, emit_lrn, emit_reduction
from flashmem.compiler.lowering.sampling import emit_grid_sample, emit_roi_align
from flashmem.compiler.lowering.selection import emit_extreme, emit_scan, emit_top
from flashmem.compiler.lowering.spatial import emit_pool, emit_resize, emit_unpool
from flashmem.compiler.operators import REGISTRY
from flashmem.compiler.passes.fusion import Layer

EMITTERS: dict[str, Callable[[Emitter, Layer], None]] = {
    "attention": emit_attention,
    "concat": emit_concat,
    "convolution": emit_convolution,
    "deform_convolution": emit_deform_convolution,
    "determinant": emit_determinant,
    "expand": emit_expand,
    "extreme": emit_extreme,
    "frames": emit_frames,
    "gather": emit_gather,
    "gather_at": emit_gather_at,
    "grid_sample": emit_grid_sample,
    "group_normalization": emit_group_normalization,
    "lrn": emit_lrn,
    "matmul": emit_matmul,
    "pad": emit_pad,
    "place": emit_place,
    "pool": emit_pool,
    "recurrent": emit_recurrent,
    "reduction": emit_reduction,
    "resize": emit_resize,
    "roi_align": emit_roi_align,
    "scan": emit_scan,
    "scatter": emit_scatter,
    "slice": emit_slice,
    "tile": emit_tile,
    "top": emit_top,
    "transpose": emit_transpose,
    "unpool": emit_unpool,
}
"""By the name that declarations use (`compiler.operators.registry.Operator.kernel`)."""


def emit(emitter: Emitter, layer: Layer) -> None:
    """Append the launches of `layer` to the program."""
    operator = REGISTRY[layer.main.op]
    (EMITTERS[operator.kernel] if operator.kernel else emit_elementwise)(emitter, layer)
