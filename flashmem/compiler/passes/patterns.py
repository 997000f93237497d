"""Node patterns that several passes match."""

from __future__ import annotations

from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.operators import is_elementwise


def is_by_column(node: Node, value: Value) -> bool:
    """Whether `node` treats all rows of `value` alike, column by column.

    Its other operands are then constants with one element for each column, or one for all.
    """
    if not is_elementwise(node) or node.outputs[0].shape != value.shape or node.inputs.count(value) != 1:
        return False
    others = [other for other in node.inputs if other is not None and other is not value]
    return all(other.constant is not None and (other.size == 1 or _has_columns(other, value)) for other in others)


def _has_columns(constant: Value, value: Value) -> bool:
    return constant.size == value.shape[-1] == constant.shape[-1]
