"""Comparisons, logic and Where, elementwise. A boolean is the int 0 or 1 in registers."""

from __future__ import annotations

from collections.abc import Sequence

from flashmem.compiler.ir.graph import Node
from flashmem.compiler.operators.arithmetic import infix
from flashmem.compiler.operators.registry import ANY, BOOL, FLOAT, NUMBERS, Emit, elementwise, register
from flashmem.compiler.operators.vector import Vector


def _compare(symbol: str) -> Emit:
    return lambda node, x, v: v.truth(node.input(0).dtype, f"{x[0]} {symbol} {x[1]}")


def _is_infinite(node: Node, x: Sequence[str], v: Vector) -> str:
    signs = [(">", "detect_positive"), ("<", "detect_negative")]
    found = [
        f"(isinf({x[0]}) & ({x[0]} {symbol} {v.literal('float32', 0)}))"
        for symbol, name in signs
        if node.attributes.get(name, 1)
    ]
    return v.truth("float32", " | ".join(found)) if found else v.literal("bool", 0)


register(
    __name__,
    elementwise("And", BOOL, infix("&")),
    elementwise("Equal", ANY, _compare("==")),
    elementwise("Greater", NUMBERS, _compare(">")),
    elementwise("GreaterOrEqual", NUMBERS, _compare(">=")),
    elementwise("IsInf", FLOAT, _is_infinite),
    elementwise("IsNaN", FLOAT, lambda node, x, v: v.truth("float32", f"isnan({x[0]})")),
    elementwise("Less", NUMBERS, _compare("<")),
    elementwise("LessOrEqual", NUMBERS, _compare("<=")),
    elementwise("Not", BOOL, lambda node, x, v: f"{x[0]} ^ 1"),
    elementwise("Or", BOOL, infix("|")),
    elementwise("Where", (BOOL, ANY), lambda node, x, v: v.choose(node.input(1).dtype, x[0], x[1], x[2])),
    elementwise("Xor", BOOL, infix("^")),
)
