"""Elementwise pieces of a layer as one OpenCL function.

A kernel computes its outputs in vectors of `vector` elements at places (row, col) of its output seen as a matrix. The function
made here takes such a vector through the layer's tail: it loads what else the tail reads, at the places that broadcasting
gives, and returns the finished vector. Loads may run past the last column by less than a vector; tensors have that slack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flashmem.graph.ir import Node, Value
from flashmem.graph.operators.elementwise import ELEMENTWISE, VectorType


def matrix_of(shape: Sequence[int], split: int | None = None) -> tuple[int, int]:
    """`shape` as (rows, columns); columns are the dimensions from `split` on (the last one if not given)."""
    split = len(shape) - 1 if split is None else split
    return math.prod(shape[: max(split, 0)]), math.prod(shape[max(split, 0) :])


def affine(shape: Sequence[int], strides: Sequence[int], index: str) -> str:
    """The offset of element `index` (row-major over `shape`) in memory with `strides`, as a C expression."""
    terms: list[str] = []
    merged: list[list[int]] = []  # [size, stride], neighbours merged where one stride covers both
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = [merged[-1][0] * size, stride]
        else:
            merged.append([size, stride])
    inner = 1
    for i, (size, stride) in reversed(list(enumerate(merged))):
        if stride:
            place = index if inner == 1 else f"({index} / {inner})"
            place = place if i == 0 else f"({place} % {size})"
            terms.append(place if stride == 1 else f"{place} * {stride}")
        inner *= size
    return " + ".join(reversed(terms)) or "0"


def broadcast_strides(shape: Sequence[int], domain: Sequence[int]) -> list[int]:
    """Row-major strides of a tensor of `shape`, in elements, aligned with `domain`; 0 where it is broadcast."""
    padded = [1] * (len(domain) - len(shape)) + list(shape)
    strides, stride = [0] * len(padded), 1
    for i in reversed(range(len(padded))):
        if padded[i] != 1:
            strides[i] = stride
        stride *= padded[i]
    return strides


@dataclass(frozen=True)
class Operand:
    """A tensor the expression reads: `index` is the offset of a vector's first element; `spread` if one element fills it."""

    value: Value
    index: str
    spread: bool


def place(value: Value, domain: Sequence[int], split: int) -> Operand | None:
    """Where `value` lies under (row, col) of `domain`; None if its columns are neither contiguous nor all the same."""
    strides = broadcast_strides(value.shape, domain)
    columns, column_strides = domain[split:], strides[split:]
    row = affine(domain[:split], strides[:split], "row")
    if all(stride == 0 for stride in column_strides):
        return Operand(value, row, True)
    if affine(columns, column_strides, "col") != "col":
        return None
    return Operand(value, "col" if row == "0" else f"{row} + col", False)


def best_split(domain: Sequence[int], values: Sequence[Value]) -> int:
    """The first dimension of the longest column that all `values` allow; len(domain) (scalar columns) if none do."""
    for split in range(len(domain)):
        if all(place(value, domain, split) is not None for value in values):
            return split
    return len(domain)


@dataclass(frozen=True)
class Expression:
    """The nodes of a layer that run elementwise, as a function of (seed, row, col).

    `seed` is the value that arrives in registers (None if everything is loaded).
    """

    nodes: tuple[Node, ...]
    seed: Value | None
    domain: tuple[int, ...]
    split: int
    vector: int

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Tensors the expression reads, in order of first use, each with its place."""
        inside = {node.outputs[0] for node in self.nodes} | {self.seed}
        values = dict.fromkeys(v for node in self.nodes for v in node.inputs if v is not None and v not in inside)
        placed = [place(value, self.domain, self.split) for value in values]
        return tuple(operand for operand in placed if operand is not None)

    @property
    def renderable(self) -> bool:
        """Whether every operand has a place; if not, the tail has to run as layers of its own."""
        inside = {node.outputs[0] for node in self.nodes} | {self.seed}
        values = {v for node in self.nodes for v in node.inputs if v is not None and v not in inside}
        return len(self.operands) == len(values)

    @property
    def result(self) -> Value:
        """The value the function returns."""
        value = self.nodes[-1].outputs[0] if self.nodes else self.seed
        assert value is not None
        return value

    def parameters(self) -> list[str]:
        """Kernel parameters, in the order of `operands`."""
        kinds = {"float32": "float", "int32": "int"}
        return [f"__global const {kinds[o.value.dtype]}* restrict e{i}" for i, o in enumerate(self.operands)]

    def names(self) -> list[str]:
        """Names of the kernel parameters."""
        return [f"e{i}" for i in range(len(self.operands))]

    def function(self, name: str) -> str:
        """The function `name(seed, row, col, operands...)`, or nothing if there is nothing to compute."""
        vector = VectorType(self.vector)
        variables: dict[Value, str] = {}
        # No `restrict` here: inlined, it becomes scopes that simulators of devices do not know. The kernel has it.
        pointers = [parameter.replace(" restrict", "") for parameter in self.parameters()]
        parameters = ["const int row", "const int col", *pointers]
        if self.seed is not None:
            variables[self.seed] = "v0"
            parameters.insert(0, f"{vector.of(self.seed.dtype)} v0")
        lines = []
        for i, operand in enumerate(self.operands):
            kind = vector.of(operand.value.dtype)
            if operand.spread:
                load = f"({kind})(e{i}[{operand.index}])"
            elif self.vector == 1:
                load = f"e{i}[{operand.index}]"
            else:
                load = f"vload{self.vector}(0, e{i} + {operand.index})"
            variables[operand.value] = f"x{i}"
            lines.append(f"    const {kind} x{i} = {load};")
        for i, node in enumerate(self.nodes, start=1):
            names = [variables[value] for value in node.inputs if value is not None]
            code = ELEMENTWISE[node.op](node, names, vector)
            variables[node.outputs[0]] = f"v{i}"
            lines.append(f"    const {vector.of(node.outputs[0].dtype)} v{i} = {code};")
        lines.append(f"    return {variables[self.result]};")
        head = f"static inline {vector.of(self.result.dtype)} {name}({', '.join(parameters)})"
        return "\n".join([head + " {", *lines, "}"])
