"""Registry of lowerings by kernel name: each turns a group into launches."""

from __future__ import annotations

from collections.abc import Callable

from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.lowering.attention import lower_attention
from flashmem.compiler.lowering.candidates import lower_candidates
from flashmem.compiler.lowering.context import LoweringContext
from flashmem.compiler.lowering.contraction import lower_deform_convolution, lower_matmul
from flashmem.compiler.lowering.convolution import lower_convolution
from flashmem.compiler.lowering.elementwise import lower_elementwise
from flashmem.compiler.lowering.indexing import (
    lower_gather_at,
    lower_place,
    lower_scatter,
    lower_scatter_quantised,
)
from flashmem.compiler.lowering.movement import (
    lower_concat,
    lower_expand,
    lower_frames,
    lower_gather,
    lower_pad,
    lower_slice,
    lower_tile,
    lower_transpose,
)
from flashmem.compiler.lowering.recurrent import lower_recurrent
from flashmem.compiler.lowering.reduction import lower_determinant, lower_group_normalization, lower_lrn, lower_reduction
from flashmem.compiler.lowering.rotary import lower_rotary
from flashmem.compiler.lowering.sampling import lower_grid_sample, lower_roi_align
from flashmem.compiler.lowering.selection import lower_extreme, lower_scan, lower_top
from flashmem.compiler.lowering.spatial import lower_pool, lower_resize, lower_unpool
from flashmem.compiler.lowering.suppression import lower_suppression
from flashmem.compiler.operators import REGISTRY

LOWERINGS: dict[str, Callable[[LoweringContext, FusionGroup], None]] = {
    "attention": lower_attention,
    "candidates": lower_candidates,
    "concat": lower_concat,
    "convolution": lower_convolution,
    "deform_convolution": lower_deform_convolution,
    "determinant": lower_determinant,
    "expand": lower_expand,
    "extreme": lower_extreme,
    "frames": lower_frames,
    "gather": lower_gather,
    "gather_at": lower_gather_at,
    "grid_sample": lower_grid_sample,
    "group_normalization": lower_group_normalization,
    "lrn": lower_lrn,
    "matmul": lower_matmul,
    "pad": lower_pad,
    "place": lower_place,
    "pool": lower_pool,
    "recurrent": lower_recurrent,
    "reduction": lower_reduction,
    "resize": lower_resize,
    "roi_align": lower_roi_align,
    "rotary": lower_rotary,
    "scan": lower_scan,
    "scatter": lower_scatter,
    "scatter_quantised": lower_scatter_quantised,
    "slice": lower_slice,
    "suppression": lower_suppression,
    "tile": lower_tile,
    "top": lower_top,
    "transpose": lower_transpose,
    "unpool": lower_unpool,
}
"""Lowerings by the kernel name in operator declarations (`compiler.operators.registry.Operator.kernel`)."""


def lower(context: LoweringContext, group: FusionGroup) -> None:
    """Append the launches of `group` to the program."""
    operator = REGISTRY[group.main.op]
    (LOWERINGS[operator.kernel] if operator.kernel else lower_elementwise)(context, group)
