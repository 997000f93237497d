"""Rotary matching: rotary positions become one operator, however they are written (`compiler.kernels.rotary.operators`).

ONNX and ONNX Runtime have an operator for them, whose definition the importer writes out; exporters write Slice, Neg, Concat,
Mul and Add. All compute each element of a row as x[j] * cos[c] + sign * x[k] * sin[s]. So the matcher does not compare nodes.
For each element of a row of the result, it computes the products whose sum the element is. It compares these with both forms of
rotary positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.compiler.ir.builder import Rewriter, replaced
from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.ir.view_nodes import unreshaped
from flashmem.compiler.operators.rewriting import reshaped

_LONGEST = 1024
"""The most elements of a row that are computed one by one."""

_DEEPEST = 32
"""The most nodes between the result and x."""

_Product = tuple[int, int, Value | None, int]
"""(sign, column of x, table, column of the table) of one product; without a table, the element of x alone."""

_Columns = NDArray[Any]
"""The sum of products of each element of a row: tuples of `_Product`, in the shape of the dimensions of the row."""


@dataclass(frozen=True)
class _Match:
    """Rotary positions of `x` by tables of `width` columns, which `node` computes; see `compiler.kernels.rotary.operators`."""

    node: Node
    x: Value
    cosines: Value
    sines: Value
    width: int
    half: int
    interleaved: bool


def match_rotary(graph: Graph) -> Graph:
    """`graph` (decomposed) with a Rotary in place of the last operator of each matched pattern."""
    found = {node: match for node in graph.nodes if node.op in ("Add", "Concat") and (match := _match(node)) is not None}
    return replaced(graph, found, _write)


def _match(node: Node) -> _Match | None:
    """The rotary positions whose last operator is `node`."""
    if node.outputs[0].dtype != "float32" or not any(each is not None and _may_turn(each) for each in node.inputs):
        return None
    candidates = [value for value in _ancestors(node) if value.size == node.outputs[0].size and value.shape]
    for x in sorted(candidates, key=lambda value: -value.shape[-1]):
        if 1 < x.shape[-1] <= _LONGEST:
            columns = _Rows(x).of(node.outputs[0])
            if columns is not None and (match := _compared(node, x, columns.reshape(-1))) is not None:
                return match
    return None


def _may_turn(value: Value) -> bool:
    """Whether `value` is a product, a difference or a sum, possibly joined and reshaped: most Adds and Concats have none."""
    made = unreshaped(value).producer
    return made is not None and made.op in ("Mul", "Sub", "Add", "Concat")


_INSIDE = ("Add", "Concat", "Mul", "Neg", "Reshape", "Slice", "Sub")


def _ancestors(node: Node) -> Iterator[Value]:
    """The values from which operators of the pattern compute the output of `node`, the nearest first."""
    seen: dict[Value, None] = {}
    following = [node]
    for _ in range(_DEEPEST):
        if not following:
            return
        for value in following.pop(0).inputs:
            if value is None or value in seen or value.constant is not None:
                continue
            seen[value] = None
            yield value
            if value.producer is not None and value.producer.op in _INSIDE:
                following.append(value.producer)


@dataclass
class _Rows:
    """Rows of values that are computed from rows of `x`, element by element."""

    x: Value
    known: dict[Value, _Columns | None] = field(default_factory=dict)

    def of(self, value: Value) -> _Columns | None:
        """The elements of a row of `value`; None if it is computed in another way, or from other rows."""
        if value not in self.known:
            self.known[value] = None
            self.known[value] = self._computed(value)
        return self.known[value]

    @property
    def _rank(self) -> int:
        return len(self.x.shape) - 1

    def _row(self, value: Value) -> tuple[int, ...] | None:
        """The shape of a row of `value` if all its other dimensions equal those of `x`, else None."""
        return value.shape[self._rank :] if value.shape[: self._rank] == self.x.shape[:-1] else None

    def _computed(self, value: Value) -> _Columns | None:
        node, shape = value.producer, self._row(value)
        if value is self.x:
            return _filled([((1, column, None, 0),) for column in range(value.shape[-1])], value.shape[-1:])
        if node is None or shape is None or node.op not in _INSIDE or len(self.known) > 2 * _DEEPEST:
            return None
        if node.op == "Mul":
            return self._product(node)
        given: list[_Columns] = []
        for each in node.inputs:
            part = None if each is None else self.of(each)
            if part is None:
                return None
            given.append(part)
        if node.op == "Reshape":
            return given[0].reshape(shape) if given[0].size == np.prod(shape, dtype=int) else None
        if node.op == "Slice":
            return self._slice(node, given[0])
        if node.op == "Concat":
            axis = node.attributes["axis"] - self._rank
            return np.concatenate(given, axis) if axis >= 0 else None
        if node.op == "Neg":
            return _each(_negated, given[0])
        if given[0].shape != shape or given[1].shape != shape:
            return None
        return _each(lambda a, b: a + b, given[0], given[1] if node.op == "Add" else _each(_negated, given[1]))

    def _slice(self, node: Node, columns: _Columns) -> _Columns | None:
        starts, steps = node.attributes["starts"], node.attributes["steps"]
        row = self._row(node.outputs[0])
        if row is None or self._row(node.input(0)) is None:
            return None
        cut = zip(row, starts[self._rank :], steps[self._rank :], strict=True)
        made: _Columns = columns[np.ix_(*(np.arange(size) * step + start for size, start, step in cut))]
        return made

    def _product(self, node: Node) -> _Columns | None:
        """Elements of a row of `x`, each times one number of a table."""
        for value, table in (node.inputs, node.inputs[::-1]):
            columns = None if value is None else self.of(value)
            if columns is None or table is None or self._row(node.outputs[0]) != columns.shape:
                continue
            inner = table.shape[max(0, len(table.shape) - columns.ndim) :]
            if any(len(each) != 1 or each[0][2] is not None for each in columns.reshape(-1)):
                return None
            places = np.arange(np.prod(inner, dtype=int)).reshape(inner)
            try:
                places = np.broadcast_to(places, columns.shape)
            except ValueError:
                return None
            pairs = zip(columns.reshape(-1), places.reshape(-1), strict=True)
            return _filled([((sign, at, table, int(place)),) for ((sign, at, *_),), place in pairs], columns.shape)
        return None


def _filled(elements: list[tuple[_Product, ...]], shape: tuple[int, ...]) -> _Columns:
    made = np.empty(len(elements), object)
    made[:] = elements
    return made.reshape(shape)


def _negated(products: tuple[_Product, ...]) -> tuple[_Product, ...]:
    return tuple((-sign, column, table, place) for sign, column, table, place in products)


def _each(function: Any, *operands: _Columns) -> _Columns:
    flat = [function(*each) for each in zip(*(operand.reshape(-1) for operand in operands), strict=True)]
    return _filled(flat, operands[0].shape)


def _compared(node: Node, x: Value, columns: _Columns) -> _Match | None:
    """The rotary positions that are `columns`, the elements of a row; None if they are something else."""
    turning = next((at for at, products in enumerate(columns) if len(products) != 2), len(columns))
    half = turning // 2
    if not half or turning % 2 or any(columns[at] != ((1, at, None, 0),) for at in range(turning, len(columns))):
        return None
    tables = [_own_and_other(products, at) for at, products in enumerate(columns[:turning])]
    first = tables[0]
    if first is None:
        return None
    cosines, sines = first[0][2], first[1][2]
    assert cosines is not None and sines is not None
    for interleaved in (False, True):
        for width in (half, turning):
            wanted = (_expected(at, half, width, interleaved) for at in range(turning))
            if all(
                found is not None
                and found[0][:2] == (1, at) and _is_table(found[0][2], cosines) and found[0][3] == place
                and found[1][:2] == (sign, other) and _is_table(found[1][2], sines) and found[1][3] == place
                for at, (found, (sign, other, place)) in enumerate(zip(tables, wanted, strict=True))
            ):  # fmt: skip
                return _Match(node, x, cosines, sines, width, half, interleaved)
    return None


def _own_and_other(products: tuple[_Product, ...], at: int) -> tuple[_Product, _Product] | None:
    """The product of element `at` of x, and the other one; both have tables."""
    one, two = products if products[0][1] == at else products[::-1]
    return (one, two) if one[2] is not None and two[2] is not None else None


def _is_table(value: Value | None, table: Value) -> bool:
    return value is table or (value is not None and value.shape == table.shape and unreshaped(value) is unreshaped(table))


def _expected(at: int, half: int, width: int, interleaved: bool) -> tuple[int, int, int]:
    """(sign, the other element, place in a table of `width` columns) of element `at`."""
    is_second = at % 2 == 1 if interleaved else at >= half
    step = 1 if interleaved else half
    pair = at // 2 if interleaved else at % half
    return (1 if is_second else -1), at + (-step if is_second else step), at if width > half else pair


def _write(rewriter: Rewriter, match: _Match) -> None:
    """Append a Rotary; if x is a Transpose of rows, before it, so that attention reads the result as a view."""
    output, x = match.node.outputs[0], match.x
    tables = [_flat(rewriter, table, match.width, len(x.shape) - 1) for table in (match.cosines, match.sines)]
    given = {"half": match.half, "interleaved": match.interleaved}
    made = output if x.shape == output.shape else Value(f"{output.name}.rows", x.shape, x.dtype)
    move = _move(x)
    perm = () if move is None else move.attributes["perm"]
    shapes = [None if move is None else _untransposed(table, perm) for table in tables]
    if move is None or None in shapes:
        rewriter.add("Rotary", [x, *tables], made, match.node.name, **given)
    else:
        source = move.input(0)
        tables = [reshaped(rewriter, table, shape) for table, shape in zip(tables, shapes, strict=True) if shape is not None]
        turned = rewriter.emit("Rotary", [source, *tables], source.shape, x.dtype, match.node.name, **given)
        rewriter.add("Transpose", [turned], made, perm=perm)
    if made is not output:
        rewriter.add("Reshape", [made], output)


def _move(x: Value) -> Node | None:
    """The Transpose of whole rows that computes `x`, if one does."""
    node = x.producer
    while node is not None and node.op == "Reshape" and node.input(0).shape == x.shape:
        node = node.input(0).producer
    if node is None or node.op != "Transpose" or node.outputs[0].shape != x.shape:
        return None
    return node if node.attributes["perm"][-1] == len(x.shape) - 1 else None


def _flat(rewriter: Rewriter, table: Value, width: int, rank: int) -> Value:
    """`table` with its `width` columns in one dimension, after at most `rank` others."""
    shape, columns = list(table.shape), 1
    while columns < width or len(shape) > rank:
        columns *= shape.pop()
    return reshaped(rewriter, table, (*shape, width))


def _untransposed(table: Value, perm: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of `table` beside rows before a Transpose; None if its elements would have to move."""
    padded = (1,) * (len(perm) - len(table.shape)) + table.shape
    moving = [perm[axis] for axis, size in enumerate(padded) if size != 1]
    return tuple(padded[perm.index(axis)] for axis in range(len(perm))) if moving == sorted(moving) else None
