"""Small hand-written graphs in ONNX's operators, around one kernel each, to be measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashmem.base.types import DType
from flashmem.compiler.ir.builder import constant
from flashmem.compiler.ir.graph import ArrayConstant, Graph, GraphPort, Node, Value
from flashmem.compiler.ir.quantised import QuantizedConstant


@dataclass
class Sketch:
    """A graph under construction, in ONNX's operators."""

    nodes: list[Node] = field(default_factory=list)
    inputs: list[GraphPort] = field(default_factory=list)

    def input(self, *shape: int, dtype: DType = "float32") -> Value:
        """Add an activation as an input of the graph."""
        value = Value(f"x{len(self.inputs)}", shape, dtype)
        self.inputs.append(GraphPort(value.name, dtype, value))
        return value

    def weight(self, *shape: int) -> Value:
        """A weight; all its elements are equal."""
        return constant(f"w{len(self.nodes)}.{len(shape)}", np.broadcast_to(np.float32(0.01), shape))

    def nibbles(self, depth: int, columns: int, block: int) -> Value:
        """A weight of unsigned codes of 4 bits, with a scale in half for each `block` steps of depth and column."""
        codes = ArrayConstant(np.broadcast_to(np.uint8(8), (depth, columns)))
        scale = ArrayConstant(np.full((depth // block, columns), 0.01, np.float16))
        weight = QuantizedConstant(codes, scale, None, (block, 1), 4, minimum=scale)
        return Value(f"w{len(self.nodes)}.codes", (depth, columns), "float32", weight)

    def node(self, op: str, inputs: Sequence[Value | None], shape: Sequence[int], **attributes: Any) -> Value:
        """Add a node; returns its output: a condition of Less, else of the type of the first input that is no condition."""
        name = f"{op}{len(self.nodes)}"
        given: DType = next((each.dtype for each in inputs if each is not None and each.dtype != "bool"), "float32")
        output = Value(f"{name}.out", tuple(shape), "bool" if op == "Less" else given)
        node = Node(op, name, list(inputs), [output], attributes)
        output.producer = node
        self.nodes.append(node)
        return output

    def finish(self, output: Value) -> Graph:
        """The graph with this output."""
        return Graph("case", self.inputs, [GraphPort("y", output.dtype, output)], self.nodes)
