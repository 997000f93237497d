"""Whole-number expressions of C in a kernel's statements, evaluated by interval arithmetic.

They come from strangers. So their length, their depth and their numbers are limited: parsing and evaluating end in a time that
grows with the length of the text, whatever the text is.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flashmem.base.errors import BundleError

MOST_LETTERS = 2000
"""The longest statement or index. flashmem's have up to 164 letters."""

_MOST_DEPTH = 100  # flashmem's have up to 13
_LARGEST = 1 << 128  # a product of four numbers of 32 bits
_WRITTEN = re.compile(r"[\w \t+*/%(),-]+", re.ASCII)
_NOT_DECIMAL = re.compile(r"\b\d\w*[A-Za-z_]")  # Python warns of some


@dataclass(frozen=True)
class Range:
    """The integers from `low` to `high`, both included."""

    low: int
    high: int


Expression = Callable[[Mapping[str, Range]], Range]
"""The values of an expression for values of its variables.

Raises KeyError for an unknown variable, and ArithmeticError where it has no value, or one of more than 128 bits.
"""


@functools.lru_cache(1 << 14)
def parse_expression(text: str) -> Expression:
    """Compile a C integer expression to a function on intervals. Raises BundleError: it is none, or too long or too deep."""
    text = text.strip()
    try:
        if len(text) > MOST_LETTERS or not _WRITTEN.fullmatch(text) or _NOT_DECIMAL.search(text):
            raise ValueError("not an expression of whole numbers")
        return _built(ast.parse(text, mode="eval").body, _MOST_DEPTH)
    except (SyntaxError, ValueError, KeyError, RecursionError, MemoryError) as error:  # MemoryError: of Python's parser
        raise BundleError(f"the bundle is damaged: a kernel states {text[:100]!r}; compile the model again") from error


def arguments(text: str) -> list[str]:
    """Split `text` at the commas outside of brackets."""
    parts = []
    depth = 0
    begin = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append(text[begin:at])
            begin = at + 1
    return [*parts, text[begin:]]


def _built(node: ast.expr, depth: int) -> Expression:
    if not depth:
        raise ValueError("an expression that is too deep")
    if isinstance(node, ast.Constant) and type(node.value) is int:
        number = Range(node.value, node.value)
        return lambda known: number
    if isinstance(node, ast.Name):
        name = node.id
        return lambda known: known[name]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _built(node.operand, depth - 1)
        return lambda known: _negate(inner(known))
    if isinstance(node, ast.BinOp):
        left = _built(node.left, depth - 1)
        right = _built(node.right, depth - 1)
        combine = _COMBINE[type(node.op)]
        return lambda known: _check_range(combine(left(known), right(known)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "min" and len(node.args) == 2:
        first, second = (_built(each, depth - 1) for each in node.args)
        return lambda known: _smaller(first(known), second(known))
    raise ValueError("not an expression of whole numbers")


def _check_range(found: Range) -> Range:
    """`found`, if its numbers are small enough: products of products would grow without end."""
    if found.low < -_LARGEST or found.high > _LARGEST:
        raise OverflowError("a number of more than 128 bits")
    return found


def _negate(a: Range) -> Range:
    return Range(-a.high, -a.low)


def _smaller(a: Range, b: Range) -> Range:
    return Range(min(a.low, b.low), min(a.high, b.high))


def _product(a: Range, b: Range) -> Range:
    corners = (a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high)
    return Range(min(corners), max(corners))


def _quotient(a: Range, b: Range) -> Range:
    """Interval division of non-negative numbers by positive ones, rounded down as in C."""
    if a.low < 0 or b.low < 1:
        raise ZeroDivisionError("a division of negative numbers or by zero")
    return Range(a.low // b.high, a.high // b.low)


def _remainder(a: Range, b: Range) -> Range:
    """Interval remainder of non-negative numbers by positive ones, as in C."""
    if a.low < 0 or b.low < 1:
        raise ZeroDivisionError("a division of negative numbers or by zero")
    return a if a.high < b.low else Range(0, min(a.high, b.high - 1))


_COMBINE: dict[type[ast.operator], Callable[[Range, Range], Range]] = {
    ast.Add: lambda a, b: Range(a.low + b.low, a.high + b.high),
    ast.Sub: lambda a, b: Range(a.low - b.high, a.high - b.low),
    ast.Mult: _product,
    ast.Div: _quotient,
    ast.Mod: _remainder,
}
