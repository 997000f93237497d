"""Control flow that is resolved at compile time.

A `Loop` with a constant number of iterations and a constant condition, and every `Scan`, becomes copies of its body. A
condition that an iteration computes is evaluated after that iteration has been folded: the loop is peeled, one iteration at a
time. An `If` with a constant condition becomes its branch (onnxscript's folding does that). If the condition is known at run
time only, both branches are computed and one result is selected. For this the branches must be small, must not fail, and must
have outputs of equal shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from flashmem.compiler.frontend.editing import EditingPass, at, fit, graph_of, sizes
from flashmem.compiler.ir.limits import CHOSEN

# Indices computed at run time may be wrong in the branch that is not selected.
_INDEXED = {"Gather", "GatherElements", "GatherND", "OneHot", "Scatter", "ScatterElements", "ScatterND", "TensorScatter"}


class ControlFlowPass(EditingPass):
    """Unrolls loops. With `choose`, also replaces an If on a run-time condition by both branches and a Where."""

    def __init__(self) -> None:
        super().__init__()
        self.choose = False

    def resolvers(self) -> dict[str, Callable[[ir.Node], str | None]]:
        """Resolvers by operator."""
        return {"If": self._if, "Loop": self._loop, "Scan": self._scan}

    # -- loops

    def _loop(self, node: ir.Node) -> str | None:
        body = graph_of(node, "body")
        states: list[ir.Value | None] = list(node.inputs[2:])
        fit(node, len(body.inputs) == len(states) + 2 and len(body.outputs) == len(node.outputs) + 1)
        fit(node, None not in states and len(node.outputs) >= len(states))
        trips = node.inputs[0]
        condition = node.inputs[1] if len(node.inputs) > 1 else None
        total = math.inf if trips is None else self.number(trips)
        if total is None:
            return "Loop whose number of iterations is computed at run time is not supported; export it with a fixed number"
        goes = True if condition is None else self.number(condition)
        if goes is None:
            return "Loop whose condition is computed at run time is not supported; export it with a fixed number of iterations"
        self.lift(body, node)
        condition = condition or self.constant(node, np.array(True))
        scans: list[list[ir.Value]] = [[] for _ in node.outputs[len(states) :]]
        done = 0
        while goes and done < total:
            actual = [self.constant(node, np.array(done, np.int64)), condition, *states]
            made = self.inline(body, actual, node)
            condition = made[0]
            states = [*made[1 : len(states) + 1]]
            for scan, value in zip(scans, made[len(states) + 1 :], strict=True):
                scan.append(self.with_axis(node, "Unsqueeze", value, 0))
            done += 1
            goes = self.number(condition)
        if goes is None and done < total:
            rest = self._rest(node, body, [trips and self.constant(node, np.array(total - done)), condition, *states], done)
            states = list(rest.outputs[: len(states)])
            for scan, value in zip(scans, rest.outputs[len(states) :], strict=True):
                scan.append(value)
        results = [
            *states,
            *(self.joined(node, scan, 0, old) for scan, old in zip(scans, body.outputs[-len(scans) :], strict=False)),
        ]
        if any(value is None for value in results):
            return "Loop of no iterations, with outputs whose shape is not known, is not supported"
        self.replace(node, [value for value in results if value is not None])
        return None

    def _rest(self, node: ir.Node, body: ir.Graph, inputs: Sequence[ir.Value | None], done: int) -> ir.Node:
        """The iterations from `done` on; their counter starts there."""
        first = body.inputs[0]
        shift = ir.Node("", "Add", [first, self.constant(node, np.array(done, np.int64))])
        first.replace_all_uses_with(shift.outputs[0])
        shift.replace_input_with(0, first)
        nodes = tuple(body)
        if nodes:
            body.insert_before(nodes[0], shift)
        else:
            body.append(shift)
        rest = ir.Node("", "Loop", inputs, [ir.AttrGraph("body", body)], num_outputs=len(node.outputs), name=node.name)
        at(node).insert_before(node, rest)
        return rest

    def _scan(self, node: ir.Node) -> str | None:
        body = graph_of(node, "body")
        count = node.attributes.get_int("num_scan_inputs") or 0
        given = list(node.inputs[1:] if self.opset < 9 else node.inputs)
        if self.opset < 9 and node.inputs[0] is not None:
            return "Scan with lengths of sequences is not supported"
        fit(node, 0 < count <= len(given) == len(body.inputs) and len(body.outputs) == len(node.outputs) and None not in given)
        values = [value for value in given if value is not None]
        states = values[: len(values) - count]
        scanned = values[len(values) - count :]
        if any(value.shape is None or not value.shape.is_static() for value in scanned):
            return "Scan over inputs whose shape is not known is not supported"
        fit(node, len(body.outputs) >= len(states))
        self.lift(body, node)
        if self.opset >= 9:
            results = self._scanned(node, body, states, scanned)
        else:  # each row of a batch separately
            rows = []
            for row in range(sizes(scanned[0])[0]):
                one = [self.taken(node, value, row, 0) for value in values]
                rows.append(self._scanned(node, body, one[: len(states)], one[len(states) :], 1))
            results = [
                self.joined(node, [self.with_axis(node, "Unsqueeze", value, 0) for value in each if value is not None], 0, None)
                for each in zip(*rows, strict=True)
            ]
        if any(value is None for value in results):
            return "Scan of no elements is not supported"
        self.replace(node, [value for value in results if value is not None])
        return None

    def _scanned(
        self, node: ir.Node, body: ir.Graph, states: list[ir.Value], scanned: Sequence[ir.Value], dropped: int = 0
    ) -> list[ir.Value | None]:
        """States after all steps, and outputs of the steps; `dropped` leading dimensions of the node's inputs are removed."""
        outputs = len(body.outputs) - len(states)
        old = dropped > 0
        axes = [0] * len(scanned) if old else _listed(node, "scan_input_axes", len(scanned))
        back = _listed(node, "directions" if old else "scan_input_directions", len(scanned))
        out_axes, out_back = (
            _listed(node, name, 0 if old else outputs) for name in ("scan_output_axes", "scan_output_directions")
        )
        out_axes = out_axes or [0] * outputs
        out_back = out_back or [0] * outputs
        original = node.inputs[len(node.inputs) - len(scanned) :]
        steps = set()
        for value, axis in zip(original, axes, strict=True):
            shape = sizes(value)[dropped:]
            fit(node, -len(shape) <= axis < len(shape))
            steps.add(shape[axis])
        fit(node, len(steps) == 1)
        [total], scans = steps, [[] for _ in range(outputs)]  # type: ignore[var-annotated]
        for step in range(total):
            places = [total - 1 - step if reverse else step for reverse in back]
            parts = [self.taken(node, *each) for each in zip(scanned, places, axes, strict=True)]
            made = self.inline(body, [*states, *parts], node)
            states = made[: len(states)]
            for scan, value, axis in zip(scans, made[len(states) :], out_axes, strict=True):
                scan.append(self.with_axis(node, "Unsqueeze", value, axis))
        for scan, reverse in zip(scans, out_back, strict=True):
            if reverse:
                scan.reverse()
        return [*states, *(self.joined(node, scan, axis, None) for scan, axis in zip(scans, out_axes, strict=True))]

    # -- branches

    def _if(self, node: ir.Node) -> str | None:
        reason = "If whose condition is computed at run time"
        branches = [graph_of(node, "then_branch"), graph_of(node, "else_branch")]
        if self.number(node.inputs[0]) is not None or not self.choose:
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
            if indices is not None and indices.const_value is None:
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
            self.lift(branch, node)
        then, other_ = (self.inline(branch, [], node) for branch in branches)
        flat = self.emit(node, "Reshape", [node.inputs[0], self.constant(node, np.zeros(0, np.int64))])
        self.replace(node, [self.emit(node, "Where", [flat, *pair]) for pair in zip(then, other_, strict=True)])
        return None


def _listed(node: ir.Node, name: str, count: int) -> list[int]:
    """An attribute with `count` numbers; zeros if it is omitted."""
    given = list(node.attributes.get_ints(name) or [0] * count)
    fit(node, len(given) == count)
    return given


def _shown(value: ir.Value) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value.type, ir.TensorType) else "a value that is not a tensor"
