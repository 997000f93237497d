"""Einsum for any equation: diagonals and sums of single operands, then MatMul or Mul of pairs, then the requested order.

An operand is a value with a label for each dimension. A pair's MatMul moves the least data that any choice of left operand, and
of the right one's last two dimensions, allows: `bhij,hg->bgij` moves none.
"""

from __future__ import annotations

import math
import string
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flashmem.compiler.ir.builder import Rewriter, derived
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.operators.registry import WIDE, Operator, register
from flashmem.compiler.operators.rewriting import reshaped, transpose


@dataclass(frozen=True)
class _Operand:
    """A value with a label for each dimension; labels are unique."""

    value: Value
    labels: tuple[str, ...]

    def size(self, label: str) -> int:
        return self.value.shape[self.labels.index(label)]


@dataclass(frozen=True)
class _Product:
    """A MatMul of a pair: `left` in the order (batch, rows, depth), `right` (lead, batch, depth, columns).

    With `transposed`, the last two of `right` are exchanged. All of `lead` share the left operand.
    """

    left: _Operand
    right: _Operand
    lead: tuple[str, ...]
    batch: tuple[str, ...]
    rows: tuple[str, ...]
    depth: tuple[str, ...]
    columns: tuple[str, ...]
    transposed: bool

    @property
    def left_order(self) -> tuple[str, ...]:
        return (*self.batch, *self.rows, *self.depth)

    @property
    def right_order(self) -> tuple[str, ...]:
        last = (*self.columns, *self.depth) if self.transposed else (*self.depth, *self.columns)
        return (*self.lead, *self.batch, *last)

    @property
    def order(self) -> tuple[str, ...]:
        """Labels of the result, in order."""
        return (*self.lead, *self.batch, *self.rows, *self.columns)

    def cost(self, wanted: Sequence[str] | None) -> tuple[int, bool]:
        """Elements moved before and, if the result must be in the order `wanted`, after the product; ties prefer a weight."""
        pairs = ((self.left, self.left_order), (self.right, self.right_order))
        moved = sum(each.value.size for each, order in pairs if each.labels != order and each.value.constant is None)
        sizes = _sizes(self.left, self.right)
        if wanted is not None and self.order != tuple(wanted):
            moved += math.prod(sizes[label] for label in self.order)
        return moved, self.right.value.constant is None or bool(self.batch)


def _sizes(left: _Operand, right: _Operand) -> dict[str, int]:
    """The size of each label of a pair."""
    sizes = {label: left.size(label) for label in left.labels}
    return sizes | {label: max(right.size(label), sizes.get(label, 1)) for label in right.labels}


def _parsed(node: Node) -> tuple[list[list[str]], list[str]]:
    """Labels of the inputs and of the output; ellipsis dimensions are numbered from the back. Raises ValueError."""
    equation = "".join(str(node.attributes.get("equation", "")).split())
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(node.inputs):
        raise ValueError(f"of {len(node.inputs)} inputs")
    labels = [_labels(term, len(node.input(i).shape)) for i, term in enumerate(terms)]
    spread = sorted({label for each in labels for label in each if len(label) > 1}, reverse=True)
    if arrow:
        if right.count("...") > 1:
            raise ValueError("with an output that has two ellipses")
        head, dots, tail = right.partition("...")
        output = [*head, *(spread if dots else ()), *tail]
    else:
        found = [label for each in labels for label in each if len(label) == 1]
        output = [*spread, *sorted({label for label in found if found.count(label) == 1})]
    known = {label for each in labels for label in each}
    if len(set(output)) < len(output) or not set(output) <= known:
        raise ValueError("whose output names a dimension twice, or one that no input has")
    return labels, output


def _labels(term: str, rank: int) -> list[str]:
    head, dots, tail = term.partition("...")
    under = rank - len(head) - len(tail)
    if not set(head + tail) <= set(string.ascii_letters) or under < 0 or (under and not dots):
        raise ValueError(f"whose term {term!r} does not fit an input of {rank} dimensions")
    return [*head, *(f"dim{under - i:02}" for i in range(under)), *tail]


def _rewrite_einsum(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite Einsum; see the module."""
    terms, output = _parsed(node)
    operands = [_diagonal(rewriter, node.input(i), labels) for i, labels in enumerate(terms)]
    for first, second in _pairs(operands, output):
        others = [each for i, each in enumerate(operands) if i not in (first, second)]
        needed = {*output, *(label for each in others for label in each.labels)}
        operands = [*others, _contracted(rewriter, operands[first], operands[second], needed, None if others else output)]
    (last,) = operands
    last = _summed(rewriter, last, set(output))
    result = _ordered(rewriter, last, output)
    if result.constant is not None:
        rewriter.replaced[node.outputs[0]] = reshaped(rewriter, result, node.outputs[0].shape)
    else:
        rewriter.add("Reshape", [result], node.outputs[0], node.name)


def _pairs(operands: Sequence[_Operand], output: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Indices of the next two operands in a list; their result is appended to it. numpy chooses the order."""
    labels = sorted({label for each in operands for label in each.labels})
    if len(operands) > 2 and len(labels) <= len(string.ascii_letters):
        letters = dict(zip(labels, string.ascii_letters, strict=False))
        terms = ",".join("".join(letters[label] for label in each.labels) for each in operands)
        equation = f"{terms}->{''.join(letters[label] for label in output)}"
        empty = [np.broadcast_to(np.float32(0), each.value.shape) for each in operands]
        left = len(operands)
        for step in np.einsum_path(equation, *empty, optimize="greedy")[0][1:]:
            places = sorted(step)
            for i in range(1, len(places)):  # a step of more than two: each further operand with the result, which is last
                yield (places[0], places[1]) if i == 1 else (places[i] - i, left - 1)
                left -= 1
    else:
        for _ in operands[1:]:
            yield 0, 1


def _name(value: Value, what: str) -> str:
    return f"{value.name}.{what}"


def _diagonal(rewriter: Rewriter, value: Value, labels: Sequence[str]) -> _Operand:
    """Take the diagonal of `value` for each repeated label: a Slice with step size + 1 through both dimensions as one."""
    names = list(labels)
    while len(set(names)) < len(names):
        label = next(name for name in names if names.count(name) > 1)
        first = names.index(label)
        second = names.index(label, first + 1)
        rest = [axis for axis in range(len(names)) if axis not in (first, second)]
        size = value.shape[first]
        shape = (size, *(value.shape[axis] for axis in rest))
        names = [label, *(names[axis] for axis in rest)]
        if value.constant is not None:
            take = lambda a, perm=(first, second, *rest), n=size, out=shape: a.transpose(perm)[range(n), range(n)].reshape(out)  # noqa: E731
            value = derived(value, _name(value, "diagonal"), shape, take)
            continue
        value = _permuted(rewriter, value, (first, second, *rest))
        value = reshaped(rewriter, value, (size * size, *shape[1:]))
        starts = (0,) * len(shape)
        steps = (size + 1, *(1,) * (len(shape) - 1))
        value = rewriter.emit("Slice", [value], shape, value.dtype, _name(value, "diagonal"), starts=starts, steps=steps)
    return _Operand(value, tuple(names))


def _permuted(rewriter: Rewriter, value: Value, perm: Sequence[int]) -> Value:
    order = tuple(perm)
    if order == tuple(range(len(order))):
        return value
    shape = tuple(value.shape[axis] for axis in order)
    if value.constant is not None:
        return derived(value, _name(value, "permuted"), shape, lambda a: a.transpose(order))
    return transpose(rewriter, value, order, Value(_name(value, "permuted"), shape, value.dtype))


def _ordered(rewriter: Rewriter, operand: _Operand, order: Sequence[str]) -> Value:
    """The value with its dimensions in the order of labels; missing labels have size 1."""
    present = [label for label in order if label in operand.labels]
    value = _permuted(rewriter, operand.value, [operand.labels.index(label) for label in present])
    shape = tuple(operand.size(label) if label in operand.labels else 1 for label in order)
    return reshaped(rewriter, value, shape)


def _summed(rewriter: Rewriter, operand: _Operand, kept: Collection[str]) -> _Operand:
    """Sum the operand over the labels that are not kept."""
    value = operand.value
    gone = [axis for axis, label in enumerate(operand.labels) if label not in kept]
    if not gone:
        return operand
    labels = tuple(label for label in operand.labels if label in kept)
    shape = tuple(operand.size(label) for label in labels)
    if value.constant is not None:
        axes = tuple(gone)
        return _Operand(derived(value, _name(value, "sum"), shape, lambda a: a.sum(axes, dtype=a.dtype)), labels)
    while gone:
        run = [gone.pop(0)]
        while gone and gone[0] == run[-1] + 1:
            run.append(gone.pop(0))
        made = tuple(1 if axis in run else size for axis, size in enumerate(value.shape))
        value = rewriter.emit("ReduceSum", [value], made, value.dtype, _name(value, "sum"), axes=tuple(run))
    return _Operand(reshaped(rewriter, value, shape), labels)


def _without(rewriter: Rewriter, operand: _Operand, gone: Collection[str]) -> _Operand:
    """The operand without the labels of `gone`, whose size is 1."""
    labels = tuple(label for label in operand.labels if label not in gone)
    return _Operand(reshaped(rewriter, operand.value, tuple(operand.size(label) for label in labels)), labels)


def _contracted(
    rewriter: Rewriter, a: _Operand, b: _Operand, needed: Collection[str], wanted: Sequence[str] | None
) -> _Operand:
    """The product of two operands, summed over unneeded labels; in the order `wanted` if that is free."""
    shared = [label for label in a.labels if label in b.labels]
    # A label that is summed, and broadcast in one operand, is dropped from that operand.
    a = _without(rewriter, a, [label for label in shared if label not in needed and a.size(label) == 1 < b.size(label)])
    b = _without(rewriter, b, [label for label in shared if label not in needed and b.size(label) == 1 < a.size(label)])
    a = _summed(rewriter, a, {*needed, *b.labels})
    b = _summed(rewriter, b, {*needed, *a.labels})
    depth = [label for label in a.labels if label in b.labels and label not in needed]
    if not depth:
        order = [*(wanted or (*a.labels, *(label for label in b.labels if label not in a.labels)))]
        order = [label for label in order if label in a.labels or label in b.labels]
        one = _ordered(rewriter, a, order)
        other = _ordered(rewriter, b, order)
        shape = np.broadcast_shapes(one.shape, other.shape)
        return _Operand(rewriter.emit("Mul", [one, other], shape, one.dtype, _name(one, "product")), tuple(order))
    product = min(_products(a, b, depth), key=lambda each: each.cost(wanted))
    return _multiplied(rewriter, product)


def _products(a: _Operand, b: _Operand, depth: Sequence[str]) -> Iterator[_Product]:
    """The forms of a pair's MatMul."""
    for left, right in ((a, b), (b, a)):
        batch = tuple(label for label in right.labels if label in left.labels and label not in depth)
        rows = tuple(label for label in left.labels if label not in right.labels)
        own = tuple(label for label in right.labels if label not in left.labels)
        leads = next((i for i, label in enumerate(right.labels) if label in left.labels), 0)
        for lead in {0, leads}:
            # Depth in the order of either operand.
            for along in dict.fromkeys(tuple(label for label in each.labels if label in depth) for each in (left, right)):
                for transposed in (False, True):
                    yield _Product(left, right, own[:lead], batch, rows, along, own[lead:], transposed)


def _multiplied(rewriter: Rewriter, product: _Product) -> _Operand:
    left = product.left
    right = product.right
    sizes = _sizes(left, right)

    def total(labels: Sequence[str]) -> int:
        return math.prod(sizes[label] for label in labels)

    lead = tuple(sizes[label] for label in product.lead)
    left_batch, right_batch = (tuple(each.size(label) for label in product.batch) for each in (left, right))
    rows = total(product.rows)
    depth = total(product.depth)
    columns = total(product.columns)
    one = _ordered(rewriter, left, product.left_order)
    other = _ordered(rewriter, right, product.right_order)
    one = reshaped(rewriter, one, (*((1,) * len(lead) if left_batch else ()), *left_batch, rows, depth))
    last = (columns, depth) if product.transposed else (depth, columns)
    other = reshaped(rewriter, other, (*lead, *right_batch, *last))
    shape = (*lead, *(sizes[label] for label in product.batch), rows, columns)
    name = _name(one, "product")
    transposed = int(product.transposed)
    made = rewriter.emit("MatMul", [one, other], shape, one.dtype, name, transposed=transposed)
    return _Operand(reshaped(rewriter, made, tuple(sizes[label] for label in product.order)), product.order)


def _check_einsum(node: Node) -> str | None:
    try:
        terms, _ = _parsed(node)
    except ValueError as error:
        return f"Einsum {node.attributes.get('equation')!r} {error}"
    sizes: dict[str, int] = {}
    for i, labels in enumerate(terms):
        shape = node.input(i).shape
        if 0 in shape:
            return f"Einsum of a tensor without elements ({node.input(i).name}) is not implemented"
        for j, (label, size) in enumerate(zip(labels, shape, strict=True)):
            known = sizes.get(label, 1)
            if (size != known and 1 not in (size, known)) or (label in labels[:j] and shape[labels.index(label)] != size):
                return f"Einsum {node.attributes.get('equation')!r} with sizes {known} and {size} of dimension {label!r}"
            sizes[label] = max(size, known)
    return None


register(
    __name__,
    Operator("Einsum", (WIDE,), check=_check_einsum, rewrite=_rewrite_einsum, operator_class="reusable"),
)
