"""Control flow that is decided when compiling: loops unrolled, sequences and optional values followed.

A `Loop` whose number of iterations and condition are constants by the time it is looked at, and every `Scan`, becomes as many
copies of its body. A condition that an iteration computes is looked at after that iteration has been folded: the loop is peeled,
one iteration at a time. A sequence is a list of values known here, so that its operators disappear. An `If` on a constant takes
its branch (onnxscript's folding does that); one on a condition computed at run time computes both and chooses, if its branches
are small, cannot fail, and have outputs of equal shapes.

What stays says why, in `REASON` of the node's `meta`; the importer refuses it with that sentence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
from numpy.typing import NDArray

from flashmem.errors import UserError
from flashmem.graph.onnx_limits import CHOSEN, UNROLLED
from flashmem.graph.onnx_validate import printable

REASON = "flashmem.reason"
"""Where a node's `meta` says why it was left."""

_SMALL = 1 << 10  # elements of constants that are looked at

# What a condition is computed by, besides shapes, which folding knows.
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "Add": np.add, "And": np.logical_and, "Equal": np.equal, "Greater": np.greater, "GreaterOrEqual": np.greater_equal,
    "Identity": lambda x: x, "Less": np.less, "LessOrEqual": np.less_equal, "Not": np.logical_not, "Or": np.logical_or,
    "Sub": np.subtract,
}  # fmt: skip

# Random ones differ from call to call; indices computed at run time may be wrong in the branch that is not taken.
_IMPURE = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
_INDEXED = {"Gather", "GatherElements", "GatherND", "OneHot", "Scatter", "ScatterElements", "ScatterND", "TensorScatter"}


class ControlFlowPass(ir.passes.InPlacePass):
    """Resolves what is known by now, in the main graph and in branches.

    `choose`: also replaces an If whose condition is computed at run time by both of its branches and a choice. Raises UserError
    for loops that make more nodes than `UNROLLED`, and for bodies that do not fit their node.
    """

    def __init__(self) -> None:
        self.made = 0
        self.choose = False

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """One walk over the nodes there are; what is made is met by the next."""
        self.opset = model.opset_imports.get("", 0)
        self.modified = False
        self.sequences: dict[ir.Value, list[ir.Value]] = {}
        self.optionals: dict[ir.Value, ir.Value | None] = {}
        self.known: dict[ir.Value, NDArray[Any] | None] = {}
        self._walk(model.graph)
        if self.modified:
            passes.NameFixPass()(model)
        return ir.passes.PassResult(model, self.modified)

    def _walk(self, graph: ir.Graph) -> None:
        for node in tuple(graph):
            if node.domain not in ("", "ai.onnx"):
                continue
            resolve = _RESOLVE.get(node.op_type)
            reason = resolve(self, node) if resolve is not None else None
            if reason is not None:
                node.meta[REASON] = reason
            if node.op_type == "If" and node.graph is not None:
                for name in ("then_branch", "else_branch"):
                    self._walk(_graph(node, name))

    # -- loops

    def _loop(self, node: ir.Node) -> str | None:
        body, states = _graph(node, "body"), list(node.inputs[2:])
        _fit(node, len(body.inputs) == len(states) + 2 and len(body.outputs) == len(node.outputs) + 1)
        _fit(node, None not in states and len(node.outputs) >= len(states))
        trips, condition = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
        total = math.inf if trips is None else self._number(trips)
        if total is None:
            return "Loop whose number of iterations is computed at run time is not supported; export it with a fixed number"
        goes = True if condition is None else self._number(condition)
        if goes is None:
            return "Loop whose condition is computed at run time is not supported; export it with a fixed number of iterations"
        self._lift(body, node)
        condition = condition or self._constant(node, np.array(True))
        scans: list[list[ir.Value]] = [[] for _ in node.outputs[len(states) :]]
        done = 0
        while goes and done < total:
            actual = [self._constant(node, np.array(done, np.int64)), condition, *states]
            made = self._inline(body, actual, node)
            condition, states = made[0], made[1 : len(states) + 1]
            for scan, value in zip(scans, made[len(states) + 1 :], strict=True):
                scan.append(self._axis(node, "Unsqueeze", value, 0))
            done += 1
            goes = self._number(condition)
        if goes is None and done < total:
            rest = self._rest(node, body, [trips and self._constant(node, np.array(total - done)), condition, *states], done)
            states = list(rest.outputs[: len(states)])
            for scan, value in zip(scans, rest.outputs[len(states) :], strict=True):
                scan.append(value)
        results = [
            *states,
            *(self._joined(node, scan, 0, old) for scan, old in zip(scans, body.outputs[-len(scans) :], strict=False)),
        ]
        if any(value is None for value in results):
            return "Loop of no iterations, with outputs whose shape is not known, is not supported"
        self._replace(node, [value for value in results if value is not None])
        return None

    def _rest(self, node: ir.Node, body: ir.Graph, inputs: Sequence[ir.Value | None], done: int) -> ir.Node:
        """The iterations from `done` on, which count from there."""
        first = body.inputs[0]
        shift = ir.Node("", "Add", [first, self._constant(node, np.array(done, np.int64))])
        first.replace_all_uses_with(shift.outputs[0])
        shift.replace_input_with(0, first)
        nodes = tuple(body)
        if nodes:
            body.insert_before(nodes[0], shift)
        else:
            body.append(shift)
        rest = ir.Node(
            "", "Loop", inputs, [ir.AttrGraph("body", body)], num_outputs=len(node.outputs), name=f"{node.name}.rest"
        )
        _at(node).insert_before(node, rest)
        return rest

    def _scan(self, node: ir.Node) -> str | None:
        body, count = _graph(node, "body"), node.attributes.get_int("num_scan_inputs") or 0
        given = list(node.inputs[1:] if self.opset < 9 else node.inputs)
        if self.opset < 9 and node.inputs[0] is not None:
            return "Scan with lengths of sequences is not supported"
        _fit(node, 0 < count <= len(given) == len(body.inputs) and len(body.outputs) == len(node.outputs) and None not in given)
        values = [value for value in given if value is not None]
        states, scanned = values[: len(values) - count], values[len(values) - count :]
        if any(value.shape is None or not value.shape.is_static() for value in scanned):
            return "Scan over inputs whose shape is not known is not supported"
        _fit(node, len(body.outputs) >= len(states))
        self._lift(body, node)
        if self.opset >= 9:
            results = self._scanned(node, body, states, scanned)
        else:  # each row of a batch on its own
            rows = []
            for row in range(_sizes(scanned[0])[0]):
                one = [self._taken(node, value, row, 0) for value in values]
                rows.append(self._scanned(node, body, one[: len(states)], one[len(states) :], 1))
            results = [
                self._joined(node, [self._axis(node, "Unsqueeze", value, 0) for value in each if value is not None], 0, None)
                for each in zip(*rows, strict=True)
            ]
        if any(value is None for value in results):
            return "Scan of no elements is not supported"
        self._replace(node, [value for value in results if value is not None])
        return None

    def _scanned(
        self, node: ir.Node, body: ir.Graph, states: list[ir.Value], scanned: Sequence[ir.Value], dropped: int = 0
    ) -> list[ir.Value | None]:
        """States after all steps, and what the steps made; `dropped` leading dimensions are gone from values of unknown shape."""
        outputs = len(body.outputs) - len(states)
        old = dropped > 0
        axes = [0] * len(scanned) if old else _listed(node, "scan_input_axes", len(scanned))
        back = _listed(node, "directions" if old else "scan_input_directions", len(scanned))
        out_axes, out_back = (
            _listed(node, name, 0 if old else outputs) for name in ("scan_output_axes", "scan_output_directions")
        )
        out_axes, out_back = out_axes or [0] * outputs, out_back or [0] * outputs
        original = node.inputs[len(node.inputs) - len(scanned) :]
        steps = set()
        for value, axis in zip(original, axes, strict=True):
            sizes = _sizes(value)[dropped:]
            _fit(node, -len(sizes) <= axis < len(sizes))
            steps.add(sizes[axis])
        _fit(node, len(steps) == 1)
        [total], scans = steps, [[] for _ in range(outputs)]  # type: ignore[var-annotated]
        for step in range(total):
            places = [total - 1 - step if reverse else step for reverse in back]
            parts = [self._taken(node, *each) for each in zip(scanned, places, axes, strict=True)]
            made = self._inline(body, [*states, *parts], node)
            states = made[: len(states)]
            for scan, value, axis in zip(scans, made[len(states) :], out_axes, strict=True):
                scan.append(self._axis(node, "Unsqueeze", value, axis))
        for scan, reverse in zip(scans, out_back, strict=True):
            if reverse:
                scan.reverse()
        return [*states, *(self._joined(node, scan, axis, None) for scan, axis in zip(scans, out_axes, strict=True))]

    # -- choices

    def _if(self, node: ir.Node) -> str | None:
        reason = "If whose condition is computed at run time"
        branches = [_graph(node, "then_branch"), _graph(node, "else_branch")]
        if self._number(node.inputs[0]) is not None or not self.choose:
            return f"{reason} is not supported"
        inside = [inner for branch in branches for inner in branch]
        if len(inside) > CHOSEN:
            return f"{reason}, and whose branches have {len(inside)} nodes, is not supported: at most {CHOSEN} are all computed"
        for inner in inside:
            if any(
                attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attribute in inner.attributes.values()
            ):
                return f"{reason}, with a loop or another such choice in a branch, is not supported"
            indices = inner.inputs[1] if inner.op_type in _INDEXED and len(inner.inputs) > 1 else None
            if inner.op_type in _IMPURE or (indices is not None and indices.const_value is None):
                return f"{reason} is not supported with {inner.op_type} in a branch, which cannot be computed unasked"
        if self.opset < 9:
            return f"{reason} is not supported below operator set 9, which has no Where"
        for one, other in zip(branches[0].outputs, branches[1].outputs, strict=True):
            alike = isinstance(one.type, ir.TensorType) and one.dtype == other.dtype
            known = one.shape is not None and one.shape.is_static()
            if not alike or not known or one.shape != other.shape:
                return (
                    f"{reason}, and whose branches give {_shown(one)} and {_shown(other)}, is not supported: both must be alike"
                )
        for branch in branches:
            self._lift(branch, node)
        then, other_ = (self._inline(branch, [], node) for branch in branches)
        flat = self._emit(node, "Reshape", [node.inputs[0], self._constant(node, np.zeros(0, np.int64))])
        self._replace(node, [self._emit(node, "Where", [flat, *pair]) for pair in zip(then, other_, strict=True)])
        return None

    # -- sequences and optional values

    def _sequence(self, node: ir.Node) -> str | None:
        """Note which values a sequence has, or replace what is taken from one."""
        op, inputs = node.op_type, node.inputs
        late = f"{op} of a sequence that depends on data is not supported"
        if op in ("SequenceConstruct", "SequenceEmpty"):
            self.sequences[node.outputs[0]] = [value for value in inputs if value is not None]
            return None
        if op == "SplitToSequence":
            return late if self._split(node) is None else None
        items = self.sequences.get(inputs[0]) if inputs and inputs[0] is not None else None
        if items is None:
            return late
        at = 2 if op == "SequenceInsert" else 1
        place = inputs[at] if op not in ("SequenceLength", "ConcatFromSequence") and len(inputs) > at else None
        position = None if place is None else self._number(place)
        if place is not None and position is None:
            return f"{op} at a position computed at run time is not supported"
        end = len(items) + (op == "SequenceInsert")
        if position is not None and not -len(items) <= position < end:
            raise UserError(f"{op} node {printable(node.name or '')!r} takes place {position} of a sequence of {len(items)}")
        if op == "SequenceInsert":
            _fit(node, inputs[1] is not None)
            where = len(items) if position is None else int(position) % max(len(items), 1) if position < 0 else int(position)
            self.sequences[node.outputs[0]] = [*items[:where], inputs[1], *items[where:]]  # type: ignore[list-item]
        elif op == "SequenceErase":
            where = (len(items) - 1 if position is None else int(position)) % max(len(items), 1)
            self.sequences[node.outputs[0]] = [*items[:where], *items[where + 1 :]]
        elif op == "SequenceAt":
            _fit(node, position is not None)
            self._replace(node, [items[int(position or 0)]])
        elif op == "SequenceLength":
            self._replace(node, [self._constant(node, np.array(len(items), np.int64))])
        else:
            axis = node.attributes.get_int("axis")
            _fit(node, axis is not None)
            if not items:
                return "ConcatFromSequence of an empty sequence is not supported"
            if node.attributes.get_int("new_axis", 0):
                items = [self._axis(node, "Unsqueeze", value, axis or 0) for value in items]
            self._replace(node, [self._emit(node, "Concat", items, axis=axis)])
        return None

    def _split(self, node: ir.Node) -> list[ir.Value] | None:
        x, given = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
        axis = node.attributes.get_int("axis", 0) or 0
        if x is None or x.shape is None or not x.shape.is_static():
            return None
        _fit(node, -len(x.shape) <= axis < len(x.shape))
        size = _sizes(x)[axis]
        parts = np.array(1) if given is None else self._array(given)
        if parts is None:
            return None
        if parts.ndim == 0:
            _fit(node, parts > 0)
            chunk = int(parts)
            parts = np.array([min(chunk, size - start) for start in range(0, size, chunk)], np.int64)
        _fit(node, parts.sum() == size and bool((parts >= 0).all()) and parts.size > 0)
        self._count(parts.size)
        sizes = parts.astype(np.int64)
        inputs, attributes = [x], {"axis": axis}
        if self.opset >= 13:
            inputs.append(self._constant(node, sizes))
        else:
            attributes["split"] = sizes.tolist()
        split = ir.node("Split", inputs, attributes, num_outputs=sizes.size, name=f"{node.name}.split")
        _at(node).insert_before(node, split)
        items = list(split.outputs)
        if given is None and not node.attributes.get_int("keepdims", 1):
            items = [self._axis(node, "Squeeze", value, axis) for value in items]
        construct = self._emit(node, "SequenceConstruct", items)
        self.sequences[construct] = items
        self._replace(node, [construct])
        return items

    def _identity(self, node: ir.Node) -> str | None:
        x, y = node.inputs[0], node.outputs[0]
        if x in self.sequences:
            self.sequences[y] = self.sequences[x]
        if x in self.optionals:
            self.optionals[y] = self.optionals[x]
        return None

    def _optional(self, node: ir.Node) -> str | None:
        """Note what an optional value has, or replace what is asked of one."""
        late = f"{node.op_type} of a value that depends on data is not supported"
        x = node.inputs[0] if node.inputs else None
        if node.op_type == "Optional":
            self.optionals[node.outputs[0]] = x
            return None
        if x is not None and x not in self.optionals:
            if x.type is None or isinstance(x.type, ir.OptionalType):
                return late
            element: ir.Value | None = x
        else:
            element = None if x is None else self.optionals[x]
        if node.op_type == "OptionalHasElement":
            self._replace(node, [self._constant(node, np.array(element is not None))])
            return None
        if element is None:
            return "OptionalGetElement of an empty value has no result"
        self._replace(node, [element])
        return None

    # -- what they share

    def _array(self, value: ir.Value) -> NDArray[Any] | None:
        """The elements of `value` where they are known, or follow by a little arithmetic."""
        if value.const_value is not None:
            return value.const_value.numpy() if value.const_value.size <= _SMALL else None
        node = value.producer()
        if node is None or node.domain or node.op_type not in _ARITHMETIC or not node.inputs:
            return None
        if value not in self.known:
            self.known[value] = None  # a graph without order ends here
            given = [None if each is None else self._array(each) for each in node.inputs]
            if all(each is not None for each in given):
                with np.errstate(all="ignore"):
                    self.known[value] = np.asarray(_ARITHMETIC[node.op_type](*given))
        return self.known[value]

    def _number(self, value: ir.Value | None) -> Any:
        """The one element of `value`, or None where it is not known."""
        data = None if value is None else self._array(value)
        return data.reshape(-1)[0].item() if data is not None and data.size == 1 else None

    def _constant(self, node: ir.Node, data: NDArray[Any]) -> ir.Value:
        """A constant in the graph of `node`."""
        return self._emit(node, "Constant", [], value=ir.tensor(data))

    def _emit(self, node: ir.Node, op: str, inputs: Sequence[ir.Value | None], **attributes: Any) -> ir.Value:
        """The output of a new node before `node`."""
        made = ir.node(op, inputs, attributes, name=f"{node.name}.{op.lower()}")
        made.outputs[0].name = f"{node.outputs[0].name or node.name}.{op.lower()}"
        if op == "Constant":
            tensor = attributes["value"]
            made.outputs[0].const_value, made.outputs[0].type = tensor, ir.TensorType(tensor.dtype)
            made.outputs[0].shape = ir.Shape(tensor.shape.numpy())
        _at(node).insert_before(node, made)
        return made.outputs[0]

    def _axis(self, node: ir.Node, op: str, value: ir.Value, axis: int) -> ir.Value:
        """Unsqueeze or Squeeze, as the operator set has it."""
        if self.opset < 13:
            return self._emit(node, op, [value], axes=[axis])
        return self._emit(node, op, [value, self._constant(node, np.array([axis], np.int64))])

    def _taken(self, node: ir.Node, value: ir.Value, place: int, axis: int) -> ir.Value:
        """Element `place` of `value` along `axis`."""
        return self._emit(node, "Gather", [value, self._constant(node, np.array(place, np.int64))], axis=axis)

    def _joined(self, node: ir.Node, parts: Sequence[ir.Value], axis: int, element: ir.Value | None) -> ir.Value | None:
        """`parts` one after the other; if there are none, nothing in the shape of `element`, where that is known."""
        if parts:
            return self._emit(node, "Concat", list(parts), axis=axis)
        if element is None or element.shape is None or not element.shape.is_static() or element.dtype is None:
            return None
        return self._constant(node, np.zeros((0, *_sizes(element)), element.dtype.numpy()))

    def _lift(self, body: ir.Graph, node: ir.Node) -> None:
        """Move the constants of `body` into the graph of `node`, so that they are there once however often the body is."""
        graph = _at(node)
        for name, value in list(body.initializers.items()):
            body.initializers.pop(name)
            stem, count = f"{node.name}.{name}", 0
            while value.name in graph.initializers or not count:
                value.name, count = f"{stem}.{count}" if count else stem, count + 1
            graph.register_initializer(value)

    def _inline(self, body: ir.Graph, actual: Sequence[ir.Value | None], node: ir.Node) -> list[ir.Value]:
        """A copy of `body` before `node`, given `actual` inputs; its outputs."""
        self._count(sum(1 for _ in body.all_nodes()))
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
        _at(node).insert_before(node, nodes)
        return outputs

    def _count(self, nodes: int) -> None:
        self.made += nodes
        if self.made > UNROLLED:
            raise UserError(f"the loops of the model unroll to more than {UNROLLED} nodes, the most that are made")

    def _replace(self, node: ir.Node, values: Sequence[ir.Value]) -> None:
        """Let all who read the outputs of `node` read `values`."""
        for old, new in zip(node.outputs, values, strict=True):
            if old.is_graph_output():
                new = self._emit(node, "Identity", [new])
                new.type = old.type
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            new.name = new.name or old.name
        _at(node).remove(node, safe=True)
        self.modified = True


def _at(node: ir.Node) -> ir.Graph:
    """The graph that `node` is in."""
    assert isinstance(node.graph, ir.Graph)
    return node.graph


def _graph(node: ir.Node, name: str) -> ir.Graph:
    attribute = node.attributes.get(name)
    _fit(node, attribute is not None and attribute.type == ir.AttributeType.GRAPH)
    assert attribute is not None
    return attribute.as_graph()


def _fit(node: ir.Node, fits: object) -> None:
    """Raise UserError unless the inputs, the outputs and the body of `node` fit each other."""
    if not fits:
        raise UserError(f"{node.op_type} node {printable(node.name or '')!r} has inputs or a body that do not fit it")


def _sizes(value: ir.Value | None) -> tuple[int, ...]:
    assert value is not None and value.shape is not None
    return tuple(value.shape.numpy())


def _listed(node: ir.Node, name: str, count: int) -> list[int]:
    """An attribute with one number for each of `count`; zeros where it is left out."""
    given = list(node.attributes.get_ints(name) or [0] * count)
    _fit(node, len(given) == count)
    return given


def _shown(value: ir.Value) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value.type, ir.TensorType) else "what is not a tensor"


_RESOLVE: dict[str, Callable[[ControlFlowPass, ir.Node], str | None]] = {
    "If": ControlFlowPass._if,
    "Identity": ControlFlowPass._identity,
    "Loop": ControlFlowPass._loop,
    "Scan": ControlFlowPass._scan,
    **dict.fromkeys(("Optional", "OptionalGetElement", "OptionalHasElement"), ControlFlowPass._optional),
    **dict.fromkeys(
        (
            "ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert",
            "SequenceLength", "SplitToSequence",
        ),
        ControlFlowPass._sequence,
    ),
}  # fmt: skip

SEQUENCES = frozenset(name for name, resolve in _RESOLVE.items() if resolve == ControlFlowPass._sequence)
"""The operators on sequences."""
