"""Gather and scatter: reading and writing elements by indices.

The rewrites produce three forms, which no ONNX file contains:

- `GatherAt` reads. Its output has positions p, in row-major order over `positions`. Position p is the `run` elements at
  p · `base` + Σ index_c · `strides`_c. The indices of p are contiguous at p · `index`.
- `ScatterAt` writes into a copy. Element (item, step) of the updates is at `update_start` + item · `update` + the offset of the
  step by `update_step`: factors of the steps, with a stride each. It goes to item · `target` + `stride` · Σ index_c ·
  `strides`_c, with the indices at item · `index` + step · `index_step`. If several steps of an item reach one element, they
  update it in order; different items never reach the same element.
- `Place` writes a regular region (`region`, `source`, `target`, `start`) into a copy, often in place of constant indices.

`sizes` are the dimensions that indices count in, from the end if they are negative. `positions`, `items` and `region` are
sizes. Their factors, like all strides, are in elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashmem.compiler.ir.builder import Rewriter, constant
from flashmem.compiler.ir.graph import ArrayConstant, Node, Value
from flashmem.compiler.ir.strided import row_major
from flashmem.compiler.operators.registry import ANY, BOOL, INDEX, Operator, Types, all_of, constant_inputs, each, register
from flashmem.compiler.operators.rewriting import bad_axis, from_front, reshaped, too_long

_INT64: Types = frozenset({"int64"})

_REDUCTIONS = ("none", "add", "mul", "max", "min")


def _without(sizes: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*sizes[:axis], *sizes[axis + 1 :])


def _outside(node: Node, indices: NDArray[np.integer], sizes: Sequence[int]) -> str | None:
    """Why constant `indices` do not fit `sizes`, or None. Their last axis has one entry for each dimension."""
    for position, size in enumerate(sizes):
        given = indices[..., position].reshape(-1)
        wrong = given[(given < -size) | (given >= size)]
        if wrong.size:
            return f"{node.op} with index {wrong[0]} in a dimension of {size} elements ({node.input(0).name})"
    return None


def _from_front(indices: Value, sizes: Sequence[int]) -> Value:
    """`indices`, whose last axis has one entry for each of `sizes`; constant ones are made nonnegative."""
    if indices.constant is None:
        return indices
    data = np.asarray(indices.constant.array(), np.int64).reshape(-1, len(sizes))
    counted = np.where(data < 0, data + np.array(sizes), data).astype(np.int32)
    return constant(indices.name, counted.reshape(indices.shape))


def _gather_elements(rewriter: Rewriter, name: str, x: Value, indices: Value, axis: int, output: Value) -> None:
    strides = row_major(x.shape)
    rewriter.add(
        "GatherAt", [x, _from_front(indices, [x.shape[axis]])], output, name,
        positions=indices.shape, base=(*strides[:axis], 0, *strides[axis + 1 :]), index=tuple(row_major(indices.shape)),
        sizes=(x.shape[axis],), strides=(strides[axis],), run=1,
    )  # fmt: skip


def gather_elements(rewriter: Rewriter, x: Value, indices: Value, axis: int, output: Value, name: str) -> None:
    """Append a gather: `output` is the elements of `x` at `indices` along `axis`; the indices must be valid."""
    _gather_elements(rewriter, name, x, indices, axis, output)


def _rewrite_gather_elements(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite GatherElements: one index for each element of the output."""
    x = node.input(0)
    axis = from_front(int(node.attributes.get("axis", 0)), len(x.shape))
    _gather_elements(rewriter, node.name, x, node.input(1), axis, node.outputs[0])


def _check_elements(node: Node) -> str | None:
    """Check GatherElements and ScatterElements: a valid axis, and indices no larger than the other axes."""
    shape = node.input(0).shape
    indices = node.input(1)
    axis = int(node.attributes.get("axis", 0))
    if (reason := bad_axis(node, [axis], len(shape))) is not None:
        return reason
    axis = from_front(axis, len(shape))
    if len(indices.shape) != len(shape) or any(
        n > m for n, m in zip(_without(indices.shape, axis), _without(shape, axis), strict=True)
    ):
        return f"{node.op} with indices of shape {indices.shape} for a tensor of shape {shape} along axis {axis}"
    if indices.constant is not None:
        return _outside(node, indices.constant.array()[..., None], [shape[axis]])
    return None


def _rewrite_gather_nd(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite GatherND: several contiguous indices for each run of elements."""
    x = node.input(0)
    indices = node.input(1)
    batch = int(node.attributes.get("batch_dims", 0))
    parts = indices.shape[-1]
    sizes = x.shape[batch : batch + parts]
    strides = row_major(x.shape)
    positions = indices.shape[:-1]
    rewriter.add(
        "GatherAt", [x, _from_front(indices, sizes)], node.outputs[0], node.name,
        positions=positions, base=(*strides[:batch], *[0] * (len(positions) - batch)),
        index=tuple(parts * stride for stride in row_major(positions)),
        sizes=sizes, strides=tuple(strides[batch : batch + parts]), run=math.prod(x.shape[batch + parts :]),
    )  # fmt: skip


def _check_nd(node: Node) -> str | None:
    """Check GatherND and ScatterND."""
    shape = node.input(0).shape
    indices = node.input(1)
    batch = int(node.attributes.get("batch_dims", 0))
    parts = indices.shape[-1] if indices.shape else 0
    room = min(len(shape), len(indices.shape)) - 1
    if not 0 <= batch <= max(room, 0) or not 0 < parts <= len(shape) - batch:
        return f"{node.op} with indices of shape {indices.shape} for a tensor of shape {shape}, batch_dims {batch}"
    if indices.shape[:batch] != shape[:batch]:
        return f"{node.op} with batch_dims {batch} of shapes {shape} and {indices.shape}"
    if indices.constant is not None:
        return _outside(node, indices.constant.array(), shape[batch : batch + parts])
    return None


@dataclass(frozen=True)
class _Scatter:
    """Attributes of `ScatterAt`; the steps of an item are in row-major order over `steps`."""

    items: tuple[int, ...]
    index: tuple[int, ...]
    update: tuple[int, ...]
    target: tuple[int, ...]
    steps: tuple[int, ...]
    index_step: int
    update_step: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    stride: int
    places: int


def _scattered(rewriter: Rewriter, node: Node, indices: Value, updates: Value, plan: _Scatter, repeats: bool = True) -> None:
    """Append a scatter of updates at indices, in order.

    Constant indices that form a regular region need no index at run time. Those that reach no element twice need no order.
    `repeats`: whether indices computed at run time may reach an element twice.
    """
    x = node.input(0)
    output = node.outputs[0]
    reduction = node.attributes.get("reduction", "none")
    if not updates.size:
        rewriter.add("Reshape", [x], output)
        return
    indices = _from_front(indices, plan.sizes)
    covered = False
    if indices.constant is not None:
        offsets, dims = _offsets(indices.constant.array(), plan)
        repeats = bool(np.unique(offsets).size < offsets.size)
        covered = reduction == "none" and not repeats and updates.size == x.size
        steps = _even(offsets)
        if reduction == "none" and not repeats and steps is not None:
            by_update = sorted(zip(dims[0], dims[1], [*steps, *dims[2]], strict=True), key=lambda dim: -dim[1])
            region, source, target = (tuple(int(dim[i]) for dim in by_update) for i in range(3))
            rewriter.add(
                "Place", [x, updates], output, node.name,
                region=region, source=source, target=target, start=int(offsets.flat[0]), covered=covered, fill=_filled(x),
            )  # fmt: skip
            return
    rewriter.add(
        "ScatterAt", [x, indices, updates], output, node.name,
        items=plan.items, index=plan.index, update=plan.update, target=plan.target, steps=math.prod(plan.steps),
        index_step=plan.index_step, update_start=0, update_step=((math.prod(plan.steps), plan.update_step),),
        sizes=plan.sizes, strides=plan.strides, stride=plan.stride, places=plan.places, reduction=reduction,
        ordered=repeats, covered=covered, fill=_filled(x),
    )  # fmt: skip


def _offsets(indices: NDArray[np.integer], plan: _Scatter) -> tuple[NDArray[np.int64], tuple[list[int], list[int], list[int]]]:
    """Offsets that constant indices reach, for the items with separate indices, and their steps.

    The second result has three lists. The first two are the sizes of all dimensions and the strides of their updates, with the
    other items last. The third has the strides of the other items' targets.
    """
    own = [i for i, stride in enumerate(plan.index) if stride]
    free = [i for i in range(len(plan.items)) if i not in own]
    shape = (*(plan.items[i] for i in own), *plan.steps)
    steps = np.array(row_major(plan.steps), np.int64)
    at = _sum([*(plan.index[i] for i in own), *(plan.index_step * steps).tolist()], shape)
    flat = indices.reshape(-1).astype(np.int64)
    offsets = _sum([*(plan.target[i] for i in own), *[0] * len(plan.steps)], shape)
    for c, stride in enumerate(plan.strides):
        offsets += flat[at + c] * (stride * plan.stride)
    sizes = [*shape, *(plan.items[i] for i in free)]
    updates = [*(plan.update[i] for i in own), *(plan.update_step * steps).tolist(), *(plan.update[i] for i in free)]
    return offsets, (sizes, updates, [plan.target[i] for i in free])


def _sum(strides: Sequence[int], shape: Sequence[int]) -> NDArray[np.int64]:
    """For each place of `shape`, the sum of its coordinates times `strides`."""
    total = np.zeros(tuple(shape), np.int64)
    for axis, (stride, size) in enumerate(zip(strides, shape, strict=True)):
        total += (np.arange(size) * stride).reshape(-1, *[1] * (len(shape) - 1 - axis))
    return total


def _even(offsets: NDArray[np.int64]) -> list[int] | None:
    """The distance between neighbours along each axis, if it is constant along every axis; else None."""
    first = (0,) * offsets.ndim
    strides = [
        int(offsets[(*first[:axis], 1, *first[axis + 1 :])] - offsets[first]) if size > 1 else 0
        for axis, size in enumerate(offsets.shape)
    ]
    return strides if np.array_equal(offsets, offsets[first] + _sum(strides, offsets.shape)) else None


def _filled(x: Value) -> float | int | None:
    """The number that fills constant `x`, if it was computed and all its elements are equal: copying it then needs no read."""
    if not isinstance(x.constant, ArrayConstant) or not x.size:
        return None
    data = x.constant.array()
    number = data.reshape(-1)[0]
    return number.item() if bool(np.all(data == number)) else None


def _rewrite_scatter_elements(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite ScatterElements: an item for each line of the indices along the axis."""
    x = node.input(0)
    indices = node.input(1)
    updates = node.input(2)
    axis = from_front(int(node.attributes.get("axis", 0)), len(x.shape))
    given = row_major(indices.shape)
    target = row_major(x.shape)
    others = _without(given, axis)
    plan = _Scatter(
        _without(indices.shape, axis), others, others, _without(target, axis), (indices.shape[axis],), given[axis], given[axis],
        (x.shape[axis],), (1,), target[axis], x.shape[axis],
    )  # fmt: skip
    _scattered(rewriter, node, indices, updates, plan)


def _rewrite_scatter_nd(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite ScatterND: an item for each element of an indexed block, so that neighbours are contiguous on both sides."""
    x = node.input(0)
    indices = node.input(1)
    updates = node.input(2)
    parts = indices.shape[-1]
    run = math.prod(x.shape[parts:])
    sizes = x.shape[:parts]
    plan = _Scatter(
        (run,), (0,), (1,), (1,), indices.shape[:-1] or (1,), parts, run, sizes, tuple(row_major(sizes)), run, math.prod(sizes)
    )
    _scattered(rewriter, node, indices, updates, plan)


def _check_updates(node: Node) -> str | None:
    """Check updates: one for each index, of the type of the data, and a reduction that ONNX has."""
    x = node.input(0)
    indices = node.input(1)
    updates = node.input(2)
    wanted = (*indices.shape[:-1], *x.shape[indices.shape[-1] :]) if node.op == "ScatterND" else indices.shape
    if updates.shape != wanted:
        return f"{node.op} with updates of shape {updates.shape}, not {wanted}"
    if updates.dtype != x.dtype:
        return f"{node.op} of {updates.dtype} into {x.dtype} ({x.name})"
    reduction = node.attributes.get("reduction", "none")
    return None if reduction in _REDUCTIONS else f"{node.op} with reduction {reduction!r}; there are {', '.join(_REDUCTIONS)}"


def _rewrite_tensor_scatter(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite TensorScatter: a run of updates along the axis for each entry of the batch, from its index on."""
    x = node.input(0)
    updates = node.input(1)
    first = node.optional(2)
    axis = from_front(int(node.attributes.get("axis", -2)), len(x.shape))
    batch = x.shape[0]
    length = updates.shape[axis]
    size = x.shape[axis]
    is_circular = node.attributes.get("mode", "linear") == "circular"
    steps = np.arange(length)
    if first is None or first.constant is not None:
        starts = np.zeros(batch, np.int64) if first is None or first.constant is None else first.constant.array()
        at = starts.reshape(-1, 1) + steps
        indices = constant(f"{node.name}.at", at % size if is_circular else at)
    else:
        start = reshaped(rewriter, first, (batch, 1))
        span = constant(f"{node.name}.steps", steps)
        indices = rewriter.emit("Add", [start, span], (batch, length), "int64", f"{node.name}.at")
        if is_circular:
            around = constant(f"{node.name}.size", np.array(size))
            indices = rewriter.emit("Mod", [indices, around], indices.shape, "int64", f"{node.name}.around")
    given = row_major(updates.shape)
    target = row_major(x.shape)
    items = _without(updates.shape, axis)
    plan = _Scatter(
        items, (length, *[0] * (len(items) - 1)), _without(given, axis), _without(target, axis), (length,), 1, given[axis],
        (size,), (1,), target[axis], size,
    )  # fmt: skip
    _scattered(rewriter, node, indices, updates, plan, repeats=False)


def _check_tensor_scatter(node: Node) -> str | None:
    x = node.input(0)
    updates = node.input(1)
    first = node.optional(2)
    axis = int(node.attributes.get("axis", -2))
    if (reason := bad_axis(node, [axis], len(x.shape))) is not None:
        return reason
    axis = from_front(axis, len(x.shape))
    mode = node.attributes.get("mode", "linear")
    if axis == 0:
        return "TensorScatter along axis 0, which is the batch"
    if mode not in ("linear", "circular"):
        return f"TensorScatter with mode {mode!r}; there are linear and circular"
    if len(updates.shape) != len(x.shape) or _without(updates.shape, axis) != _without(x.shape, axis):
        return f"TensorScatter of shape {updates.shape} into {x.shape} along axis {axis}"
    if updates.shape[axis] > x.shape[axis]:
        return f"TensorScatter of {updates.shape[axis]} elements into {x.shape[axis]}"
    if updates.dtype != x.dtype:
        return f"TensorScatter of {updates.dtype} into {x.dtype} ({x.name})"
    if first is not None and first.shape != x.shape[:1]:
        return f"TensorScatter with write_indices of shape {first.shape}, not {x.shape[:1]}"
    if mode == "linear" and first is not None and first.constant is not None:
        starts = first.constant.array()
        last = x.shape[axis] - updates.shape[axis]
        wrong = starts[(starts < 0) | (starts > last)]
        if wrong.size:
            return f"TensorScatter from index {wrong[0]}, where {x.shape[axis]} elements end"
    return too_long(node, updates.shape[axis])


def _rewrite_reverse_sequence(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite ReverseSequence: step t of a sequence of length n is its step n - 1 - t; later steps stay."""
    x = node.input(0)
    lengths = node.input(1)
    time = int(node.attributes.get("time_axis", 0))
    steps = x.shape[time]
    entries = x.shape[1 - time]
    positions = x.shape[:2]
    strides = row_major(x.shape)

    def along(axis: int, size: int) -> tuple[int, int]:
        return (size, 1) if axis == 0 else (1, size)

    step = constant(f"{node.name}.step", np.arange(steps).reshape(along(time, steps)))
    length = reshaped(rewriter, lengths, along(1 - time, entries))
    one = constant(f"{node.name}.one", np.array(1, np.int64))
    last = rewriter.emit("Sub", [length, one], length.shape, "int64", f"{node.name}.last")
    inside = rewriter.emit("Less", [step, length], positions, "bool", f"{node.name}.inside")
    reverse = rewriter.emit("Sub", [last, step], positions, "int64", f"{node.name}.reverse")
    indices = rewriter.emit("Where", [inside, reverse, step], positions, "int64", f"{node.name}.indices")
    rewriter.add(
        "GatherAt", [x, indices], node.outputs[0], node.name,
        positions=positions, base=tuple(0 if axis == time else strides[axis] for axis in (0, 1)),
        index=tuple(row_major(positions)), sizes=(steps,), strides=(strides[time],), run=math.prod(x.shape[2:]),
    )  # fmt: skip


def _check_reverse_sequence(node: Node) -> str | None:
    shape = node.input(0).shape
    lengths = node.input(1)
    batch = int(node.attributes.get("batch_axis", 1))
    time = int(node.attributes.get("time_axis", 0))
    if len(shape) < 2 or {batch, time} != {0, 1}:
        return f"ReverseSequence with batch_axis {batch} and time_axis {time} of a tensor of {len(shape)} dimensions"
    if lengths.shape != (shape[batch],):
        return f"ReverseSequence with lengths of shape {lengths.shape} for {shape[batch]} sequences"
    if lengths.constant is not None:
        given = lengths.constant.array()
        wrong = given[(given < 0) | (given > shape[time])]
        if wrong.size:
            return f"ReverseSequence of {wrong[0]} steps among {shape[time]}"
    return too_long(node, shape[time])


def _rewrite_compress(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite Compress as a Gather of the positions that the condition, a constant, selects."""
    x = node.input(0)
    condition = node.input(1).constant
    output = node.outputs[0]
    assert condition is not None
    axis = node.attributes.get("axis")
    if axis is None:
        x = reshaped(rewriter, x, (x.size,))
    chosen = constant(f"{node.name}.chosen", np.flatnonzero(condition.array()))
    rewriter.add("Gather", [x, chosen], output, node.name, axis=from_front(int(axis or 0), len(x.shape)))


def _check_compress(node: Node) -> str | None:
    x = node.input(0)
    axis = node.attributes.get("axis")
    if axis is not None and (reason := bad_axis(node, [int(axis)], len(x.shape))) is not None:
        return reason
    condition = node.input(1).constant
    size = x.size if axis is None else x.shape[int(axis)]
    if condition is not None and np.flatnonzero(condition.array()).max(initial=0) >= size:
        return f"Compress with a condition of {condition.shape[0]} elements for {size}"
    return None


_SCATTERED = {
    "inputs": (ANY, INDEX, ANY),
    "check": all_of(_check_elements, _check_updates),
    "rewrite": _rewrite_scatter_elements,
}


def _summed(node: Node) -> Sequence[Value]:
    """Tensors that updates are added to in sequence."""
    return [] if node.attributes["reduction"] == "none" else node.outputs


register(
    __name__,
    Operator(
        "Compress", (ANY, BOOL), check=all_of(constant_inputs(1), _check_compress), rewrite=_rewrite_compress
    ),
    Operator("GatherElements", (ANY, INDEX), check=_check_elements, rewrite=_rewrite_gather_elements),
    Operator("GatherND", (ANY, _INT64), check=_check_nd, rewrite=_rewrite_gather_nd),
    Operator("ReverseSequence", (ANY, _INT64), check=_check_reverse_sequence, rewrite=_rewrite_reverse_sequence),
    *each(
        ("Scatter", "ScatterElements"), inputs=(ANY, INDEX, ANY), check=all_of(_check_elements, _check_updates),
        rewrite=_rewrite_scatter_elements,
    ),
    Operator("ScatterND", (ANY, _INT64, ANY), check=all_of(_check_nd, _check_updates), rewrite=_rewrite_scatter_nd),
    Operator("TensorScatter", (ANY, ANY, _INT64), check=_check_tensor_scatter, rewrite=_rewrite_tensor_scatter),
    Operator("GatherAt", (ANY, INDEX), kernel="gather_at", onnx=False),
    Operator("Place", (ANY, ANY), kernel="place", onnx=False),
    Operator("ScatterAt", (ANY, INDEX, ANY), kernel="scatter", keep_fp32=_summed, onnx=False),
)  # fmt: skip
