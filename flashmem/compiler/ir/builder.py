"""Graph rewriting: passes read nodes and emit others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from flashmem.base.types import DType
from flashmem.compiler.ir.blocks.constant import BlockConstant
from flashmem.compiler.ir.graph import ArrayConstant, Constant, Graph, Node, Value
from flashmem.compiler.ir.quantised import QuantizedConstant

Found = TypeVar("Found")


@dataclass(frozen=True)
class DerivedConstant:
    """A constant computed from others when it is read. Until then, a permuted or reshaped weight needs no memory."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    compute: Callable[[], NDArray[Any]]

    def array(self) -> NDArray[Any]:
        """Compute the data."""
        return self.compute()


def dtype_of(data: NDArray[Any]) -> DType:
    """The element type of `data` on the device: unchanged, except that all floating point types become float32."""
    name = data.dtype.name
    return next((dtype for dtype in get_args(DType) if dtype == name), "float32")


def constant(name: str, data: NDArray[Any]) -> Value:
    """A value that holds `data`."""
    return Value(name, data.shape, dtype_of(data), ArrayConstant(data))


def derived(
    value: Value,
    name: str,
    shape: Sequence[int],
    function: Callable[[NDArray[Any]], NDArray[Any]],
    dtype: DType | None = None,
) -> Value:
    """The constant `function(value)` of `shape`, computed when read; of another element type if `dtype` is given."""
    source: Constant | None = value.constant
    assert source is not None, f"{value.name} is not a constant"
    read = source.array
    stored = source.dtype if dtype is None else np.dtype(dtype)
    return Value(name, tuple(shape), dtype or value.dtype, DerivedConstant(tuple(shape), stored, lambda: function(read())))


def reshaped_constant(value: Value, name: str, shape: tuple[int, ...]) -> Value:
    """The constant `value` in another shape; a quantised one stays quantised where its scales allow it."""
    if isinstance(value.constant, QuantizedConstant) and (made := value.constant.reshaped(shape)) is not None:
        return Value(name, shape, value.dtype, made)
    return derived(value, name, shape, lambda array: array.reshape(shape))


def transposed_constant(value: Value, name: str, perm: tuple[int, ...]) -> Value:
    """The constant `value` with its axes permuted; a quantised one stays quantised."""
    shape = tuple(value.shape[axis] for axis in perm)
    if isinstance(value.constant, QuantizedConstant):
        return Value(name, shape, value.dtype, value.constant.transposed(perm))
    return derived(value, name, shape, lambda array: array.transpose(perm))


def sliced_constant(value: Value, axis: int, first: int, end: int) -> Value | None:
    """Elements `first` to `end` of the constant `value` along `axis`, under its name.

    A quantised constant stays quantised; None if the cut is inside a block.
    """
    shape = (*value.shape[:axis], end - first, *value.shape[axis + 1 :])
    if isinstance(value.constant, QuantizedConstant | BlockConstant):
        part = value.constant.sliced(axis, first, end)
        return None if part is None else Value(value.name, shape, value.dtype, part)
    index = (*[slice(None)] * axis, slice(first, end))
    return derived(value, value.name, shape, lambda array: array[index])


@dataclass
class Rewriter:
    """Builds the new graph from appended nodes.

    `replaced` maps a value of the old graph to its replacement in the new one. `transposed` maps a transposed constant matrix
    to the stored matrix. `reshaped` maps a constant and a shape to the constant in that shape. So a weight is streamed once,
    for all forms in which nodes read it.
    """

    nodes: list[Node] = field(default_factory=list)
    replaced: dict[Value, Value] = field(default_factory=dict)
    transposed: dict[Value, Value] = field(default_factory=dict)
    reshaped: dict[tuple[Value, tuple[int, ...]], Value] = field(default_factory=dict)

    def now(self, value: Value | None) -> Value | None:
        """The value that replaces `value` in the new graph."""
        return None if value is None else self.replaced.get(value, value)

    def add(
        self,
        op: str,
        inputs: Sequence[Value | None],
        output: Value,
        name: str = "",
        **attributes: Any,
    ) -> Value:
        """Append a node that computes `output` and return `output`."""
        node = Node(op, name or output.name, list(inputs), [output], attributes)
        output.producer = node
        self.nodes.append(node)
        return output

    def emit(
        self, op: str, inputs: Sequence[Value | None], shape: Sequence[int], dtype: DType, name: str, **attributes: Any
    ) -> Value:
        """Append a node that computes a new value of `shape` and return that value."""
        return self.add(op, inputs, Value(name, tuple(shape), dtype), name, **attributes)

    def graph(self, old: Graph) -> Graph:
        """The new graph, with `old`'s inputs and outputs, and without unused nodes."""
        outputs = [replace(port, value=self.replaced.get(port.value, port.value)) for port in old.outputs]
        live = {port.value for port in outputs}
        kept: list[Node] = []
        for node in reversed(self.nodes):
            if any(output in live for output in node.outputs):
                kept.append(node)
                live.update(value for value in node.inputs if value is not None)
        return replace(old, nodes=kept[::-1], outputs=outputs)


def replaced(graph: Graph, found: Mapping[Node, Found], write: Callable[[Rewriter, Found], object]) -> Graph:
    """`graph`, in which `write` replaces each node of `found` by the nodes it appends."""
    if not found:
        return graph
    rewriter = Rewriter()
    for node in graph.nodes:
        if node in found:
            write(rewriter, found[node])
        else:
            rewriter.nodes.append(node)
    return rewriter.graph(graph)
