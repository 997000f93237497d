"""What flashmem can run: one module per family of operators, and the question `why_unsupported`."""

from __future__ import annotations

from flashmem.graph.ir import Node
from flashmem.graph.operators.elementwise import ELEMENTWISE
from flashmem.graph.operators.rules import RULES


def is_elementwise(node: Node) -> bool:
    """Whether `node` maps each output element from the elements at the same (broadcast) place."""
    return node.op in ELEMENTWISE


def why_unsupported(node: Node) -> str | None:
    """The reason why `node` cannot run, or None if it can."""
    if node.op in RULES:
        return RULES[node.op](node)
    return None if node.op in ELEMENTWISE else f"operator {node.op} is not implemented"
