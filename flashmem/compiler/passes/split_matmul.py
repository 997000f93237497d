"""Split-matmul: a product of which only parts are read becomes a product for each part, with its columns of the weights.

Exporters compute queries, keys and values, or both halves of a gated activation, by one product, and slice its result. Slicing
the tensor copies every part, and the whole stays in memory until the last part is copied. Slicing the weights costs nothing:
columns of a constant are read when they are packed. Elementwise operators on a part then fuse with its product
(`compiler.passes.fusion`).

One large product is faster than a few small ones, which all read the same rows. So parts stay together if no part is copied and
all are needed at once: queries, keys and values of an attention, which reads views (`compiler.passes.attention_views`). A part
that other operators read first, such as a query that is pooled, becomes a separate product; its neighbours stay together.

A graph with states stays as it is. It reads the same weights in another variant, for one token, whose parts are contiguous.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from flashmem.compiler.ir.builder import Rewriter, sliced_constant
from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.ir.strided import StridedView, merged
from flashmem.compiler.ir.users import Readers
from flashmem.compiler.ir.view_nodes import KEPT, constant_factor, emit_view, through
from flashmem.compiler.kernels.attention.operators import is_attended
from flashmem.compiler.passes.patterns import is_by_column

Columns = tuple[int, int]
"""A range of columns: the first, and one past the last."""


@dataclass(frozen=True)
class _Leaf:
    """A Slice of `columns` of a product; `view` is its result in the product's memory."""

    node: Node
    view: StridedView
    columns: Columns
    is_attended: bool


@dataclass
class _Whole:
    """A product with its elementwise operators, the Slices of its result, and the groups of columns that become products."""

    nodes: list[Node]
    leaves: list[_Leaf]
    groups: list[Columns]
    made: dict[Columns, Value] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.nodes[0].outputs[0].shape[-1]

    def part_of(self, leaf: _Leaf) -> tuple[Columns, StridedView]:
        """The group that contains `leaf`, and the leaf as a view of the group's result."""
        first, end = next(group for group in self.groups if group[0] <= leaf.columns[0] and leaf.columns[1] <= group[1])
        wide = self.width
        narrow = end - first

        def moved(stride: int) -> int:
            return stride // wide * narrow if stride >= wide else stride

        output = self.nodes[-1].outputs[0]
        part = self.made.setdefault((first, end), Value(f"{output.name}.{first}", (*output.shape[:-1], narrow), output.dtype))
        dimensions = tuple(merged([(size, moved(stride)) for size, stride in each]) for each in leaf.view.dimensions)
        return (first, end), StridedView(part, leaf.view.start - first, dimensions)


def split_matmuls(graph: Graph) -> Graph:
    """`graph` (decomposed, attention matched), in which products compute only the parts that nodes read."""
    if graph.states:
        return graph
    readers = Readers(graph)
    found = [whole for node in graph.nodes if (whole := _whole(node, readers)) is not None]
    wanted = Counter(each.nodes[0].input(1) for each in found)
    # A weight that other nodes read whole, or in other parts, would be stored twice.
    found = [
        each
        for each in found
        if wanted[each.nodes[0].input(1)] == len(readers.of(each.nodes[0].input(1)))
        and all(other.groups == each.groups for other in found if other.nodes[0].input(1) is each.nodes[0].input(1))
    ]
    if not found:
        return graph
    return _Splitting(found).graph(graph)


def _whole(node: Node, readers: Readers) -> _Whole | None:
    """The product `node` with the Slices of its result; None if it stays whole."""
    if not _is_product(node) or node.outputs[0].size == node.outputs[0].shape[-1]:  # parts of one row are contiguous
        return None
    nodes = [node]
    value = node.outputs[0]
    while (reader := readers.single(value)) is not None and is_by_column(reader, value):
        nodes.append(reader)
        value = reader.outputs[0]
    leaves: list[_Leaf] = []
    if value in readers.outputs or not _gather(value, StridedView.of(value), node.outputs[0].shape[-1], readers, leaves):
        return None
    groups = _groups(node.outputs[0].shape[-1], leaves)
    if groups is None or any(_sliced(node.input(1), _column_axis(node), *each) is None for each in groups):
        return None
    return _Whole(nodes, leaves, groups)


def _is_product(node: Node) -> bool:
    """Whether `node` is a product of floats with one constant matrix, and has no other operand by column."""
    if node.op not in ("MatMul", "Conv") or len(node.inputs) < 2 or node.outputs[0].dtype != "float32":
        return False
    weight = node.input(1)
    if weight.constant is None or weight.dtype != "float32" or node.optional(3) or node.optional(5):
        return False
    if node.op == "MatMul":
        return len(weight.shape) > 1 and math.prod(weight.shape[:-2]) == 1
    return bool(node.attributes["group"] == 1)


def _column_axis(node: Node) -> int:
    """The axis of the output columns in a product's weight."""
    if node.op == "Conv":
        return 0
    return len(node.input(1).shape) - (2 if node.attributes["transposed"] else 1)


def _gather(value: Value, view: StridedView, width: int, readers: Readers, leaves: list[_Leaf]) -> bool:
    """Whether only Slices read `value`, each of them some of its `width` columns in every row; appends them to `leaves`."""
    for node in readers.of(value):
        output = node.outputs[0]
        seen = through(node, view) if node.op in ("Slice", "Reshape", "Transpose") else None
        if node.op == "Slice":
            columns = None if seen is None else _columns(seen, view.root.size // width, width)
            if seen is None or columns is None:
                return False
            leaves.append(_Leaf(node, seen, columns, _is_attended(output, readers)))
            continue
        if seen is None or output in readers.outputs or not _gather(output, seen, width, readers, leaves):
            return False
    return bool(leaves)


def _columns(view: StridedView, rows: int, width: int) -> Columns | None:
    """The range of columns that a Slice selects in each of `rows` rows; None if it is no such Slice."""
    run = 1
    count = 1
    for size, stride in sorted(view.factors, key=lambda each: each[1]):
        if stride >= width:
            count *= size
        elif stride != run or size * stride > width:
            return None
        else:
            run *= size
    return (view.start, view.start + run) if count == rows and view.start + run <= width and run < width else None


def _is_attended(value: Value, readers: Readers) -> bool:
    """Whether attention reads `value` through views only."""
    if value in readers.outputs:
        return False
    for node in readers.of(value):
        if is_attended(node, value):
            continue
        moves = node.op in ("Reshape", "Transpose", "Expand") or constant_factor(node) is not None
        if not moves or not _is_attended(node.outputs[0], readers):
            return False
    return True


def _groups(width: int, leaves: Sequence[_Leaf]) -> list[Columns] | None:
    """The ranges of columns that become products; None if all stay together, or parts overlap.

    Neighbours that products read as views stay together, unless one is so small that it would be copied.
    """
    attended: dict[Columns, bool] = {}
    for leaf in leaves:
        attended[leaf.columns] = attended.get(leaf.columns, True) and leaf.is_attended
    made: list[Columns] = []
    together: list[Columns] = []
    for first, end in sorted(attended):
        if made and first < made[-1][1]:
            return None
        parts = [*together, (first, end)]
        least = min(high - low for low, high in parts)
        if attended[first, end] and together and parts[-2][1] == first and least * KEPT >= end - together[0][0]:
            made[-1] = (together[0][0], end)
            together = parts
            continue
        made.append((first, end))
        together = [(first, end)] if attended[first, end] else []
    return None if made == [(0, width)] else made


class _Splitting:
    """Builds the new graph. It computes a part at its first use."""

    def __init__(self, found: Sequence[_Whole]) -> None:
        self.rewriter = Rewriter()
        self.of_leaf = {leaf.node: (each, leaf) for each in found for leaf in each.leaves}
        self.cut = {node for each in found for node in each.nodes}
        self.waiting: dict[Value, Node] = {}
        self.computed: set[Value] = set()
        self.constants: dict[tuple[Value, int, Columns], Value] = {}

    def graph(self, old: Graph) -> Graph:
        for node in old.nodes:
            if node in self.cut:
                continue
            moves = node.op in ("Reshape", "Transpose") and node.inputs[0] in self.waiting
            if node in self.of_leaf or moves:
                self.waiting[node.outputs[0]] = node
                continue
            self.keep(node)
        for port in old.outputs:
            self.need(port.value)
        return self.rewriter.graph(old)

    def keep(self, node: Node) -> None:
        """Append `node`, after the nodes of its inputs."""
        for value in node.inputs:
            self.need(value)
        made = Node(node.op, node.name, [self.rewriter.now(value) for value in node.inputs], node.outputs, node.attributes)
        for output in made.outputs:
            output.producer = made
        self.rewriter.nodes.append(made)

    def need(self, value: Value | None) -> None:
        """Append the nodes that compute `value`, if they are deferred."""
        node = self.waiting.pop(value, None) if value is not None else None
        if node is None:
            return
        if node not in self.of_leaf:
            self.keep(node)
            return
        whole, leaf = self.of_leaf[node]
        group, view = whole.part_of(leaf)
        if view.root not in self.computed:
            self.computed.add(view.root)
            self.compute(whole, group, view.root)
        if view.root.size > leaf.node.outputs[0].size:
            self.cut_group(group, view, leaf)
        elif view.is_contiguous and view.root.shape == leaf.node.outputs[0].shape:
            self.rewriter.replaced[leaf.node.outputs[0]] = view.root
        else:
            emit_view(self.rewriter, view, leaf.node.outputs[0])

    def cut_group(self, group: Columns, view: StridedView, leaf: _Leaf) -> None:
        """Append the Slice of one part of a group that stays together."""
        first, end = (column - group[0] for column in leaf.columns)
        root = view.root
        starts = (*[0] * (len(root.shape) - 1), first)
        part = Value(f"{leaf.node.outputs[0].name}.columns", (*root.shape[:-1], end - first), root.dtype)
        self.rewriter.add("Slice", [root], part, leaf.node.name, starts=starts, steps=(1,) * len(root.shape))
        width = root.shape[-1]
        narrow = end - first
        dimensions = tuple(
            merged([(size, stride // width * narrow if stride >= width else stride) for size, stride in each])
            for each in view.dimensions
        )
        emit_view(self.rewriter, StridedView(part, 0, dimensions), leaf.node.outputs[0])

    def compute(self, whole: _Whole, columns: Columns, result: Value) -> None:
        """Append the product and its elementwise operators for `columns` only."""
        product = whole.nodes[0]
        self.need(product.inputs[0])
        inputs = [self.rewriter.now(each) for each in product.inputs]
        inputs[1] = self.constant(product.input(1), _column_axis(product), columns)
        for node, following in zip(whole.nodes, [*whole.nodes[1:], None], strict=True):
            output = node.outputs[0]
            made = Value(f"{output.name}.{columns[0]}", result.shape, output.dtype) if following else result
            self.rewriter.add(node.op, inputs, made, f"{node.name}.{columns[0]}", **node.attributes)
            inputs = [
                made if each is output else self.beside(each, columns) for each in (following.inputs if following else [])
            ]

    def beside(self, constant: Value | None, columns: Columns) -> Value | None:
        """The part of a constant operand for those columns."""
        if constant is None or constant.size == 1:
            return constant
        return self.constant(constant, len(constant.shape) - 1, columns)

    def constant(self, value: Value, axis: int, columns: Columns) -> Value:
        """Those columns of a constant; one value for all products that read it."""
        key = value, axis, columns
        if key not in self.constants:
            part = _sliced(value, axis, *columns)
            assert part is not None, "columns were found to be a part"
            self.constants[key] = part
        return self.constants[key]


def _sliced(value: Value, axis: int, first: int, end: int) -> Value | None:
    return value if (first, end) == (0, value.shape[axis]) else sliced_constant(value, axis, first, end)
