"""Rewrites of data movement: what only renames a shape becomes Reshape, what a constant settles is settled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flashmem.graph.builder import Rewriter, constant, derived
from flashmem.graph.ir import Node, Value
from flashmem.graph.rewrites.common import from_front, settled_integers, transpose
from flashmem.graph.rewrites.resize import rewrite_resize as rewrite_resize


def rewrite_reshape(rewriter: Rewriter, node: Node, opset: int) -> None:
    """A change of shape that moves no data; of a constant, done when it is read."""
    source, output = node.input(0), node.outputs[0]
    if source.constant is not None:
        rewriter.replaced[output] = derived(source, output.name, output.shape, lambda a: a.reshape(output.shape))
    else:
        rewriter.add("Reshape", [source], output, node.name)


def rewrite_transpose(rewriter: Rewriter, node: Node, opset: int) -> None:
    """A Transpose, settled for a constant, which remembers how it is stored."""
    source, output = node.input(0), node.outputs[0]
    perm = tuple(node.attributes.get("perm") or reversed(range(len(source.shape))))
    if source.constant is not None:
        swapped = derived(source, output.name, output.shape, lambda a: a.transpose(perm))
        rewriter.replaced[output] = swapped
        if perm == (1, 0):
            rewriter.transposed[swapped] = source
    else:
        transpose(rewriter, source, perm, output)


def rewrite_slice(rewriter: Rewriter, node: Node, opset: int) -> None:
    """A start and a step in every dimension."""
    x, output = node.input(0), node.outputs[0]
    rank = len(x.shape)
    given, ends = settled_integers(node, 1, "starts") or [], settled_integers(node, 2, "ends") or []
    axes = settled_integers(node, 3, "axes") or list(range(len(given)))
    strides = settled_integers(node, 4, "steps") or [1] * len(given)
    starts, steps = [0] * rank, [1] * rank
    for axis, start, end, step in zip(axes, given, ends, strides, strict=True):
        axis = from_front(axis, rank)
        first, _, step = slice(start, end, step).indices(x.shape[axis])
        starts[axis], steps[axis] = first, step
    _sliced(rewriter, node.name, x, output, starts, steps)


def _sliced(rewriter: Rewriter, name: str, x: Value, output: Value, starts: Sequence[int], steps: Sequence[int]) -> None:
    if x.constant is not None:
        index = tuple(
            np.arange(size, dtype=np.int64) * step + start
            for size, start, step in zip(output.shape, starts, steps, strict=True)
        )
        rewriter.replaced[output] = derived(x, output.name, output.shape, lambda a: a[np.ix_(*index)])
    elif x.shape == output.shape and all(step == 1 for step in steps):
        rewriter.add("Reshape", [x], output, name)
    else:
        rewriter.add("Slice", [x], output, name, starts=tuple(starts), steps=tuple(steps))


def rewrite_split(rewriter: Rewriter, node: Node, opset: int) -> None:
    """One Slice for each output."""
    x = node.input(0)
    rank = len(x.shape)
    axis = from_front(int(node.attributes.get("axis", 0)), rank)
    start = 0
    for i, output in enumerate(node.outputs):
        starts = [start if a == axis else 0 for a in range(rank)]
        _sliced(rewriter, f"{node.name}.{i}", x, output, starts, [1] * rank)
        start += output.shape[axis]


def rewrite_pad(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Pads before each dimension; those after it follow from the shapes."""
    x, output = node.input(0), node.outputs[0]
    rank = len(x.shape)
    pads = settled_integers(node, 1, "pads") or []
    axes = [from_front(a, rank) for a in settled_integers(node, 3, "axes") or range(rank)]
    before = [0] * rank
    for i, axis in enumerate(axes):
        before[axis] = pads[i]
    fill = node.optional(2)
    value = float(fill.constant.array().reshape(-1)[0]) if fill is not None and fill.constant else 0.0
    mode = node.attributes.get("mode", "constant")
    rewriter.add("Pad", [x], output, node.name, before=tuple(before), mode=mode, value=node.attributes.get("value", value))


def rewrite_gather(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Settled indices of a constant are read at once; evenly spaced ones are a Slice."""
    data, indices, output = node.input(0), node.input(1), node.outputs[0]
    rank = len(data.shape)
    axis = from_front(int(node.attributes.get("axis", 0)), rank)
    if indices.constant is None:
        rewriter.add("Gather", [data, indices], output, node.name, axis=axis)
        return
    chosen = indices.constant.array().astype(np.int64)
    chosen = np.where(chosen < 0, chosen + data.shape[axis], chosen)
    if data.constant is not None:
        rewriter.replaced[output] = derived(data, output.name, output.shape, lambda a: a.take(chosen, axis))
        return
    flat = chosen.reshape(-1)
    step = int(flat[1] - flat[0]) if flat.size > 1 else 1
    if step == 0 or not np.array_equal(flat, flat[0] + step * np.arange(flat.size)):
        rewriter.add("Gather", [data, constant(indices.name, chosen.astype(np.int32))], output, node.name, axis=axis)
        return
    shape = tuple(flat.size if a == axis else size for a, size in enumerate(data.shape))
    part = Value(f"{output.name}.slice", shape, data.dtype)
    starts = [int(flat[0]) if a == axis else 0 for a in range(rank)]
    _sliced(rewriter, node.name, data, part, starts, [step if a == axis else 1 for a in range(rank)])
    rewriter.add("Reshape", [rewriter.replaced.get(part, part)], output)


def rewrite_tile(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Repeats of every dimension."""
    repeats = tuple(settled_integers(node, 1, "repeats") or [])
    rewriter.add("Tile", [node.input(0)], node.outputs[0], node.name, repeats=repeats)


def rewrite_expand(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Expand, or Reshape if it changes no size."""
    x, output = node.input(0), node.outputs[0]
    if x.shape == output.shape:
        rewriter.add("Reshape", [x], output, node.name)
    else:
        rewriter.add("Expand", [x], output, node.name)


def rewrite_concat(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Concat of the inputs that have elements."""
    axis = from_front(int(node.attributes["axis"]), len(node.outputs[0].shape))
    inputs = [v for v in node.inputs if v is not None and v.size]
    rewriter.add("Concat", inputs, node.outputs[0], node.name, axis=axis)
