"""Data movement. Changes of shape become Reshape, and movement of constants happens at compile time.

After the rewrites `Slice` has `starts` and `steps` for every dimension, `Pad` has `before`, `Tile` has `repeats`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.compiler.ir.builder import Rewriter, constant, derived, reshaped_constant, transposed_constant
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.ir.quantised import QuantizedConstant
from flashmem.compiler.kernels.indexing.block_rows import gather_blocks, is_in_blocks
from flashmem.compiler.operators.quantization import gather_codes
from flashmem.compiler.operators.registry import ANY, BOOL, INDEX, INTEGERS, Operator, all_of, constant_inputs, each, register
from flashmem.compiler.operators.rewriting import (
    axis_last,
    bad_axis,
    constant_integers,
    from_front,
    per_dimension_last,
    transpose,
)
from flashmem.compiler.operators.tiling_interface import (
    at_each_place,
    gathered_tile,
    joined_tile,
    merged_tile,
    padded_tile,
    repeated_tile,
    sliced_tile,
    transposed_tile,
)


def rewrite_reshape(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite a change of shape as a Reshape, which moves no data; a constant is reshaped when it is read."""
    source = node.input(0)
    output = node.outputs[0]
    if source.constant is not None:
        rewriter.replaced[output] = reshaped_constant(source, output.name, output.shape)
    else:
        rewriter.add("Reshape", [source], output, node.name)


def _check_reshape(node: Node) -> str | None:
    x = node.input(0)
    y = node.outputs[0]
    return None if x.size == y.size else f"{node.op} of {x.size} elements ({x.name}) to {y.size}"


def _rewrite_transpose(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite Transpose. A constant is transposed when it is read, and its stored form is recorded."""
    source = node.input(0)
    output = node.outputs[0]
    perm = _perm(node)
    if source.constant is not None:
        swapped = transposed_constant(source, output.name, perm)
        rewriter.replaced[output] = swapped
        if perm == (1, 0):
            rewriter.transposed[swapped] = source
    else:
        transpose(rewriter, source, perm, output)


def _perm(node: Node) -> tuple[int, ...]:
    rank = len(node.input(0).shape)
    return tuple(from_front(int(axis), rank) for axis in node.attributes.get("perm") or reversed(range(rank)))


def _check_transpose(node: Node) -> str | None:
    rank = len(node.input(0).shape)
    return None if sorted(_perm(node)) == list(range(rank)) else f"Transpose with perm {_perm(node)} of {rank} dimensions"


def _sliced(rewriter: Rewriter, name: str, x: Value, output: Value, starts: Sequence[int], steps: Sequence[int]) -> None:
    """Append a Slice, unless it is the identity; a Slice of a Slice becomes one."""
    if x.constant is not None:
        index = tuple(
            np.arange(size, dtype=np.int64) * step + start
            for size, start, step in zip(output.shape, starts, steps, strict=True)
        )
        rewriter.replaced[output] = derived(x, output.name, output.shape, lambda a: a[np.ix_(*index)])
    elif output.size == 0:
        rewriter.replaced[output] = constant(output.name, np.zeros(output.shape, output.dtype))
    elif x.shape == output.shape and all(step == 1 for step in steps):
        rewriter.add("Reshape", [x], output, name)
    elif x.producer is not None and x.producer.op == "Slice":
        whole = x.producer.input(0)
        before = x.producer.attributes
        both = list(zip(before["starts"], before["steps"], starts, steps, strict=True))
        first = tuple(near + far * start for near, far, start, _ in both)
        rewriter.add("Slice", [whole], output, name, starts=first, steps=tuple(far * step for _, far, _, step in both))
    else:
        rewriter.add("Slice", [x], output, name, starts=tuple(starts), steps=tuple(steps))


def _bounds(node: Node) -> tuple[list[int], list[int], list[int], list[int]]:
    """Starts, ends, axes and steps of a Slice, given or by default."""
    starts = constant_integers(node, 1, "starts") or []
    ends = constant_integers(node, 2, "ends") or []
    axes = constant_integers(node, 3, "axes") or list(range(len(starts)))
    steps = constant_integers(node, 4, "steps") or [1] * len(starts)
    return starts, ends, axes, steps


def _slices(node: Node) -> list[tuple[int, int, int]]:
    """(first index, step, size) of a Slice in every dimension, with bounds clamped as in ONNX."""
    shape = node.input(0).shape
    rank = len(shape)
    starts, ends, axes, steps = _bounds(node)
    found = [(0, 1, size) for size in shape]
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        axis = from_front(axis, rank)
        size = shape[axis]
        low, high = (0, size) if step > 0 else (0, size - 1)  # ONNX clamps a start to the first element, Python does not
        first = min(max(start + size if start < 0 else start, low), high)
        low, high = (0, size) if step > 0 else (-1, size - 1)
        last = min(max(end + size if end < 0 else end, low), high)
        found[axis] = (first, step, len(range(first, last, step)) if size else 0)
    return found


def _rewrite_slice(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite Slice: a start and a step in every dimension."""
    chosen = _slices(node)
    starts = [start for start, _, _ in chosen]
    steps = [step for _, step, _ in chosen]
    _sliced(rewriter, node.name, node.input(0), node.outputs[0], starts, steps)


def _check_slice(node: Node) -> str | None:
    rank = len(node.input(0).shape)
    starts, ends, axes, steps = _bounds(node)
    if not len(starts) == len(ends) == len(axes) == len(steps):
        return f"Slice with {len(starts)} starts, {len(ends)} ends, {len(axes)} axes and {len(steps)} steps"
    if 0 in steps:
        return "Slice with a step of 0"
    if len(starts) > rank:
        return f"Slice along {len(starts)} axes of a tensor of {rank} dimensions"
    if (reason := bad_axis(node, axes, rank)) is not None:
        return reason
    shape = tuple(size for _, _, size in _slices(node))
    return None if shape == node.outputs[0].shape else f"Slice gives {shape}, not {node.outputs[0].shape} as the model says"


def _rewrite_split(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite Split as one Slice for each output."""
    x = node.input(0)
    rank = len(x.shape)
    axis = from_front(int(node.attributes.get("axis", 0)), rank)
    start = 0
    for i, output in enumerate(node.outputs):
        starts = [start if a == axis else 0 for a in range(rank)]
        _sliced(rewriter, f"{node.name}.{i}", x, output, starts, [1] * rank)
        start += output.shape[axis]


def _check_split(node: Node) -> str | None:
    shape = node.input(0).shape
    axis = int(node.attributes.get("axis", 0))
    if (reason := bad_axis(node, [axis], len(shape))) is not None:
        return reason
    total = sum(output.shape[axis] for output in node.outputs)
    return None if total == shape[axis] else f"Split of {shape[axis]} elements into parts of {total}"


def _pads(node: Node) -> tuple[list[int], list[int]]:
    """Pads before and after each dimension."""
    rank = len(node.input(0).shape)
    given = constant_integers(node, 1, "pads") or []
    axes = [from_front(axis, rank) for axis in constant_integers(node, 3, "axes") or range(rank)]
    before = [0] * rank
    after = [0] * rank
    for axis, first, last in zip(axes, given, given[len(axes) :], strict=False):
        before[axis] = first
        after[axis] = last
    return before, after


def _rewrite_pad(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite Pad with pads before each dimension; those after it follow from the shapes.

    Other modes than constant are gathers, axis by axis.
    """
    x = node.input(0)
    output = node.outputs[0]
    before, after = _pads(node)
    mode = node.attributes.get("mode", "constant")
    if mode == "constant":
        fill = node.optional(2)
        value = node.attributes.get("value", 0.0)
        if fill is not None and fill.constant is not None:
            value = fill.constant.array().reshape(-1)[0].item()
        if not any(before) and x.shape == output.shape:
            rewriter.add("Reshape", [x], output, node.name)
            return
        rewriter.add("Pad", [x], output, node.name, before=tuple(before), value=value)
        return
    for axis, (first, last) in enumerate(zip(before, after, strict=True)):
        if not first and not last:
            continue
        # Negative pads crop; the mode applies to the remaining elements.
        cropped = x.shape[axis] - max(0, -first) - max(0, -last)
        at = _mirrored(mode, cropped, max(0, first), max(0, last)) + max(0, -first)
        shape = tuple(len(at) if a == axis else size for a, size in enumerate(x.shape))
        indices = constant(f"{output.name}.at{axis}", at.astype(np.int64))
        part = Value(f"{output.name}.pad{axis}", shape, output.dtype)
        x = rewriter.add("Gather", [x, indices], part, f"{node.name}.{axis}", axis=axis)
    rewriter.add("Reshape", [x], output)


def _mirrored(mode: str, size: int, before: int, after: int) -> NDArray[np.int64]:
    """The source index for each place along a padded axis."""
    at = np.arange(-before, size + after)
    if mode == "edge":
        return at.clip(0, size - 1)
    if mode == "wrap":
        return at % size
    period = max(1, 2 * (size - 1))
    return np.abs((at + size - 1) % period - (size - 1)) if size > 1 else np.zeros_like(at)


def _check_pad(node: Node) -> str | None:
    mode = node.attributes.get("mode", "constant")
    if mode not in ("constant", "edge", "reflect", "wrap"):
        return f"Pad with mode {mode!r} is not implemented"
    shape = node.input(0).shape
    axes = constant_integers(node, 3, "axes") or list(range(len(shape)))
    given = constant_integers(node, 1, "pads") or []
    if len(given) != 2 * len(axes):
        return f"Pad with {len(given)} pads for {len(axes)} axes"
    if (reason := bad_axis(node, axes, len(shape))) is not None:
        return reason
    if mode != "constant" and 0 in shape:
        return f"Pad with mode {mode!r} of a tensor without elements ({node.input(0).name})"
    return None


def _rewrite_gather(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite Gather: constant indices into a constant are evaluated at once; evenly spaced indices are a Slice."""
    data = node.input(0)
    indices = node.input(1)
    output = node.outputs[0]
    rank = len(data.shape)
    axis = from_front(int(node.attributes.get("axis", 0)), rank)
    if indices.constant is None and isinstance(data.constant, QuantizedConstant):
        gather_codes(rewriter, node, axis)
        return
    if indices.constant is None and axis == 0 and is_in_blocks(data.constant):
        gather_blocks(rewriter, node)
        return
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
        rewriter.add("Gather", [data, constant(indices.name, chosen)], output, node.name, axis=axis)
        return
    shape = tuple(flat.size if a == axis else size for a, size in enumerate(data.shape))
    part = Value(f"{output.name}.slice", shape, data.dtype)
    starts = [int(flat[0]) if a == axis else 0 for a in range(rank)]
    _sliced(rewriter, node.name, data, part, starts, [step if a == axis else 1 for a in range(rank)])
    rewriter.add("Reshape", [rewriter.replaced.get(part, part)], output)


def _check_gather(node: Node) -> str | None:
    data = node.input(0)
    indices = node.input(1)
    axis = int(node.attributes.get("axis", 0))
    if (reason := bad_axis(node, [axis], len(data.shape))) is not None:
        return reason
    if indices.constant is not None:
        size = data.shape[axis]
        given = indices.constant.array().reshape(-1)
        outside = given[(given < -size) | (given >= size)]
        if outside.size:
            return f"Gather of index {outside[0]} from {size} elements ({data.name})"
    return None


def _rewrite_tile(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite Tile: repeats of every dimension."""
    repeats = tuple(constant_integers(node, 1, "repeats") or [])
    rewriter.add("Tile", [node.input(0)], node.outputs[0], node.name, repeats=repeats)


def _check_tile(node: Node) -> str | None:
    repeats = constant_integers(node, 1, "repeats") or []
    shape = node.input(0).shape
    if len(repeats) != len(shape):
        return f"Tile with {len(repeats)} repeats of a tensor of {len(shape)} dimensions"
    return None


def _rewrite_expand(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite Expand, as a Reshape if it adds no element."""
    x = node.input(0)
    output = node.outputs[0]
    rewriter.add("Reshape" if x.size == output.size else "Expand", [x], output, node.name)


def _rewrite_concat(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite Concat without empty inputs."""
    axis = from_front(int(node.attributes["axis"]), len(node.outputs[0].shape))
    inputs = [value for value in node.inputs if value is not None and value.size]
    rewriter.add("Concat", inputs, node.outputs[0], node.name, axis=axis)


def _check_concat(node: Node) -> str | None:
    shapes = [value.shape for value in node.inputs if value is not None]
    axis = int(node.attributes["axis"])
    if (reason := bad_axis(node, [axis], len(shapes[0]))) is not None:
        return reason
    axis = from_front(axis, len(shapes[0]))
    for one, other in pairwise(shapes):
        if len(one) != len(other) or any(a != axis and m != n for a, (m, n) in enumerate(zip(one, other, strict=True))):
            return f"Concat along axis {axis} of shapes {one} and {other}"
    return None


def _rewrite_shape(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite Shape and Size as constants."""
    shape = np.array(node.input(0).shape, np.int64)
    first = int(node.attributes.get("start", 0))
    last = node.attributes.get("end")
    data = np.array(math.prod(shape.tolist()), np.int64) if node.op == "Size" else shape[first:last]
    rewriter.replaced[node.outputs[0]] = constant(node.outputs[0].name, data)


def _rewrite_dropout(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite Dropout for inference: the input, and a mask of ones."""
    rewriter.add("Reshape", [node.input(0)], node.outputs[0], node.name)
    for mask in node.outputs[1:]:
        rewriter.replaced[mask] = constant(mask.name, np.ones(mask.shape, mask.dtype))


def _check_dropout(node: Node) -> str | None:
    training = node.optional(2)
    ratio = node.optional(1)
    if training is None:
        return None
    if training.constant is None:
        return f"Dropout that trains or not as {training.name} says is not implemented: export the model for inference"
    if not training.constant.array().any():
        return None
    if ratio is not None and ratio.constant is not None and not ratio.constant.array().any():
        return None
    return "Dropout in training mode drops at random, and is not implemented: export the model for inference"


def _rewrite_blocks(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite DepthToSpace and SpaceToDepth: block positions move to the channel axis or back.

    `DCR` puts the position before the channel, `CRD` behind it.
    """
    x = node.input(0)
    output = node.outputs[0]
    block = int(node.attributes["blocksize"])
    batch, channels, height, width = x.shape if node.op == "SpaceToDepth" else output.shape
    height = height // block
    width = width // block
    is_behind = node.attributes.get("mode", "DCR") == "CRD"
    spread: tuple[int, ...] = (batch, channels, height, block, width, block)
    # From channels with block positions to rows and columns of blocks.
    perm: tuple[int, ...] = (0, 1, 4, 2, 5, 3) if is_behind else (0, 3, 4, 1, 5, 2)
    blocks = (channels, block, block) if is_behind else (block, block, channels)
    packed: tuple[int, ...] = (batch, *blocks, height, width)
    if node.op == "SpaceToDepth":
        spread, packed, perm = packed, spread, tuple(perm.index(axis) for axis in range(6))
    before = rewriter.emit("Reshape", [x], packed, x.dtype, f"{node.name}.blocks")
    moved = transpose(rewriter, before, perm, Value(f"{node.name}.moved", spread, x.dtype))
    rewriter.add("Reshape", [moved], output, node.name)


def _check_blocks(node: Node) -> str | None:
    shape = node.input(0).shape
    block = int(node.attributes["blocksize"])
    mode = node.attributes.get("mode", "DCR")
    if mode not in ("DCR", "CRD"):
        return f"{node.op} with mode {mode!r}; there are DCR and CRD"
    divided = (1,) if node.op == "DepthToSpace" else (2, 3)
    parts = block**2 if node.op == "DepthToSpace" else block
    if len(shape) != 4 or block < 1 or any(shape[axis] % parts for axis in divided):
        return f"{node.op} of a tensor of shape {shape} with blocks of {block}"
    return None


_RENAMING: dict[str, Any] = {"inputs": (ANY, INTEGERS), "rewrite": rewrite_reshape, "check": _check_reshape}

register(
    __name__,
    Operator(
        "Concat", (ANY,), check=_check_concat, rewrite=_rewrite_concat, kernel="concat", layout="either", remap=axis_last,
        empty=True, tiling=joined_tile,
    ),
    *each(("DepthToSpace", "SpaceToDepth"), inputs=(ANY,), check=_check_blocks, rewrite=_rewrite_blocks),
    Operator("Dropout", (ANY, ANY, BOOL), check=_check_dropout, rewrite=_rewrite_dropout, empty=True),
    Operator("Expand", (ANY, INDEX), rewrite=_rewrite_expand, kernel="expand", tiling=at_each_place),
    *each(("Flatten", "Identity", "Squeeze", "Unsqueeze"), **_RENAMING),
    Operator("Reshape", (ANY, INTEGERS), check=_check_reshape, rewrite=rewrite_reshape, tiling=merged_tile),
    Operator("Gather", (ANY, INDEX), check=_check_gather, rewrite=_rewrite_gather, kernel="gather", tiling=gathered_tile),
    Operator(
        "Pad", (ANY,), check=all_of(constant_inputs(1, 2, 3), _check_pad), rewrite=_rewrite_pad, kernel="pad",
        layout="either", remap=per_dimension_last("before"), empty=True, tiling=padded_tile,
    ),
    *each(("Shape", "Size"), inputs=(ANY,), rewrite=_rewrite_shape, empty=True),
    Operator(
        "Slice", (ANY, INDEX), check=all_of(constant_inputs(1, 2, 3, 4), _check_slice), rewrite=_rewrite_slice,
        kernel="slice", layout="either", remap=per_dimension_last("starts", "steps"), tiling=sliced_tile,
    ),
    # A Slice of the columns of a product, which elementwise operators read where it is (`compiler.passes.row_parts`).
    Operator("RowPart", (ANY,), kernel="slice", onnx=False),
    Operator("Split", (ANY, INDEX), check=all_of(constant_inputs(1), _check_split), rewrite=_rewrite_split),
    Operator(
        "Tile", (ANY, INDEX), check=all_of(constant_inputs(1), _check_tile), rewrite=_rewrite_tile, kernel="tile",
        layout="either", remap=per_dimension_last("repeats"), tiling=repeated_tile,
    ),
    Operator(
        "Transpose", (ANY,), check=_check_transpose, rewrite=_rewrite_transpose, kernel="transpose", tiling=transposed_tile
    ),
)  # fmt: skip
