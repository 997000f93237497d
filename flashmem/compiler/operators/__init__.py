"""Operators that flashmem can run: one declaration each; `registry` explains the fields.

Those with a kernel are declared in the folders of their kernel families (`compiler.kernels`), all others here.
"""

from __future__ import annotations

from flashmem.compiler.kernels.attention import operators as attention
from flashmem.compiler.kernels.candidates import operators as candidates
from flashmem.compiler.kernels.contraction import integer_products
from flashmem.compiler.kernels.contraction import operators as contraction
from flashmem.compiler.kernels.indexing import block_rows, quantised_rows
from flashmem.compiler.kernels.indexing import operators as indexing
from flashmem.compiler.kernels.movement import operators as movement
from flashmem.compiler.kernels.recurrent import operators as recurrent
from flashmem.compiler.kernels.reduction import determinant, normalization
from flashmem.compiler.kernels.reduction import operators as reduction
from flashmem.compiler.kernels.rotary import operators as rotary
from flashmem.compiler.kernels.sampling import operators as sampling
from flashmem.compiler.kernels.selection import operators as selection
from flashmem.compiler.kernels.spatial import pooling, resize
from flashmem.compiler.kernels.suppression import operators as suppression
from flashmem.compiler.operators import (
    activation,
    arithmetic,
    casting,
    einsum,
    logic,
    quantization,
    random_numbers,
    spectral,
)
from flashmem.compiler.operators.registry import REGISTRY, Operator, is_elementwise, is_native, why_unsupported

FAMILIES = (
    arithmetic,
    logic,
    activation,
    casting,
    quantization,
    contraction,
    integer_products,
    einsum,
    recurrent,
    reduction,
    normalization,
    attention,
    rotary,
    pooling,
    resize,
    sampling,
    random_numbers,
    spectral,
    determinant,
    movement,
    indexing,
    block_rows,
    quantised_rows,
    selection,
    suppression,
    candidates,
)
"""The modules that declare operators, in the order of docs/reference/operators.md."""

__all__ = ["FAMILIES", "REGISTRY", "Operator", "is_elementwise", "is_native", "why_unsupported"]
