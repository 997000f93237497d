"""Expansion of one ONNX Runtime node to ONNX operators: access to its inputs and attributes, and the new nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

_LOWEST = {name: float(np.finfo(name).min) for name in ("float16", "float32", "float64")} | {"bfloat16": -3.3895313892515355e38}


class RefusedError(Exception):
    """The node cannot be expanded to ONNX operators; the text, which follows the operator's name, says why."""


class UnknownShapeError(Exception):
    """The shape of an input is not known yet."""


STATE = "flashmem.state"
"""The key in a node's metadata that says that its cache is a state (`flashmem.compiler.frontend.states`)."""


@dataclass
class Expansion:
    """One node and its replacement nodes, for a model of ONNX operator set `opset`.

    Methods that add nodes return the value that the last of them computes.
    """

    node: ir.Node
    opset: int
    nodes: list[ir.Node] = field(default_factory=list)
    shapes: dict[ir.Value, tuple[int, ...]] = field(default_factory=dict)

    # -- inputs and attributes

    def optional(self, index: int) -> ir.Value | None:
        """Input `index`, or None if it is omitted."""
        inputs = self.node.inputs
        value = inputs[index] if index < len(inputs) else None
        return value if value is None or value.name else None

    def input(self, index: int) -> ir.Value:
        """Input `index`, which must exist."""
        value = self.optional(index)
        if value is None:
            raise RefusedError(f"without input {index}")
        return value

    def number(self, name: str, default: float) -> float:
        """Attribute `name`, a float."""
        attribute = self.node.attributes.get(name)
        if attribute is None:
            return default
        if attribute.type not in (ir.AttributeType.FLOAT, ir.AttributeType.INT) or not math.isfinite(attribute.value):
            raise RefusedError(f"whose attribute {name} is no number")
        return float(attribute.value)

    def integer(self, name: str, default: int | None = None) -> int:
        """Attribute `name`, an integer, which must exist unless it has a default."""
        attribute = self.node.attributes.get(name)
        if attribute is None and default is not None:
            return default
        if attribute is None or attribute.type != ir.AttributeType.INT:
            raise RefusedError(f"without an integer {name}")
        return int(attribute.value)

    def text(self, name: str, default: str) -> str:
        """Attribute `name`, a string."""
        attribute = self.node.attributes.get(name)
        if attribute is None:
            return default
        if attribute.type != ir.AttributeType.STRING:
            raise RefusedError(f"whose attribute {name} is no string")
        return str(attribute.value)

    def numbers(self, name: str) -> list[float]:
        """Attribute `name`, floats or integers; empty if it is omitted."""
        attribute = self.node.attributes.get(name)
        if attribute is None:
            return []
        if attribute.type not in (ir.AttributeType.FLOATS, ir.AttributeType.INTS):
            raise RefusedError(f"whose attribute {name} is no list of numbers")
        return list(attribute.value)

    def keep(self, *names: str) -> dict[str, Any]:
        """The given attributes among `names`, to pass to an operator with the same attributes."""
        given = ((name, self.node.attributes.get(name)) for name in names)
        return {name: attribute.value for name, attribute in given if attribute is not None}

    def wants(self, index: int) -> bool:
        """Whether output `index` is used."""
        outputs = self.node.outputs
        return index < len(outputs) and bool(outputs[index].uses() or outputs[index].is_graph_output())

    def refuse_output(self, *indices: int) -> None:
        """Refuse the node if one of these outputs is used."""
        for index in indices:
            if self.wants(index):
                raise RefusedError(f"whose output {index} is used")

    def refuse_input(self, *indices: int) -> None:
        """Refuse the node if it has one of these inputs."""
        for index in indices:
            if self.optional(index) is not None:
                raise RefusedError(f"with input {index}")

    # -- properties of values

    def shape(self, value: ir.Value) -> tuple[int, ...]:
        """The static shape of an input, or of a result of `reshape`."""
        if value in self.shapes:
            return self.shapes[value]
        if value.const_value is not None:
            return tuple(value.const_value.shape.numpy())
        if value.shape is None or not value.shape.is_static() or value.dtype is None:
            raise UnknownShapeError
        return tuple(value.shape.numpy())

    def ranked(self, index: int, *ranks: int) -> tuple[int, ...]:
        """The shape of input `index`, which must have one of these ranks."""
        shape = self.shape(self.input(index))
        if len(shape) not in ranks:
            raise RefusedError(f"whose input {index} has shape {shape}")
        return shape

    def expect(self, index: int, *shapes: tuple[int, ...]) -> None:
        """Refuse the node if input `index` is given and has none of these shapes."""
        value = self.optional(index)
        if value is not None and self.shape(value) not in shapes:
            raise RefusedError(f"whose input {index} has shape {self.shape(value)}, not {shapes[0]}")

    def known(self, value: ir.Value) -> NDArray[Any] | None:
        """The elements of a constant, or None."""
        return None if value.const_value is None else value.const_value.numpy()

    def dtype(self, value: ir.Value) -> np.dtype[Any]:
        """The element type of an input."""
        kind = value.const_value.dtype if value.const_value is not None else value.dtype
        if kind is None:
            raise UnknownShapeError
        return np.dtype(kind.numpy())

    def lowest(self, like: ir.Value) -> float:
        """The most negative finite number of the element type of the input `like`."""
        name = self.dtype(like).name
        if name not in _LOWEST:
            raise RefusedError(f"of {name}")
        return _LOWEST[name]

    # -- replacement nodes

    def op(self, op: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Add an ONNX node with one output."""
        return self.ops(op, 1, *inputs, **attributes)[0]

    def ops(self, op: str, outputs: int, *inputs: ir.Value | None, **attributes: Any) -> Sequence[ir.Value]:
        """Add an ONNX node with several outputs."""
        step = f"{op}.{len(self.nodes)}"
        made = ir.node(op, list(inputs), attributes or None, num_outputs=outputs, name=f"{self.node.name}.{step}")
        first = next(value.name for value in self.node.outputs if value.name)  # unique, unlike the node's own name
        for index, value in enumerate(made.outputs):
            value.name = f"{first}.{step}.{index}"
        self.nodes.append(made)
        return made.outputs

    def constant(self, data: Any, like: ir.Value | None = None, dtype: Any = None) -> ir.Value:
        """A constant, of the element type of the input `like` or of `dtype`."""
        kind = dtype if like is None else self.dtype(like)
        return self.tensor(ir.tensor(np.asarray(data, kind)))

    def tensor(self, tensor: ir.TensorProtocol) -> ir.Value:
        """A constant with the data of `tensor`, in memory or in a file."""
        made = self.op("Constant", value=tensor)
        made.const_value = tensor
        made.dtype = tensor.dtype
        return made

    def integers(self, *values: int) -> ir.Value:
        """A vector of int64."""
        return self.constant(values, dtype=np.int64)

    def reshape(self, value: ir.Value, *shape: int) -> ir.Value:
        """`value` in another shape, which is fully known."""
        made = self.op("Reshape", value, self.integers(*shape))
        self.shapes[made] = shape
        return made

    def transpose(self, value: ir.Value, *perm: int) -> ir.Value:
        """`value` with its dimensions permuted."""
        return self.op("Transpose", value, perm=perm)

    def part(self, value: ir.Value, axis: int, start: int, end: int) -> ir.Value:
        """Elements `start` to `end` along `axis`."""
        return self.op("Slice", value, self.integers(start), self.integers(end), self.integers(axis))

    def reduce(self, op: str, value: ir.Value, axis: int) -> ir.Value:
        """A reduction along one axis, which stays as a dimension of size 1."""
        if self.opset >= (13 if op == "ReduceSum" else 18):
            return self.op(op, value, self.integers(axis), keepdims=1)
        return self.op(op, value, axes=[axis], keepdims=1)

    def scaled(self, value: ir.Value, factor: float, like: ir.Value) -> ir.Value:
        """`value` times `factor`, in the element type of the input `like`."""
        return value if factor == 1.0 else self.op("Mul", value, self.constant(factor, like))

    def plus(self, value: ir.Value, *addends: ir.Value | None) -> ir.Value:
        """The sum of `value` and all given addends."""
        for addend in addends:
            value = value if addend is None else self.op("Add", value, addend)
        return value

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """`value` in another element type."""
        return self.op("Cast", value, to=int(dtype))

    def layer_norm(self, value: ir.Value, scale: ir.Value, bias: ir.Value | None, epsilon: float) -> ir.Value:
        """Layer normalization along the last dimension, then scale and bias."""
        return self.op("LayerNormalization", value, scale, *([] if bias is None else [bias]), axis=-1, epsilon=epsilon)

    def inverse_rms(self, value: ir.Value, size: int, epsilon: float, like: ir.Value) -> ir.Value:
        """1 / sqrt(mean of squares + epsilon) along the last dimension, which has `size` elements."""
        mean = self.op("Mul", self.reduce("ReduceSumSquare", value, -1), self.constant(1 / size, like))
        return self.op("Reciprocal", self.op("Sqrt", self.op("Add", mean, self.constant(epsilon, like))))


Expand = Callable[[Expansion], Sequence[ir.Value | None]]
"""Adds the nodes that replace an ONNX Runtime node, and returns its outputs; None for an unused output."""
