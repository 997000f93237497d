"""Determinants of matrices (Det)."""

from __future__ import annotations

from flashmem.compiler.ir.graph import Node
from flashmem.compiler.operators.registry import FLOAT, Operator, all_fp32, register


def _check_det(node: Node) -> str | None:
    shape = node.input(0).shape
    if len(shape) < 2 or shape[-1] != shape[-2]:
        return f"Det of shape {shape}, which are no square matrices"
    return None


register(
    __name__,
    Operator("Det", (FLOAT,), check=_check_det, kernel="determinant", keep_fp32=all_fp32, operator_class="hierarchical"),
)
