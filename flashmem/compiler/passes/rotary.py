"""Rotary matching: rotary positions become one operator, however they are written (`compiler.kernels.rotary.operators`).

ONNX and ONNX Runtime have an operator for them, whose definition the importer writes out; exporters write Slice, Neg, Concat,
Mul and Add. All compute each element of a row as x[j] * cos[c] + sign * x[k] * sin[s]. So the matcher does not compare nodes.
For each element of a row of the result, it computes the products whose sum the element is. It compares these with both forms of
rotary positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

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

_Columns = NDArray[np.int64]
"""A number for each element of a row."""


@dataclass(frozen=True)
class _Terms:
    """The sum of products that each element of a row is: arrays [terms, *dimensions of the row], of which zero signs mean none.

    Attributes:
        sign: 1 or -1, or 0 where an element has fewer terms.
        column: of x.
        table: its number, or -1 for the element of x alone.
        place: column of the table.
    """

    sign: _Columns
    column: _Columns
    table: _Columns
    place: _Columns

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions of the row."""
        return self.sign.shape[1:]

    def mapped(self, move: Callable[[_Columns], _Columns]) -> _Terms:
        """The terms after `move` of each array."""
        return _Terms(*map(move, self._arrays))

    @property
    def _arrays(self) -> tuple[_Columns, ...]:
        return self.sign, self.column, self.table, self.place

    def negated(self) -> _Terms:
        """The terms of minus each element."""
        return replace(self, sign=-self.sign)

    def plus(self, other: _Terms) -> _Terms | None:
        """The terms of sums; None if an element would have more than two."""
        joined = _Terms(*(np.concatenate(pair) for pair in zip(self._arrays, other._arrays, strict=True)))
        order = np.argsort(joined.sign == 0, axis=0, kind="stable")
        joined = joined.mapped(lambda array: np.take_along_axis(array, order, 0))
        return None if joined.sign[2:].any() else joined.mapped(lambda array: array[:2])

    @classmethod
    def concatenated(cls, parts: Sequence[_Terms], axis: int) -> _Terms:
        """The terms of a longer row; `axis`: of the row."""
        most = max(len(part.sign) for part in parts)
        padded = [
            part.mapped(lambda array: np.pad(array, [(0, most - len(array)), *[(0, 0)] * (array.ndim - 1)])) for part in parts
        ]
        return cls(*(np.concatenate(arrays, axis + 1) for arrays in zip(*(part._arrays for part in padded), strict=True)))


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
            rows = _Rows(x)
            terms = rows.of(node.outputs[0])
            if terms is not None and (match := _compared(node, rows, terms)) is not None:
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
    known: dict[Value, _Terms | None] = field(default_factory=dict)
    tables: list[Value] = field(default_factory=list)

    def of(self, value: Value) -> _Terms | None:
        """The elements of a row of `value`; None if it is computed in another way, or from other rows."""
        if value not in self.known:
            self.known[value] = None
            self.known[value] = self._computed(value)
        return self.known[value]

    def _number(self, table: Value) -> int:
        """The number of a table: one for all that are the same but for their shape."""
        for number, known in enumerate(self.tables):
            if known is table or (known.shape == table.shape and unreshaped(known) is unreshaped(table)):
                return number
        self.tables.append(table)
        return len(self.tables) - 1

    @cached_property
    def _rank(self) -> int:
        return len(self.x.shape) - 1

    def _row(self, value: Value) -> tuple[int, ...] | None:
        """The shape of a row of `value` if all its other dimensions equal those of `x`, else None."""
        return value.shape[self._rank :] if value.shape[: self._rank] == self.x.shape[:-1] else None

    def _computed(self, value: Value) -> _Terms | None:
        node = value.producer
        shape = self._row(value)
        if value is self.x:
            columns = np.arange(value.shape[-1])[None]
            return _Terms(np.ones_like(columns), columns, np.full_like(columns, -1), np.zeros_like(columns))
        if node is None or shape is None or node.op not in _INSIDE or len(self.known) > 2 * _DEEPEST:
            return None
        if node.op == "Mul":
            return self._product(node)
        if not all(map(self._may_be_row, node.inputs)):
            return None  # before the long way along the other inputs
        parts: list[_Terms] = []
        for each in node.inputs:
            part = None if each is None else self.of(each)
            if part is None:
                return None
            parts.append(part)
        return self._combined(node, parts, shape)

    def _may_be_row(self, value: Value | None) -> bool:
        """Whether `value` is x, or what operators of the pattern compute."""
        return value is self.x or (value is not None and value.producer is not None and value.producer.op in _INSIDE)

    def _combined(self, node: Node, parts: Sequence[_Terms], shape: tuple[int, ...]) -> _Terms | None:
        """What `node` makes of the rows `parts`, a row of `shape`."""
        match node.op:
            case "Reshape":
                return self._reshaped(parts[0], shape)
            case "Slice":
                return self._slice(node, parts[0])
            case "Concat":
                axis = node.attributes["axis"] - self._rank
                return _Terms.concatenated(parts, axis) if axis >= 0 else None
            case "Neg":
                return parts[0].negated()
        if any(part.shape != shape for part in parts):
            return None
        return parts[0].plus(parts[1] if node.op == "Add" else parts[1].negated())

    def _reshaped(self, terms: _Terms, shape: tuple[int, ...]) -> _Terms | None:
        if math.prod(terms.shape) != math.prod(shape):
            return None
        return terms.mapped(lambda array: array.reshape(-1, *shape))

    def _slice(self, node: Node, terms: _Terms) -> _Terms | None:
        starts = node.attributes["starts"]
        steps = node.attributes["steps"]
        row = self._row(node.outputs[0])
        if row is None or self._row(node.input(0)) is None:
            return None
        cut = zip(row, starts[self._rank :], steps[self._rank :], strict=True)
        places = np.ix_(*(np.arange(size) * step + start for size, start, step in cut))
        return terms.mapped(lambda array: array[:, *places])

    def _product(self, node: Node) -> _Terms | None:
        """Elements of a row of `x`, each times one number of a table."""
        for value, table in (node.inputs, node.inputs[::-1]):
            terms = None if value is None else self.of(value)
            if terms is None or table is None or self._row(node.outputs[0]) != terms.shape:
                continue
            if terms.sign[1:].any() or not terms.sign[0].all() or (terms.table[0] >= 0).any():
                return None
            inner = table.shape[max(0, len(table.shape) - len(terms.shape)) :]
            try:
                places = np.broadcast_to(np.arange(math.prod(inner)).reshape(inner), terms.shape)
            except ValueError:
                return None
            number = np.full_like(terms.table[:1], self._number(table))
            return _Terms(terms.sign[:1], terms.column[:1], number, places[None])
        return None


def _compared(node: Node, rows: _Rows, terms: _Terms) -> _Match | None:
    """The rotary positions that are `terms`, the elements of a row; None if they are something else."""
    flat = terms.mapped(lambda array: array.reshape(len(array), -1))
    turning = _turning(flat)
    if turning == 0:
        return None
    at = np.arange(turning)
    half = turning // 2
    is_first = flat.column[0, :turning] == at
    own = flat.mapped(lambda array: np.where(is_first, array[0, :turning], array[1, :turning]))
    other = flat.mapped(lambda array: np.where(is_first, array[1, :turning], array[0, :turning]))
    cosines = int(own.table[0])
    sines = int(other.table[0])
    wrong = (own.table != cosines) | (other.table != sines) | (own.sign != 1) | (own.column != at) | (own.place != other.place)
    if min(cosines, sines) < 0 or wrong.any():
        return None
    for interleaved in (False, True):
        for width in (half, turning):
            sign, column, place = _expected(at, half, width, interleaved)
            if ((other.sign == sign) & (other.column == column) & (own.place == place)).all():
                return _Match(node, rows.x, rows.tables[cosines], rows.tables[sines], width, half, interleaved)
    return None


def _turning(flat: _Terms) -> int:
    """How many elements, an even number, are sums of two products; those behind them are elements of x. 0 if not so."""
    counts = np.count_nonzero(flat.sign, axis=0)
    turning = int(np.argmax(counts != 2)) if (counts != 2).any() else len(counts)
    at = np.arange(turning, len(counts))
    sign = flat.sign[0, turning:]
    column = flat.column[0, turning:]
    table = flat.table[0, turning:]
    is_still = (counts[turning:] == 1) & (sign == 1) & (column == at) & (table < 0)
    return turning if turning % 2 == 0 and is_still.all() else 0


def _expected(at: _Columns, half: int, width: int, interleaved: bool) -> tuple[_Columns, _Columns, _Columns]:
    """(sign, the other element, place in a table of `width` columns) of the elements `at`."""
    is_second = at % 2 == 1 if interleaved else at >= half
    step = 1 if interleaved else half
    pair = at // 2 if interleaved else at % half
    return np.where(is_second, 1, -1), at + np.where(is_second, -step, step), at if width > half else pair


def _write(rewriter: Rewriter, match: _Match) -> None:
    """Append a Rotary; if x is a Transpose of rows, before it, so that attention reads the result as a view."""
    output = match.node.outputs[0]
    x = match.x
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
    shape = list(table.shape)
    columns = 1
    while columns < width or len(shape) > rank:
        columns *= shape.pop()
    return reshaped(rewriter, table, (*shape, width))


def _untransposed(table: Value, perm: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of `table` beside rows before a Transpose; None if its elements would have to move."""
    padded = (1,) * (len(perm) - len(table.shape)) + table.shape
    moving = [perm[axis] for axis, size in enumerate(padded) if size != 1]
    return tuple(padded[perm.index(axis)] for axis in range(len(perm))) if moving == sorted(moving) else None
