"""Layout assignment: 4D values around convolutions become channels-last.

Kernels for convolution, pooling and resizing read N, H, W, C, so that a vector of channels is one load. This pass walks the
nodes once and keeps, for each value, up to two versions: the logical one (dimensions in ONNX's order) and the
channels-last one. Nodes that do not care take the version that is there; a missing version is made by one Transpose, on
first demand. Shapes after this pass are physical.
"""

from __future__ import annotations

from dataclasses import replace

from flashmem.graph.builder import Rewriter, derived
from flashmem.graph.ir import Graph, Node, Value
from flashmem.graph.operators import REGISTRY
from flashmem.graph.operators.lowering import TO_FIRST, TO_LAST, reshaped, transpose


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
        """The channels-last version; a value of lower rank is first given the leading dimensions it broadcasts over."""
        if value not in self.last:
            full = (*[1] * (4 - len(value.shape)), *value.shape)
            shape = tuple(full[axis] for axis in TO_LAST)
            name = f"{value.name}.nhwc"
            if value.constant is not None:
                self.last[value] = derived(value, name, shape, lambda a: a.reshape(full).transpose(TO_LAST))
            else:
                source = reshaped(self.rewriter, value, full)
                self.last[value] = transpose(self.rewriter, source, TO_LAST, Value(name, shape, value.dtype))
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
        operator = REGISTRY[node.op]
        if operator.layout == "channels_last":
            inputs: list[Value | None] = [layouts.channels_last(node.input(0)), *node.inputs[1:]]
            layouts.rewriter.add(node.op, inputs, layouts.new_last(node.outputs[0]), node.name, **node.attributes)
        elif operator.layout == "either" and _prefers_last(node, layouts):
            inputs = [layouts.channels_last(value) for value in node.inputs if value is not None]
            output = layouts.new_last(node.outputs[0])
            layouts.rewriter.add(node.op, inputs, output, node.name, **{**node.attributes, **operator.remap(node)})
        else:
            inputs = [layouts.logical(value) for value in node.inputs]
            layouts.rewriter.add(node.op, inputs, node.outputs[0], node.name, **node.attributes)
    for port in graph.outputs:
        layouts.logical(port.value)
    return layouts.rewriter.graph(replace(graph))


def _prefers_last(node: Node, layouts: _Layouts) -> bool:
    """Whether `node`, which runs on either version, should run channels-last: an input exists only so."""
    return len(node.outputs[0].shape) == 4 and any(value in layouts.only_last for value in node.inputs) and _stays_a_run(node)


def _stays_a_run(node: Node) -> bool:
    """Axes that are neighbours in one order need not be in the other; reductions need a run."""
    if not node.attributes.get("axes"):
        return True
    axes = sorted(TO_FIRST[a] for a in node.attributes["axes"])
    return axes == list(range(axes[0], axes[-1] + 1))
