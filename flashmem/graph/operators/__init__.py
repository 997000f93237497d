"""What flashmem can run: each operator is one declaration, one module for each family; `registry` explains its fields."""

from __future__ import annotations

from flashmem.graph.operators import (
    activation,
    arithmetic,
    casting,
    contraction,
    logic,
    movement,
    normalization,
    pooling,
    quantization,
    reduction,
    resize,
)
from flashmem.graph.operators.registry import REGISTRY, Operator, is_elementwise, is_native, why_unsupported

FAMILIES = (
    arithmetic,
    logic,
    activation,
    casting,
    contraction,
    quantization,
    reduction,
    normalization,
    pooling,
    resize,
    movement,
)
"""The modules that declare operators, in the order of docs/operators.md."""

__all__ = ["FAMILIES", "REGISTRY", "Operator", "is_elementwise", "is_native", "why_unsupported"]
