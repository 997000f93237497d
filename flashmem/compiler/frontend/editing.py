"""Base of passes that resolve nodes of an onnx-ir model at compile time: known numbers, new nodes, copies of bodies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
from numpy.typing import NDArray

from flashmem.base.errors import UserError
from flashmem.compiler.frontend.validation import printable
from flashmem.compiler.ir.limits import UNROLLED

REASON = "flashmem.reason"
"""The key of a node's `meta` for the reason why it was not resolved; the importer refuses the node with that sentence."""

_SMALL = 1 << 10  # the most elements of a constant that is evaluated

# Operators that compute conditions. Folding has the shapes already.
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "Add": np.add, "And": np.logical_and, "Equal": np.equal, "Greater": np.greater, "GreaterOrEqual": np.greater_equal,
    "Identity": lambda x: x, "Less": np.less, "LessOrEqual": np.less_equal, "Mul": np.multiply, "Not": np.logical_not,
    "Or": np.logical_or, "Sub": np.subtract,
}  # fmt: skip


class EditingPass(ir.passes.InPlacePass):
    """Resolves nodes of some operators, in the main graph and in the branches of its Ifs.

    A subclass defines `resolvers`: a function that replaces the node, or returns the reason why it cannot. Raises UserError for
    loops that make more nodes than `UNROLLED`, and for bodies that do not fit their node.
    """

    def __init__(self) -> None:
        self.made = 0

    def resolvers(self) -> dict[str, Callable[[ir.Node], str | None]]:
        """Resolvers by operator."""
        raise NotImplementedError

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """One walk over the existing nodes; the next walk visits the new ones."""
        self.opset = model.opset_imports.get("", 0)
        self.modified = False
        self.known: dict[ir.Value, NDArray[Any] | None] = {}
        self._walk(model.graph)
        if self.modified:
            passes.NameFixPass()(model)
        return ir.passes.PassResult(model, self.modified)

    def _walk(self, graph: ir.Graph) -> None:
        resolvers = self.resolvers()
        for node in tuple(graph):
            if node.domain not in ("", "ai.onnx"):
                continue
            resolve = resolvers.get(node.op_type)
            reason = resolve(node) if resolve is not None else None
            if reason is not None:
                node.meta[REASON] = reason
            if node.op_type == "If" and node.graph is not None:
                for name in ("then_branch", "else_branch"):
                    self._walk(graph_of(node, name))

    def array(self, value: ir.Value) -> NDArray[Any] | None:
        """The elements of `value`, if they are known or follow by a little arithmetic."""
        if value.const_value is not None:
            return value.const_value.numpy() if value.const_value.size <= _SMALL else None
        node = value.producer()
        if node is None or node.domain or node.op_type not in _ARITHMETIC or not node.inputs:
            return None
        if value not in self.known:
            self.known[value] = None  # ends the recursion in a graph with a cycle
            given = [None if each is None else self.array(each) for each in node.inputs]
            if all(each is not None for each in given):
                with np.errstate(all="ignore"):
                    self.known[value] = np.asarray(_ARITHMETIC[node.op_type](*given))
        return self.known[value]

    def number(self, value: ir.Value | None) -> Any:
        """The single element of `value`, or None if it is unknown."""
        data = None if value is None else self.array(value)
        return data.reshape(-1)[0].item() if data is not None and data.size == 1 else None

    def constant(self, node: ir.Node, data: NDArray[Any]) -> ir.Value:
        """A constant in the graph of `node`."""
        return self.emit(node, "Constant", [], value=ir.tensor(data))

    def emit(self, node: ir.Node, op: str, inputs: Sequence[ir.Value | None], **attributes: Any) -> ir.Value:
        """The output of a new node before `node`."""
        made = ir.node(op, inputs, attributes, name=f"{node.name}.{op.lower()}")
        made.outputs[0].name = f"{node.outputs[0].name or node.name}.{op.lower()}"
        if op == "Constant":
            tensor = attributes["value"]
            made.outputs[0].const_value = tensor
            made.outputs[0].type = ir.TensorType(tensor.dtype)
            made.outputs[0].shape = ir.Shape(tensor.shape.numpy())
        at(node).insert_before(node, made)
        return made.outputs[0]

    def with_axis(self, node: ir.Node, op: str, value: ir.Value, axis: int) -> ir.Value:
        """Unsqueeze or Squeeze, in the form of the operator set."""
        if self.opset < 13:
            return self.emit(node, op, [value], axes=[axis])
        return self.emit(node, op, [value, self.constant(node, np.array([axis], np.int64))])

    def taken(self, node: ir.Node, value: ir.Value, place: int, axis: int) -> ir.Value:
        """Element `place` of `value` along `axis`."""
        return self.emit(node, "Gather", [value, self.constant(node, np.array(place, np.int64))], axis=axis)

    def joined(self, node: ir.Node, parts: Sequence[ir.Value], axis: int, element: ir.Value | None) -> ir.Value | None:
        """Concatenate `parts`; if they are empty, an empty constant in the shape of `element`, if that is known."""
        if parts:
            return self.emit(node, "Concat", list(parts), axis=axis)
        if element is None or element.shape is None or not element.shape.is_static() or element.dtype is None:
            return None
        return self.constant(node, np.zeros((0, *sizes(element)), element.dtype.numpy()))

    def lift(self, body: ir.Graph, node: ir.Node) -> None:
        """Move the constants of `body` into the graph of `node`, so that copies of the body share them."""
        graph = at(node)
        for name, value in list(body.initializers.items()):
            body.initializers.pop(name)
            stem = f"{node.name}.{name}"
            count = 0
            while value.name in graph.initializers or not count:
                value.name = f"{stem}.{count}" if count else stem
                count = count + 1
            graph.register_initializer(value)

    def inline(self, body: ir.Graph, actual: Sequence[ir.Value | None], node: ir.Node) -> list[ir.Value]:
        """Insert a copy of `body` before `node`, with `actual` inputs; returns its outputs."""
        self.count(sum(1 for _ in body.all_nodes()))
        copy = body.clone(allow_outer_scope_values=True)
        given = {formal: value for formal, value in zip(copy.inputs, actual, strict=True) if value is not None}
        outputs = [given.get(value, value) for value in copy.outputs]
        copy.outputs.clear()
        for formal, value in given.items():
            formal.replace_all_uses_with(value)
        for inner in copy.all_nodes():
            for value in inner.outputs:
                if inner.op_type != "Constant" and actual:
                    value.shape = None  # another iteration may have other shapes
        nodes = tuple(copy)
        copy.remove(nodes)
        at(node).insert_before(node, nodes)
        return outputs

    def count(self, nodes: int) -> None:
        """Count new nodes. Raises UserError for too many."""
        self.made += nodes
        if self.made > UNROLLED:
            raise UserError(f"the loops of the model unroll to more than {UNROLLED} nodes, the most that are made")

    def replace(self, node: ir.Node, values: Sequence[ir.Value]) -> None:
        """Replace the outputs of `node` by `values` in all their users."""
        for old, new in zip(node.outputs, values, strict=True):
            if old.is_graph_output():
                new = self.emit(node, "Identity", [new])
                new.type = old.type
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            new.name = new.name or old.name
        at(node).remove(node, safe=True)
        self.modified = True


def at(node: ir.Node) -> ir.Graph:
    """The graph that contains `node`."""
    assert isinstance(node.graph, ir.Graph)
    return node.graph


def graph_of(node: ir.Node, name: str) -> ir.Graph:
    """The graph in an attribute of `node`."""
    attribute = node.attributes.get(name)
    fit(node, attribute is not None and attribute.type == ir.AttributeType.GRAPH)
    assert attribute is not None
    return attribute.as_graph()


def fit(node: ir.Node, fits: object) -> None:
    """Raise UserError unless the inputs, the outputs and the body of `node` fit each other."""
    if not fits:
        raise UserError(f"{node.op_type} node {printable(node.name or '')!r} has inputs or a body that do not fit it")


def sizes(value: ir.Value | None) -> tuple[int, ...]:
    """The shape of `value`, which is known."""
    assert value is not None and value.shape is not None
    return tuple(value.shape.numpy())
