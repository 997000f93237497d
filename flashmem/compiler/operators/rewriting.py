"""Helpers of rewrites: integers from constants, reshapes without data movement, chains of nodes, channels-last attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flashmem.compiler.ir.builder import Rewriter, reshaped_constant
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.ir.limits import TABLE
from flashmem.compiler.operators.registry import Remap


def to_last(rank: int) -> tuple[int, ...]:
    """N, C, H, W -> N, H, W, C, for 4 dimensions: physical axis i holds logical axis to_last(rank)[i]."""
    return (0, *range(2, rank), 1)


def to_first(rank: int) -> tuple[int, ...]:
    """The inverse of `to_last`: logical axis i is physical axis to_first(rank)[i]."""
    return (0, rank - 1, *range(1, rank - 1))


def constant_integers(node: Node, index: int, attribute: str) -> list[int] | None:
    """Integers given by the constant input `index` (newer operator sets) or by `attribute` (older ones)."""
    value = node.optional(index)
    if value is not None and value.constant is not None:
        return [int(i) for i in value.constant.array().reshape(-1)]
    given = node.attributes.get(attribute)
    return None if given is None else [int(i) for i in np.atleast_1d(given)]


def from_front(axis: int, rank: int) -> int:
    """`axis` counted from the front: nonnegative."""
    return axis + rank if axis < 0 else axis


def bad_axis(node: Node, axes: Sequence[int], rank: int) -> str | None:
    """Why `axes` cannot be distinct axes of a tensor of `rank` dimensions, or None."""
    outside = [axis for axis in axes if not -rank <= axis < rank]
    if outside:
        return f"{node.op} along axis {outside[0]} of a tensor of {rank} dimensions"
    if len({from_front(axis, rank) for axis in axes}) < len(axes):
        return f"{node.op} names an axis twice"
    return None


def too_long(node: Node, *sizes: int) -> str | None:
    """Why axes of `sizes` are too long for a rewrite that lists their positions in a constant, or None."""
    longest = max(sizes)
    return None if longest <= TABLE else f"{node.op} along an axis of {longest} elements; at most {TABLE} are supported"


def spreads(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether a tensor of `shape` broadcasts to `target` without changing `target`."""
    return len(shape) <= len(target) and all(n in (1, m) for n, m in zip(shape[::-1], target[::-1], strict=False))


def transpose(rewriter: Rewriter, source: Value, perm: Sequence[int], output: Value) -> Value:
    """Append a Transpose of `source`; a Reshape if only dimensions of size 1 change places, which moves no data."""
    moving = [axis for axis in perm if source.shape[axis] != 1]
    if moving == sorted(moving):
        return rewriter.add("Reshape", [source], output)
    return rewriter.add("Transpose", [source], output, perm=tuple(perm))


def reshaped(rewriter: Rewriter, value: Value, shape: tuple[int, ...]) -> Value:
    """`value` in another shape, in the same memory."""
    if value.shape == shape:
        return value
    if value.constant is not None:
        if (value, shape) not in rewriter.reshaped:  # one value for all its readers, so that a weight is streamed once
            made = reshaped_constant(value, f"{value.name}.{len(shape)}d", shape)
            rewriter.reshaped[value, shape] = made
        return rewriter.reshaped[value, shape]
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
    """Append `op` and then the elementwise `steps` (operator, second operand); the last one writes `output`."""
    names = [op, *(step for step, _ in steps)]
    value = output if not steps else Value(f"{output.name}.{op}", output.shape, output.dtype)
    rewriter.add(op, inputs, value, node.name, **attributes)
    for i, (step, operand) in enumerate(steps, start=1):
        result = output if i == len(steps) else Value(f"{output.name}.{i}", output.shape, output.dtype)
        value = rewriter.add(step, [value, operand], result, f"{node.name}.{names[i]}")


def elementwise_chain(rewriter: Rewriter, node: Node, value: Value, steps: Sequence[tuple[str, Value]]) -> None:
    """Append the elementwise `steps` (operator, second operand) from `value` to the output of `node`."""
    output = node.outputs[0]
    for i, (op, operand) in enumerate(steps, start=1):
        result = output if i == len(steps) else Value(f"{output.name}.{i}", output.shape, output.dtype)
        value = rewriter.add(op, [value, operand], result, f"{node.name}.{op}")


def axes_last(node: Node) -> dict[str, Any]:
    """Attribute `axes` in channels-last order."""
    places = to_first(len(node.outputs[0].shape))
    return {"axes": tuple(sorted(places[axis] for axis in node.attributes["axes"]))}


def axis_last(node: Node) -> dict[str, Any]:
    """Attribute `axis` in channels-last order."""
    return {"axis": to_first(len(node.outputs[0].shape))[node.attributes["axis"]]}


def per_dimension_last(*names: str) -> Remap:
    """Attributes with one entry for each dimension, in channels-last order."""

    def remap(node: Node) -> dict[str, Any]:
        order = to_last(len(node.outputs[0].shape))
        return {name: tuple(node.attributes[name][axis] for axis in order) for name in names}

    return remap
