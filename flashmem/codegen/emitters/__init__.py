"""One emitter for each kernel that an operator's declaration names: it turns a layer into launches."""

from __future__ import annotations

from collections.abc import Callable

from flashmem.codegen.emitter import Emitter
from flashmem.codegen.emitters.attention import emit_attention
from flashmem.codegen.emitters.contraction import emit_deform_convolution, emit_matmul
from flashmem.codegen.emitters.convolution import emit_convolution
from flashmem.codegen.emitters.elementwise import emit_elementwise
from flashmem.codegen.emitters.indexing import emit_gather_at, emit_place, emit_scatter
from flashmem.codegen.emitters.movement import (
    emit_concat,
    emit_expand,
    emit_frames,
    emit_gather,
    emit_pad,
    emit_slice,
    emit_tile,
    emit_transpose,
)
from flashmem.codegen.emitters.recurrent import emit_recurrent
from flashmem.codegen.emitters.reduction import emit_determinant, emit_group_normalization, emit_lrn, emit_reduction
from flashmem.codegen.emitters.sampling import emit_grid_sample, emit_roi_align
from flashmem.codegen.emitters.selection import emit_extreme, emit_scan, emit_top
from flashmem.codegen.emitters.spatial import emit_pool, emit_resize, emit_unpool
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
