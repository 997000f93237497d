"""Pointwise bodies: the elementwise operators of a group as one OpenCL function.

A kernel computes its outputs in vectors of `vector` elements at positions (row, col) of its output as a matrix. The function
applies the group's epilogue to such a vector. It loads the epilogue's other operands, at the offsets that broadcasting gives,
and returns the finished vector. Loads may pass the last column by less than a vector; tensors have that slack. A vector may
also be one column of several rows. Then each element is loaded separately; rows behind the last one load the last row's
element.

Kernels of networks differ most in sizes, so sizes are arguments. These are the strides of operands from row to row. Where a
vector is so wide that a division costs little, they are also the divisors of rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from flashmem.base.types import StoredType
from flashmem.compiler.ir.broadcast import Operand, place
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.operators import REGISTRY
from flashmem.compiler.operators.vector import STORED, Vector

_COMMUTATIVE = ("Add", "Mul")
_DIVIDED = 4
"""Elements of a vector from which a division by an argument costs little; a division by a constant is a multiplication. A
vector of rows divides once for each of its elements.
"""


@dataclass(frozen=True)
class PointwiseBody:
    """The elementwise nodes of a group as a function of (seed, row, col).

    `seed` is the value that is already in registers (None if everything is loaded). `storage` gives the stored type of a value.
    `overwritten`: the operand whose memory the kernel's output overwrites. `down`: a vector holds rows `row`, `row` + 1 ... of
    one column, and the function has the number of `rows` as a further parameter. `behind`: how many operands and numbers of
    another body precede those of this one among the kernel's parameters.
    """

    nodes: tuple[Node, ...]
    seed: Value | None
    domain: tuple[int, ...]
    split: int
    vector: int
    storage: Callable[[Value], StoredType]
    down: bool = False
    overwritten: Value | None = None
    behind: tuple[int, int] = (0, 0)

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Tensors the body reads, in order of first use, each with its index. Fusion admits only tensors that have one."""
        return self._placed[0]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Sizes and strides that index expressions use as the kernel arguments f0, f1 ..."""
        return self._placed[1]

    @cached_property
    def _placed(self) -> tuple[tuple[Operand, ...], tuple[int, ...]]:
        numbers: list[int] = []

        def argument(number: int) -> str:
            numbers.append(number)
            return f"f{self.behind[1] + len(numbers) - 1}"

        size_as = argument if self.vector >= _DIVIDED and not self.down else str
        inside = {node.outputs[0] for node in self.nodes} | {self.seed}
        values = dict.fromkeys(v for node in self.nodes for v in self._inputs(node) if v not in inside)
        placed = [place(value, self.domain, self.split, size_as=size_as, stride_as=argument) for value in values]
        return tuple(operand for operand in placed if operand is not None), tuple(numbers)

    def _inputs(self, node: Node) -> list[Value]:
        """The operands of a node, sorted if it commutes, so that equal sums are one kernel."""
        values = [value for value in node.inputs if value is not None]
        if node.op not in _COMMUTATIVE:
            return values
        made = {other.outputs[0] for other in self.nodes} | {self.seed}
        return sorted(values, key=lambda value: value not in made)

    @property
    def result(self) -> Value:
        """The value the function returns."""
        value = self.nodes[-1].outputs[0] if self.nodes else self.seed
        assert value is not None
        return value

    def parameters(self) -> list[str]:
        """Kernel parameters, in the order of `operands`, then of `numbers`."""
        kinds = [
            f"__global const {STORED[self.storage(o.value)]}*{' restrict' if o.value is not self.overwritten else ''}"
            for o in self.operands
        ]
        return [f"{kind} {name}" for kind, name in zip([*kinds, *["const int"] * len(self.numbers)], self.names(), strict=True)]

    def names(self) -> list[str]:
        """Names of the kernel parameters."""
        operands, numbers = self.behind
        return [f"e{operands + i}" for i in range(len(self.operands))] + [f"f{numbers + i}" for i in range(len(self.numbers))]

    def places(self) -> list[str]:
        """Parameters for the position of a vector, in the order of the function's parameters."""
        return ["row", "col", "rows"] if self.down else ["row", "col"]

    def _load(self, operand: Operand, pointer: str) -> str:
        """The vector of an operand, in registers."""
        vector = Vector(self.vector)
        scalar = Vector(1)
        dtype = operand.value.dtype
        stored = self.storage(operand.value)
        if self.down and "row" in operand.index:
            rows = [re.sub(r"\brow\b", f"min(row + {lane}, rows - 1)", operand.index) for lane in range(self.vector)]
            return f"({vector.of(dtype)})({', '.join(scalar.load(stored, pointer, index) for index in rows)})"
        spread = operand.spread or self.down
        load = (scalar if spread else vector).load(stored, pointer, operand.index)
        return f"({vector.of(dtype)})({load})" if spread else load

    def function(self, name: str) -> str:
        """The function `name(seed, row, col, operands...)`, which returns the result in its stored type."""
        vector = Vector(self.vector)
        variables: dict[Value, str] = {}
        # No `restrict` here: inlined, it becomes scopes that device simulators do not support. The kernel has it.
        pointers = [parameter.replace(" restrict", "") for parameter in self.parameters()]
        parameters = [*(f"const int {place}" for place in self.places()), *pointers]
        if self.seed is not None:
            variables[self.seed] = "v0"
            parameters.insert(0, f"{vector.of(self.seed.dtype)} v0")
        lines = []
        if self.seed is not None and self.nodes and self.storage(self.seed) == "float16":
            lines.append(f"    v0 = {vector.rounded('v0')};")
        names = self.names()
        for i, operand in enumerate(self.operands):
            dtype = operand.value.dtype
            variables[operand.value] = f"x{i}"
            lines.append(f"    const {vector.of(dtype)} x{i} = {self._load(operand, names[i])};")
        for i, node in enumerate(self.nodes, start=1):
            read = [variables[value] for value in self._inputs(node)]
            expression = REGISTRY[node.op].expression
            dtype = node.outputs[0].dtype
            assert expression is not None, f"{node.op} is not elementwise"
            variables[node.outputs[0]] = f"v{i}"
            made = vector.wrap(dtype, expression(node, read, vector))
            lines.append(f"    {vector.of(dtype)} v{i} = {made};")
            # A group that adaptive unfusion split may compute values that the whole group would have stored.
            if self.storage(node.outputs[0]) == "float16" and node is not self.nodes[-1]:
                lines.append(f"    v{i} = {vector.rounded(f'v{i}')};")
        result = self.result.dtype
        lines.append(f"    return {vector.to_stored(result, variables[self.result])};")
        head = f"static inline {vector.named(STORED[result])} {name}({', '.join(parameters)})"
        return "\n".join([head + " {", *lines, "}"])
