"""Transpose sinking: defers Transposes and Reshapes until an operator requires their order, so that most cancel.

A deferred result is a strided view of an existing tensor (`compiler.ir.strided`). Many operators work in any order:

- elementwise operators run in the order of most of their operands; their constants are permuted at compile time;
- operators on rows (LayerNormalization, a product with constant weights) accept rows in any order;
- a Slice cuts any dimension; pooling without overlap gives the same inside windows as inside the image they were cut from.

Their results are deferred too. So the Transposes of two layouts cancel (`compiler.passes.layout`), and windows of an image need
none before attention, which reads views (`compiler.passes.attention_views`). A product with weights defers a Transpose only if
its result ends in attention, since that result may be larger than its operand.
"""

from __future__ import annotations

import math
from dataclasses import replace

from flashmem.compiler.ir.builder import Rewriter, derived
from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.ir.strided import Dimension, ElementOrder, Factor, StridedView, merged, row_major
from flashmem.compiler.ir.users import Readers
from flashmem.compiler.ir.view_nodes import emit_view, first_of_run, through
from flashmem.compiler.kernels.attention.operators import is_attended
from flashmem.compiler.operators import REGISTRY, is_elementwise
from flashmem.compiler.operators.rewriting import reshaped

_POOLING = ("MaxPool", "AveragePool", "LpPool")


def sink_transposes(graph: Graph) -> Graph:
    """`graph` (decomposed, layouts assigned, attention matched) with only the Transposes that its operators require."""
    return _Moves(graph).graph()


class _Moves:
    """One walk over a graph.

    Attributes:
        views: results that are or were deferred, as views of tensors of the new graph.
        there: those that a node computes after all, because another node required their order.
        needed: tensors that some node requires in order anyway, each with that order.
    """

    def __init__(self, graph: Graph) -> None:
        self.old = graph
        self.readers = Readers(graph)
        self.rewriter = Rewriter()
        self.views: dict[Value, StridedView] = {}
        self.needed: set[tuple[Value, Dimension]] = set()
        self.there: set[Value] = set()
        self.moved: dict[object, Value] = {}
        self.constants: dict[object, Value] = {}
        self.ends: dict[Value, bool] = {}

    def graph(self) -> Graph:
        for node in self.old.nodes:
            if not self._waits(node):
                self._keep(node)
        for port in self.old.outputs:
            self.rewriter.replaced[port.value] = self.now(port.value)
        return self.rewriter.graph(self.old)

    def now(self, value: Value) -> Value:
        """`value` in its own order, computed if it is deferred."""
        if value not in self.views:
            return value
        view = self.views[value]
        if view.is_contiguous and view.root.shape == value.shape:
            return view.root
        if value not in self.there:
            self.there.add(value)
            self.needed.add((view.root, merged(view.factors)))
            emit_view(self.rewriter, view, value, self.moved)
        return value

    def view(self, value: Value) -> StridedView:
        """`value` as a view of an existing tensor."""
        return self.views.get(value) or StridedView.of(value)

    def is_moved(self, value: Value | None) -> bool:
        """Whether `value` is deferred, and no other node requires its order anyway."""
        if value is None or value not in self.views or self.views[value].is_contiguous:
            return False
        view = self.views[value]
        return (view.root, merged(view.factors)) not in self.needed

    def _wait(self, value: Value, view: StridedView) -> None:
        """Defer `value`, as a view of an existing tensor."""
        self.views[value] = view
        if value in self.readers.outputs or any(self._needs(node, value) for node in self.readers.of(value)):
            self.needed.add((view.root, merged(view.factors)))

    def _needs(self, node: Node, value: Value) -> bool:
        """Whether `node`, which reads the deferred `value`, certainly requires its order."""
        if node.op in ("Reshape", "Transpose", "Slice", *_POOLING) or is_elementwise(node):
            return False
        if node.op == "FusedAttention":
            return False
        axes = node.attributes.get("axes", (len(value.shape) - 1,))
        if node.op == "Normalize" and self.views[value].groups(axes) is not None:
            return False
        return not self.views[value].has_rows(axes[0])

    def _keep(self, node: Node) -> None:
        inputs = [None if value is None else self.now(value) for value in node.inputs]
        made = Node(node.op, node.name, inputs, node.outputs, node.attributes)
        for output in made.outputs:
            output.producer = made
        self.rewriter.nodes.append(made)

    def _waits(self, node: Node) -> bool:
        """Whether the result of `node` was deferred, as a view of existing tensors; if not, nothing has changed."""
        source = node.inputs[0] if node.inputs else None
        if source is None or source.constant is not None:
            return is_elementwise(node) and self._elementwise(node)
        if node.op in ("Reshape", "Transpose"):
            return self._found(node, through(node, self.view(source)))
        if is_elementwise(node):
            return self._elementwise(node)
        if not self.is_moved(source):
            return False
        if node.op == "Slice":
            return self._slice(node)
        if node.op in _POOLING:
            return self._pool(node)
        if node.op == "MatMul":
            weight = node.input(1)
            is_product = weight.constant is not None and math.prod(weight.shape[:-2]) == 1 and len(weight.shape) > 1
            return is_product and self._is_attended(node.outputs[0]) and self._rows(node, len(source.shape) - 1)
        if node.op == "Normalize" and self._groups(node):
            return True
        axes = node.attributes.get("axes", ())
        by_row = REGISTRY[node.op].kernel == "reduction" and node.op not in ("Softmax", "LogSoftmax")
        return by_row and axes[-1:] == (len(source.shape) - 1,) and self._rows(node, axes[0])

    def _found(self, node: Node, view: StridedView | None) -> bool:
        if view is not None:
            self._wait(node.outputs[0], view)
        return view is not None

    # -- elementwise

    def _elementwise(self, node: Node) -> bool:
        """Compute `node` in the order of an operand, if that moves fewer elements than to restore the operand's order."""
        output = node.outputs[0]
        moved = [value for value in dict.fromkeys(node.inputs) if value is not None and self.is_moved(value)]
        orders = {ElementOrder.of(self.views[value]): None for value in moved if value.shape == output.shape}
        if not orders:
            return False
        best: float = sum(value.size for value in moved)
        chosen: ElementOrder | None = None
        for order in orders:
            order = self._shaped(node, order)
            cost = sum(self._cost(value, order) for value in dict.fromkeys(node.inputs) if value is not None)
            if cost < best:
                best = cost
                chosen = order
        if chosen is None:
            return False
        inputs = [None if value is None else self._brought(value, chosen) for value in node.inputs]
        made = self.rewriter.emit(node.op, inputs, chosen.shape, output.dtype, output.name, **node.attributes)
        assert made.producer is not None
        made.producer.name = node.name
        self._wait(output, chosen.view(made))
        return True

    def _shaped(self, node: Node, order: ElementOrder) -> ElementOrder:
        """`order` in the shape that it names if all operands broadcast to it, otherwise in the shape of its factors."""
        values = [value for value in node.inputs if value is not None and value.size > 1]
        fits = all(order.operand_shape(order.parts_of(value)) is not None for value in values)
        return order if fits else replace(order, shape=order.sizes)

    def _cost(self, value: Value, order: ElementOrder) -> float:
        """Number of elements to move to bring `value` into `order`."""
        if value.constant is not None or value.size == 1:
            return 0
        view = self._ordered(value, order)
        return math.inf if view is None else 0 if view.is_contiguous else value.size

    def _ordered(self, value: Value, order: ElementOrder) -> StridedView | None:
        """`value` in `order`, as a view."""
        parts = order.parts_of(value)
        versions = [self.view(value), *([StridedView.of(value)] if value in self.there else [])]
        views = [view.transposed(order.perm) for version in versions if (view := version.reshaped(parts)) is not None]
        return min(views, key=lambda view: not view.is_contiguous, default=None)

    def _brought(self, value: Value, order: ElementOrder) -> Value:
        """`value` as an operand together with operands in `order`."""
        if value.size == 1:
            return self.now(value) if len(value.shape) <= len(order.shape) else self._reshaped(value, (1,))
        parts = order.parts_of(value)
        shape = order.operand_shape(parts)
        assert shape is not None, "an order has the shape that its operands broadcast to"
        if value.constant is not None:
            key = value, parts, order.perm, shape
            if key not in self.constants:
                perm = order.perm
                self.constants[key] = derived(
                    value, value.name, shape, lambda array: array.reshape(parts).transpose(perm).reshape(shape)
                )
            return self.constants[key]
        view = self._ordered(value, order)
        assert view is not None, "an operand that cannot be brought into an order costs more than all"
        seen = view.reshaped(shape)
        if seen is not None and view.is_contiguous and view.root.shape == shape:
            return view.root
        made = Value(f"{value.name}.ordered", shape, value.dtype)
        return emit_view(self.rewriter, seen or view, made, self.moved)

    def _reshaped(self, value: Value, shape: tuple[int, ...]) -> Value:
        return reshaped(self.rewriter, self.now(value), shape)

    # -- operators on rows in any order

    def _rows(self, node: Node, axis: int) -> bool:
        """Rows of the dimensions from `axis` on, if they are contiguous in memory; the result keeps the operand's order."""
        source = node.input(0)
        output = node.outputs[0]
        view = self.views[source]
        columns = math.prod(source.shape[axis:])
        if not view.has_rows(axis):
            return False
        root = view.root
        wide = math.prod(output.shape[axis:])
        shape = root.shape if root.shape[-1] == columns else (root.size // columns, columns)
        x = self._reshaped(root, shape) if root.shape != shape else root
        attributes = {**node.attributes, **({"axes": (len(shape) - 1,)} if "axes" in node.attributes else {})}
        inputs = [x, *(None if value is None else self.now(value) for value in node.inputs[1:])]
        made = self.rewriter.emit(node.op, inputs, (*shape[:-1], wide), output.dtype, output.name, **attributes)
        assert made.producer is not None
        made.producer.name = node.name
        dimensions = [tuple((size, stride // columns * wide) for size, stride in each) for each in view.dimensions[:axis]]
        inner = StridedView.of(Value("", output.shape[axis:], output.dtype)).dimensions
        self._wait(output, StridedView(made, 0, (*dimensions, *inner)))
        return True

    def _groups(self, node: Node) -> bool:
        """Groups of channels, channels-last: short runs of columns in many rows are normalized together."""
        output = node.outputs[0]
        view = self.views[node.input(0)]
        sizes = view.groups(node.attributes["axes"])
        if sizes is None:
            return False
        x = self._reshaped(view.root, sizes)
        made = self.rewriter.emit("NormalizeGroups", [x], sizes, output.dtype, output.name, epsilon=node.attributes["epsilon"])
        assert made.producer is not None
        made.producer.name = node.name
        self._wait(output, replace(view, root=made))
        return True

    def _is_attended(self, value: Value) -> bool:
        """Whether `value` reaches attention only through operators that this pass can defer."""
        if value not in self.ends:
            self.ends[value] = False
            nodes = self.readers.of(value)
            self.ends[value] = (
                value not in self.readers.outputs and bool(nodes) and all(self._attends(node, value) for node in nodes)
            )
        return self.ends[value]

    def _attends(self, node: Node, value: Value) -> bool:
        if is_attended(node, value):
            return True
        by_column = is_elementwise(node) and all(each is None or each is value or each.constant for each in node.inputs)
        moves = by_column or node.op in ("Reshape", "Transpose", "Slice", *_POOLING)
        return moves and self._is_attended(node.outputs[0])

    # -- parts and windows

    def _slice(self, node: Node) -> bool:
        """Slice dimensions that have one stride each.

        If several Slices cut one tensor into contiguous runs, they are not deferred: in order they need no copies.
        """
        output = node.outputs[0]
        view = self.views[node.input(0)]
        if len(self.readers.of(node.input(0))) > 1 and first_of_run(node) is not None:
            return False
        flat = [
            (axis, place, *factor) for axis, dimension in enumerate(view.dimensions) for place, factor in enumerate(dimension)
        ]
        flat.sort(key=lambda each: -each[3])
        starts = []
        steps = []
        sizes = []
        for axis, _, size, _ in flat:
            start = node.attributes["starts"][axis]
            step = node.attributes["steps"][axis]
            is_cut = (start, step, output.shape[axis]) != (0, 1, view.shape[axis])
            if is_cut and len(view.dimensions[axis]) > 1:
                return False
            starts.append(start if is_cut else 0)
            steps.append(step if is_cut else 1)
            sizes.append(output.shape[axis] if is_cut else size)
        x = self._reshaped(view.root, tuple(size for _, _, size, _ in flat))
        part = self.rewriter.emit(
            "Slice", [x], sizes, output.dtype, output.name, starts=tuple(starts), steps=tuple(steps)
        )  # fmt: skip
        assert part.producer is not None
        part.producer.name = node.name
        dimensions: list[list[Factor]] = [list(each) for each in view.dimensions]
        for (axis, place, *_), size, stride in zip(flat, sizes, row_major(sizes), strict=True):
            dimensions[axis][place] = (size, stride)  # a dimension's factors may be in another order than their strides
        self._wait(output, StridedView(part, 0, tuple(merged(each) for each in dimensions)))
        return True

    def _pool(self, node: Node) -> bool:
        """Pooling windows that tile the image of a view: the same result inside the images they were cut from."""
        given = node.attributes
        view = self.views[node.input(0)]
        output = node.outputs[0]
        kernel = given["kernel"]
        fits = (
            len(kernel) == 2
            and tuple(given["strides"]) == tuple(kernel)
            and not any(given["pads"])
            and set(given["dilations"]) == {1}
        )
        if not fits or any(len(each) != 1 for each in view.dimensions[1:]):
            return False
        (height, down), (width, across), (channels, step) = (each[0] for each in view.dimensions[1:])
        outer = [stride for _, stride in view.dimensions[0]]
        if height % kernel[0] or width % kernel[1] or step != 1 or across != channels or down < across * width:
            return False
        # Strides from `across` to `down` are columns of windows; beyond `height` rows, other images.
        columns = down // across
        if any(across * width <= stride < down and stride % (across * width) for stride in outer):
            return False
        total = view.root.size // (down * height)
        x = self._reshaped(view.root, (total, height, columns, channels))
        sizes = (total, height // kernel[0], columns // kernel[1], channels)
        made = self.rewriter.emit(node.op, [x], sizes, output.dtype, output.name, **given)
        assert made.producer is not None
        made.producer.name = node.name
        images = kernel[0] * kernel[1]
        windows = kernel[1]
        batch = tuple((size, stride // (images if stride >= down * height else windows)) for size, stride in view.dimensions[0])
        rows = (height // kernel[0], down // windows)
        places = (width // kernel[1], across)
        self._wait(output, StridedView(made, 0, (batch, merged([rows]), merged([places]), ((channels, 1),))))
        return True
