"""Layout assignment: 4D values around convolutions become channels-last.

Kernels for convolution, pooling and resizing read N, H, W, C, so that a vector of channels is one load. This pass walks the
nodes once and keeps, for each value, up to two versions: the logical one (dimensions in ONNX's order) and the
channels-last one. Nodes that do not care take the version that is there; a missing version is made by one Transpose, on
first demand. Shapes after this pass are physical.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flashmem.graph.builder import Rewriter, derived
from flashmem.graph.ir import Graph, Node, Value
from flashmem.graph.operators import is_elementwise
from flashmem.graph.rewrites.common import transpose

TO_LAST = (0, 2, 3, 1)
"""N, C, H, W -> N, H, W, C: physical axis i holds logical axis TO_LAST[i]."""

TO_FIRST = (0, 3, 1, 2)
CHANNELS_LAST = {"Conv", "ConvTranspose", "MaxPool", "AveragePool", "Resize"}
"""Operators whose kernels want channels last."""

_Remap = Callable[[Node], dict[str, object]]


def _axes(node: Node) -> dict[str, object]:
    return {"axes": tuple(sorted(TO_FIRST[a] for a in node.attributes["axes"]))}


def _axis(node: Node) -> dict[str, object]:
    return {"axis": TO_FIRST[node.attributes["axis"]]}


def _per_dimension(*names: str) -> _Remap:
    return lambda node: {name: tuple(node.attributes[name][axis] for axis in TO_LAST) for name in names}


AGNOSTIC: dict[str, _Remap] = {
    "Concat": _axis,
    "Pad": _per_dimension("before"),
    "Slice": _per_dimension("starts", "steps"),
    "Tile": _per_dimension("repeats"),
    **{
        f"Reduce{kind}": _axes for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
    },
    "Softmax": _axes,
    "LogSoftmax": _axes,
    "Normalize": _axes,
}
"""Operators that run on either version, and how their attributes change with it."""


class _Layouts:
    """The versions of each value that exist so far."""

    def __init__(self) -> None:
        self.rewriter = Rewriter()
        self.last: dict[Value, Value] = {}
        self.only_last: set[Value] = set()

    def logical(self, value: Value | None) -> Value | None:
        if value is None or value not in self.only_last:
            return value
        source = self.last[value]
        transpose(self.rewriter, source, TO_FIRST, value)
        self.only_last.discard(value)
        return value

    def channels_last(self, value: Value) -> Value:
        """The channels-last version; a constant of lower rank is first given the leading dimensions it broadcasts over."""
        if value not in self.last:
            full = (*[1] * (4 - len(value.shape)), *value.shape)
            shape = tuple(full[axis] for axis in TO_LAST)
            name = f"{value.name}.nhwc"
            if value.constant is not None:
                self.last[value] = derived(value, name, shape, lambda a: a.reshape(full).transpose(TO_LAST))
            else:
                self.last[value] = transpose(self.rewriter, value, TO_LAST, Value(name, shape, value.dtype))
        return self.last[value]

    def new_last(self, value: Value) -> Value:
        shape = tuple(value.shape[axis] for axis in TO_LAST)
        self.last[value] = Value(f"{value.name}.nhwc", shape, value.dtype)
        self.only_last.add(value)
        return self.last[value]


def assign_layouts(graph: Graph) -> Graph:
    """`graph` (in normal form) with convolutional parts channels-last and Transposes where the two layouts meet."""
    layouts = _Layouts()
    for node in graph.nodes:
        if node.op in CHANNELS_LAST:
            x = layouts.channels_last(node.input(0))
            layouts.rewriter.add(
                node.op, [x, *node.inputs[1:]], layouts.new_last(node.outputs[0]), node.name, **node.attributes
            )
        elif _prefers_last(node, layouts):
            inputs = [layouts.channels_last(value) for value in node.inputs if value is not None]
            attributes = AGNOSTIC[node.op](node) if node.op in AGNOSTIC else {}
            output = layouts.new_last(node.outputs[0])
            layouts.rewriter.add(node.op, inputs, output, node.name, **{**node.attributes, **attributes})
        else:
            inputs_ = [layouts.logical(value) for value in node.inputs]
            layouts.rewriter.add(node.op, inputs_, node.outputs[0], node.name, **node.attributes)
    for port in graph.outputs:
        layouts.logical(port.value)
    return layouts.rewriter.graph(replace(graph))


def _prefers_last(node: Node, layouts: _Layouts) -> bool:
    """Whether `node` should run channels-last: it can, and an input exists only so."""
    if len(node.outputs[0].shape) != 4 or not any(value in layouts.only_last for value in node.inputs):
        return False
    values = [value for value in node.inputs if value is not None]
    if is_elementwise(node):
        return all(len(value.shape) == 4 or value.constant is not None or value.size == 1 for value in values)
    return node.op in AGNOSTIC and _stays_a_run(node)


def _stays_a_run(node: Node) -> bool:
    """Axes that are neighbours in one order need not be in the other; reductions need a run."""
    if "axes" not in node.attributes:
        return True
    axes = sorted(TO_FIRST[a] for a in node.attributes["axes"])
    return axes == list(range(axes[0], axes[-1] + 1))
