"""Graph verifier: rules for every graph between two passes, and for a graph in each of the forms that passes ensure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Literal

from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.ir.text import node_text
from flashmem.compiler.operators import REGISTRY

Form = Literal["decomposed", "channels last", "attention matched", "attention folded"]
"""A form of a graph that passes ensure and later passes require."""


class InvalidResultError(Exception):
    """A pass or a stage made a result that breaks a rule: an error in flashmem, not in the model."""


def verify(graph: Graph, forms: Collection[Form] = ()) -> None:
    """Check order, producers, types and shapes of `graph`, and the rules of `forms` for its nodes.

    Raises:
        InvalidResultError: the first broken rule, with the node as text.
    """
    known = {port.value for port in graph.inputs}
    decomposed = "decomposed" in forms
    rules = [RULES[form] for form in forms]
    for node in graph.nodes:
        _verify_values(node, known)
        known.update(node.outputs)
        broken = _decomposed(node) if decomposed else None
        for each in rules:
            if broken is None and node.op in each:
                broken = each[node.op](node)
        if broken is not None:
            raise InvalidResultError(f"{broken}: {node_text(node)}")
    for port in graph.outputs:
        if port.value not in known and port.value.constant is None:
            raise InvalidResultError(f"output {port.name} has no producer")


def _verify_values(node: Node, known: set[Value]) -> None:
    """Check that the inputs of `node` are known or constants, and its outputs are new and name it as producer."""
    for value in node.inputs:
        if value is not None and value.constant is None and value not in known:
            raise InvalidResultError(f"{value.name} is read before a node makes it: {node_text(node)}")
    for value in node.outputs:
        if value.producer is not node:
            raise InvalidResultError(f"{value.name} names another node as its producer: {node_text(node)}")
        if value in known or value.constant is not None:
            raise InvalidResultError(f"{value.name} is made twice: {node_text(node)}")


def _decomposed(node: Node) -> str | None:
    operator = REGISTRY.get(node.op)
    if operator is None or not (operator.expression or operator.kernel or node.op == "Reshape"):
        return f"{node.op} has neither an expression nor a kernel"
    return None if all(value.size for value in node.outputs) else "a tensor without elements is no constant"


def _channels_last(node: Node) -> str | None:
    channels = node.input(1).shape[1] * node.attributes["group"]
    return None if node.input(0).shape[-1] == channels else f"the last of its dimensions is not its {channels} channels"


def _folded(node: Node) -> str | None:
    return "its views are not folded" if "stacks" in node.attributes else None


def _same_elements(node: Node) -> str | None:
    source = node.input(0)
    made = node.outputs[0]
    same = source.size == made.size and source.dtype == made.dtype
    return None if same else "its result has other elements than its source"


def _transposed(node: Node) -> str | None:
    source = node.input(0)
    made = node.outputs[0]
    perm = node.attributes["perm"]
    fits = sorted(perm) == list(range(len(source.shape))) and made.shape == tuple(source.shape[axis] for axis in perm)
    return None if fits and source.dtype == made.dtype else "its shape is not its source's, permuted"


def _sliced(node: Node) -> str | None:
    source = node.input(0)
    made = node.outputs[0]
    given = zip(source.shape, made.shape, node.attributes["starts"], node.attributes["steps"], strict=True)
    inside = all(0 <= start < size and 0 <= start + (count - 1) * step < size for size, count, start, step in given)
    return None if inside and source.dtype == made.dtype else "it takes elements outside its source"


def _joined(node: Node) -> str | None:
    axis = node.attributes["axis"]
    made = node.outputs[0]
    parts = [value.shape for value in node.inputs if value is not None]
    alike = all((*part[:axis], *part[axis + 1 :]) == (*made.shape[:axis], *made.shape[axis + 1 :]) for part in parts)
    return None if alike and sum(part[axis] for part in parts) == made.shape[axis] else "its parts do not fill its result"


def _product(node: Node) -> str | None:
    left = node.input(0).shape
    right = node.input(1).shape
    made = node.outputs[0].shape
    depth, columns = right[-2:][:: -1 if node.attributes["transposed"] else 1]
    fits = left[-1] == depth and made[-1] == columns and made[-2:-1] == left[-2:-1]
    return None if fits and _spread([left[:-2], right[:-2]]) == made[:-2] else "the shapes of a product do not fit"


def _spread(shapes: Collection[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape that `shapes` broadcast to; None if they do not."""
    rank = max(map(len, shapes), default=0)
    made = []
    for sizes in zip(*((1,) * (rank - len(shape)) + shape for shape in shapes), strict=True):
        found = {size for size in sizes if size != 1}
        if len(found) > 1:
            return None
        made.append(found.pop() if found else 1)
    return tuple(made)


def _elementwise(node: Node) -> str | None:
    """Check an elementwise node, without leading dimensions of size 1: rewrites write one-element constants as [1]."""
    shapes = {value.shape for value in node.inputs if value is not None}
    made = node.outputs[0].shape
    if shapes == {made}:
        return None
    found = _spread(shapes)
    return None if found is not None and _trimmed(found) == _trimmed(made) else "its operands do not broadcast to its result"


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """`shape` without its leading dimensions of size 1."""
    return shape[next((axis for axis, size in enumerate(shape) if size != 1), len(shape)) :]


RULES: Mapping[Form, Mapping[str, Callable[[Node], str | None]]] = {
    "decomposed": {
        **{name: _elementwise for name, operator in REGISTRY.items() if operator.expression is not None},
        "Reshape": _same_elements,
        "Transpose": _transposed,
        "Slice": _sliced,
        "RowPart": _sliced,
        "Concat": _joined,
        "MatMul": _product,
    },
    "channels last": {"Conv": _channels_last},
    "attention matched": {},  # only the matcher itself could check this
    "attention folded": {"FusedAttention": _folded},
}
"""Rules of each form for a node, by operator: a function that returns the broken rule, or None."""
