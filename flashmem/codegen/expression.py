"""Elementwise pieces of a layer as one OpenCL function.

A kernel computes its outputs in vectors of `vector` elements at places (row, col) of its output seen as a matrix. The function
made here takes such a vector through the layer's tail: it loads what else the tail reads, at the places that broadcasting
gives, and returns the finished vector. Loads may run past the last column by less than a vector; tensors have that slack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from flashmem.graph.ir import Node, Value
from flashmem.graph.operators import REGISTRY
from flashmem.graph.operators.vector import STORED, Vector
from flashmem.graph.placement import Operand, place
from flashmem.program import StoredType


@dataclass(frozen=True)
class Expression:
    """The nodes of a layer that run elementwise, as a function of (seed, row, col).

    `seed` is the value that arrives in registers (None if everything is loaded). `storage` says what each value is stored in.
    """

    nodes: tuple[Node, ...]
    seed: Value | None
    domain: tuple[int, ...]
    split: int
    vector: int
    storage: Callable[[Value], StoredType]

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """Tensors the expression reads, in order of first use, each with its place. Fusion took in none without."""
        inside = {node.outputs[0] for node in self.nodes} | {self.seed}
        values = dict.fromkeys(v for node in self.nodes for v in node.inputs if v is not None and v not in inside)
        placed = [place(value, self.domain, self.split) for value in values]
        return tuple(operand for operand in placed if operand is not None)

    @property
    def result(self) -> Value:
        """The value the function returns."""
        value = self.nodes[-1].outputs[0] if self.nodes else self.seed
        assert value is not None
        return value

    def parameters(self) -> list[str]:
        """Kernel parameters, in the order of `operands`."""
        return [f"__global const {STORED[self.storage(o.value)]}* restrict e{i}" for i, o in enumerate(self.operands)]

    def names(self) -> list[str]:
        """Names of the kernel parameters."""
        return [f"e{i}" for i in range(len(self.operands))]

    def function(self, name: str) -> str:
        """The function `name(seed, row, col, operands...)`, which gives the result as it is stored."""
        vector, scalar = Vector(self.vector), Vector(1)
        variables: dict[Value, str] = {}
        # No `restrict` here: inlined, it becomes scopes that simulators of devices do not know. The kernel has it.
        pointers = [parameter.replace(" restrict", "") for parameter in self.parameters()]
        parameters = ["const int row", "const int col", *pointers]
        if self.seed is not None:
            variables[self.seed] = "v0"
            parameters.insert(0, f"{vector.of(self.seed.dtype)} v0")
        lines = []
        if self.seed is not None and self.nodes and self.storage(self.seed) == "float16":
            lines.append(f"    v0 = {vector.rounded('v0')};")
        for i, operand in enumerate(self.operands):
            dtype = operand.value.dtype
            load = (scalar if operand.spread else vector).load(self.storage(operand.value), f"e{i}", operand.index)
            variables[operand.value] = f"x{i}"
            lines.append(f"    const {vector.of(dtype)} x{i} = {f'({vector.of(dtype)})({load})' if operand.spread else load};")
        for i, node in enumerate(self.nodes, start=1):
            names = [variables[value] for value in node.inputs if value is not None]
            expression, dtype = REGISTRY[node.op].expression, node.outputs[0].dtype
            assert expression is not None, f"{node.op} is not elementwise"
            variables[node.outputs[0]] = f"v{i}"
            made = vector.wrap(dtype, expression(node, names, vector))
            lines.append(f"    {vector.of(dtype)} v{i} = {made};")
            # A piece of a layer that was split may take in what the whole layer would have stored.
            if self.storage(node.outputs[0]) == "float16" and node is not self.nodes[-1]:
                lines.append(f"    v{i} = {vector.rounded(f'v{i}')};")
        result = self.result.dtype
        lines.append(f"    return {vector.to_stored(result, variables[self.result])};")
        head = f"static inline {vector.named(STORED[result])} {name}({', '.join(parameters)})"
        return "\n".join([head + " {", *lines, "}"])
