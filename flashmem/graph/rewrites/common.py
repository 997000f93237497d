"""What the rewrites share: settled integers, reshapes that move no data, chains of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flashmem.graph.builder import Rewriter, derived
from flashmem.graph.ir import Node, Value


def settled_integers(node: Node, index: int, attribute: str) -> list[int] | None:
    """Integers given by the constant input `index` (newer opsets) or by `attribute` (older ones)."""
    value = node.optional(index)
    if value is not None and value.constant is not None:
        return [int(i) for i in value.constant.array().reshape(-1)]
    given = node.attributes.get(attribute)
    return None if given is None else [int(i) for i in np.atleast_1d(given)]


def from_front(axis: int, rank: int) -> int:
    """`axis` counted from the front."""
    return axis + rank if axis < 0 else axis


def transpose(rewriter: Rewriter, source: Value, perm: Sequence[int], output: Value) -> Value:
    """`source` permuted; a Reshape where only dimensions of size 1 change places, which moves no data."""
    moving = [axis for axis in perm if source.shape[axis] != 1]
    if moving == sorted(moving):
        return rewriter.add("Reshape", [source], output)
    return rewriter.add("Transpose", [source], output, perm=tuple(perm))


def reshaped(rewriter: Rewriter, value: Value, shape: tuple[int, ...]) -> Value:
    """`value` with another shape, in the same memory."""
    if value.shape == shape:
        return value
    if value.constant is not None:
        return derived(value, f"{value.name}.{len(shape)}d", shape, lambda a: a.reshape(shape))
    return rewriter.emit("Reshape", [value], shape, value.dtype, f"{value.name}.{'x'.join(map(str, shape))}")


def chain(
    rewriter: Rewriter,
    node: Node,
    op: str,
    inputs: Sequence[Value | None],
    output: Value,
    steps: Sequence[tuple[str, Value]],
    **attributes: Any,
) -> None:
    """`op` and then the elementwise `steps` (operator, second operand), the last of them writing `output`."""
    names = [op, *(step for step, _ in steps)]
    value = output if not steps else Value(f"{output.name}.{op}", output.shape, output.dtype)
    rewriter.add(op, inputs, value, node.name, **attributes)
    for i, (step, operand) in enumerate(steps, start=1):
        result = output if i == len(steps) else Value(f"{output.name}.{i}", output.shape, output.dtype)
        value = rewriter.add(step, [value, operand], result, f"{node.name}.{names[i]}")


def elementwise_chain(rewriter: Rewriter, node: Node, value: Value, steps: Sequence[tuple[str, Value]]) -> None:
    """The elementwise `steps` (operator, second operand) from `value` to the output of `node`."""
    output = node.outputs[0]
    for i, (op, operand) in enumerate(steps, start=1):
        result = output if i == len(steps) else Value(f"{output.name}.{i}", output.shape, output.dtype)
        value = rewriter.add(op, [value, operand], result, f"{node.name}.{op}")
