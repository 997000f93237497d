"""Layout assignment: 4D and 5D values around convolutions become channels-last.

Kernels for convolution, pooling and resizing read N, H, W, C (N, D, H, W, C), so that a vector of channels is one load. This
pass walks the nodes once and keeps up to two versions of each value: the logical one (dimensions in ONNX's order) and the
channels-last one. Nodes for which the layout does not matter read the existing version. One Transpose makes a missing version,
on first use. Shapes after this pass are physical.
"""

from __future__ import annotations

from dataclasses import replace

from flashmem.compiler.ir.builder import Rewriter, derived
from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.operators import REGISTRY
from flashmem.compiler.operators.rewriting import reshaped, to_first, to_last, transpose


class _Layouts:
    """The existing versions of each value, with a channels-last one for each number of dimensions in which it is used."""

    def __init__(self) -> None:
        self.rewriter = Rewriter()
        self.last: dict[tuple[Value, int], Value] = {}
        self.only_last: set[Value] = set()

    def logical(self, value: Value | None) -> Value | None:
        if value is None or value not in self.only_last:
            return value
        rank = len(value.shape)
        transpose(self.rewriter, self.last[value, rank], to_first(rank), value)
        self.only_last.discard(value)
        return value

    def channels_last(self, value: Value, rank: int) -> Value:
        """The channels-last version; a value of lower rank first gets the leading dimensions over which it broadcasts."""
        if (value, rank) not in self.last:
            self.logical(value)
            full = (*[1] * (rank - len(value.shape)), *value.shape)
            order = to_last(rank)
            shape = tuple(full[axis] for axis in order)
            name = f"{value.name}.{'nhwc' if rank == 4 else 'ndhwc'}"
            if value.constant is not None:
                self.last[value, rank] = derived(value, name, shape, lambda a: a.reshape(full).transpose(order))
            elif (tile := _tile_of_constant(value, rank)) is not None:
                source = self.channels_last(tile.input(0), rank)
                repeats = tuple(tile.attributes["repeats"][a] for a in order)
                made = Value(name, shape, value.dtype)
                self.last[value, rank] = self.rewriter.add("Tile", [source], made, tile.name, repeats=repeats)
            else:
                source = reshaped(self.rewriter, value, full)
                self.last[value, rank] = transpose(self.rewriter, source, order, Value(name, shape, value.dtype))
        return self.last[value, rank]

    def new_last(self, value: Value) -> Value:
        rank = len(value.shape)
        shape = tuple(value.shape[axis] for axis in to_last(rank))
        self.last[value, rank] = Value(f"{value.name}.{'nhwc' if rank == 4 else 'ndhwc'}", shape, value.dtype)
        self.only_last.add(value)
        return self.last[value, rank]


def _tile_of_constant(value: Value, rank: int) -> Node | None:
    """The Tile that makes `value` from a constant, which can do so in another order of dimensions."""
    node = value.producer
    is_tile = node is not None and node.op == "Tile" and node.input(0).constant is not None
    return node if is_tile and len(value.shape) == rank else None


def assign_layouts(graph: Graph) -> Graph:
    """`graph` (decomposed) with convolutional parts channels-last, and Transposes between the two layouts."""
    layouts = _Layouts()
    for node in graph.nodes:
        operator = REGISTRY[node.op]
        rank = len(node.outputs[0].shape)
        if operator.layout == "channels_last":
            x = node.input(0)
            inputs: list[Value | None] = [layouts.channels_last(x, len(x.shape)), *map(layouts.logical, node.inputs[1:])]
            layouts.rewriter.add(node.op, inputs, layouts.new_last(node.outputs[0]), node.name, **node.attributes)
        elif operator.layout == "either" and _prefers_last(node, layouts):
            inputs = [layouts.channels_last(value, rank) for value in node.inputs if value is not None]
            output = layouts.new_last(node.outputs[0])
            layouts.rewriter.add(node.op, inputs, output, node.name, **{**node.attributes, **operator.remap(node)})
        else:
            inputs = [layouts.logical(value) for value in node.inputs]
            layouts.rewriter.add(node.op, inputs, node.outputs[0], node.name, **node.attributes)
    for port in graph.outputs:
        layouts.logical(port.value)
    return layouts.rewriter.graph(replace(graph))


def _prefers_last(node: Node, layouts: _Layouts) -> bool:
    """Whether `node`, which supports both layouts, should run channels-last: an input exists only so."""
    rank = len(node.outputs[0].shape)
    found = any(value in layouts.only_last and len(value.shape) == rank for value in node.inputs if value is not None)
    return rank in (4, 5) and found and _stays_a_run(node)


def _stays_a_run(node: Node) -> bool:
    """Whether the axes of `node` are also neighbours in the other layout; reductions need a run of axes."""
    if not node.attributes.get("axes"):
        return True
    places = to_first(len(node.outputs[0].shape))
    axes = sorted(places[a] for a in node.attributes["axes"])
    return axes == list(range(axes[0], axes[-1] + 1))
