"""Operators that flashmem can run: one declaration each, one module for each family; `registry` explains the fields."""

from __future__ import annotations

from flashmem.compiler.operators import (
    activation,
    arithmetic,
    attention,
    candidates,
    casting,
    contraction,
    determinant,
    einsum,
    indexing,
    integer_products,
    logic,
    movement,
    normalization,
    pooling,
    quantised_rows,
    quantization,
    random_numbers,
    recurrent,
    reduction,
    resize,
    rotary,
    sampling,
    selection,
    spectral,
    suppression,
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
    quantised_rows,
    selection,
    suppression,
    candidates,
)
"""The modules that declare operators, in the order of docs/reference/operators.md."""

__all__ = ["FAMILIES", "REGISTRY", "Operator", "is_elementwise", "is_native", "why_unsupported"]
