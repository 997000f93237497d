"""Patterns of several nodes that move data, as in models: packed projections, windows of images, two layouts."""

from __future__ import annotations

import numpy as np

from .drawing import Drawing
from .values import FLOATS, RejectedNodeError, Value


def _sizes(d: Drawing, count: int, most: int = 20000) -> tuple[int, ...]:
    """Sizes of at most `most` elements."""
    found = tuple(d.rng.choice([size for size in (*d.sizes, 1, 2, 3) if 0 < size <= 17]) for _ in range(count))
    if np.prod(found) > most:
        raise RejectedNodeError("too large")
    return found


def _reshaped(d: Drawing, x: Value, *shape: int) -> Value:
    return d.emit("Reshape", [x, d.constant(shape)])[0]


def _projected(d: Drawing, x: Value, columns: int) -> Value:
    """x times constant weights, with or without a bias."""
    y = d.emit("MatMul", [x, d.leaf(x.dtype, (x.shape[-1], columns), "constant")])[0]
    return d.emit("Add", [y, d.leaf(x.dtype, (columns,), "constant")])[0] if d.maybe(0.7) else y


def packed(d: Drawing, op: str) -> None:
    """A projection that is split: by columns, or by a separate axis; the parts are gated, attended to or unused."""
    kind = d.rng.choice([kind for kind in d.types_of(op) if kind in FLOATS])
    batch, rows, depth, heads, size = _sizes(d, 5)
    count = d.rng.choice((2, 3, 3, 4))
    x = d.pick((kind,), (2, 4), lambda v: 0 < v.own.size < 3000, lambda: (batch, rows, depth))
    y = _projected(d, x, count * heads * size)
    wide = x.shape[:-1]
    rank = len(wide)
    form = d.rng.choice(("split", "slice", "gather", "turned", "uneven"))
    if form == "split":
        sizes = d.constant([heads * size] * count)
        parts = d.emit("Split", [y, sizes], count, axis=d.rng.choice((-1, rank)))
    elif form == "uneven":
        cuts = sorted(d.rng.sample(range(1, count * heads * size), min(count, count * heads * size) - 1))
        sizes = d.constant(np.diff([0, *cuts, count * heads * size]))
        parts = d.emit("Split", [y, sizes], len(cuts) + 1, axis=-1)
    elif form == "slice":
        parts = [
            d.emit("Slice", [y, d.constant([i * heads * size]), d.constant([(i + 1) * heads * size]), d.constant([-1])])[0]
            for i in range(count)
            if d.maybe(0.8)
        ]
    else:
        y, axis = _reshaped(d, y, *wide, count, heads, size), rank
        if form == "turned":
            y, axis = d.emit("Transpose", [y], perm=[rank, *range(rank - 1), rank + 1, rank - 1, rank + 2])[0], 0
        parts = [d.emit("Gather", [y, d.constant(i)], axis=axis)[0] for i in range(count)]
    if len(parts) > 1 and parts[0].shape == parts[1].shape and d.maybe():
        gate = d.emit(d.rng.choice(("Sigmoid", "Erf", "Tanh")), [parts[1]])[0]
        d.emit("Mul", [parts[0], gate])
    elif len(parts) > 2 and len({part.shape for part in parts[:3]}) == 1:
        q, k, v = parts[:3]
        perm = [*range(k.own.ndim - 2), k.own.ndim - 1, k.own.ndim - 2]
        scores = d.emit("MatMul", [q, d.emit("Transpose", [k], perm=perm)[0]])[0]
        d.emit("MatMul", [d.emit("Softmax", [scores], axis=-1)[0], v])


def windows(d: Drawing, op: str) -> None:
    """An image in windows: normalized, projected, pooled or attended to inside them, and merged again."""
    kind = d.rng.choice(d.types_of(op))
    down, across, channels = _sizes(d, 3)
    height, width = (d.rng.choice((1, 2, 2, 3, 4)) for _ in range(2))
    shape = (d.rng.choice((1, 1, 2)), down * height, across * width, channels)
    if np.prod(shape) > 6000:
        raise RejectedNodeError("too large")
    image = x = d.leaf(kind, shape, "input")
    if d.maybe(0.6):
        weight, bias = d.leaf(kind, (channels,), "constant"), d.leaf(kind, (channels,), "constant")
        x = d.emit("LayerNormalization", [x, weight, bias], axis=-1)[0]
    x = _reshaped(d, x, shape[0], down, height, across, width, channels)
    x = d.emit("Transpose", [x], perm=[0, 1, 3, 2, 4, 5])[0]
    count = shape[0] * down * across
    x = _reshaped(d, x, count, height, width, channels)
    step = 1
    if d.maybe(0.7):
        x = _projected(d, x, channels)
    if height % 2 == 0 and width % 2 == 0 and d.maybe(0.6):
        step = 2
        x = d.emit("Transpose", [x], perm=[0, 3, 1, 2])[0]
        x = d.emit(d.rng.choice(("MaxPool", "AveragePool")), [x], kernel_shape=[2, 2], strides=[2, 2])[0]
        x = d.emit("Transpose", [x], perm=[0, 2, 3, 1])[0]
    if d.maybe(0.7):
        q = _reshaped(d, x, count, height * width // step**2, channels)
        scores = d.emit("MatMul", [q, d.emit("Transpose", [q], perm=[0, 2, 1])[0]])[0]
        x = d.emit("MatMul", [d.emit("Softmax", [scores], axis=-1)[0], q])[0]
        x = _projected(d, x, channels)
    x = _reshaped(d, x, shape[0], down, across, height // step, width // step, channels)
    x = d.emit("Transpose", [x], perm=[0, 1, 3, 2, 4, 5])[0]
    x = _reshaped(d, x, shape[0], down * height // step, across * width // step, channels)
    if step == 1 and d.maybe(0.7):
        d.emit("Add", [image, x])


def turned(d: Drawing, op: str) -> None:
    """A tensor transposed and transposed back, with operators of every kind between."""
    kind = d.rng.choice(d.types_of(op))
    x = d.pick((kind,), (2, 5), lambda v: 0 < v.own.size < 4000)
    if not x.own.size:
        raise RejectedNodeError("empty")
    rank = x.own.ndim
    order = d.rng.sample(range(rank), rank)
    y = d.emit("Transpose", [x], perm=order)[0]
    for step in d.rng.sample(("unary", "channel", "full", "normal", "slice", "merge", "reduce"), d.rng.randint(1, 4)):
        if step == "unary":
            y = d.emit(d.rng.choice(("Neg", "Abs")), [y])[0]
        elif step == "channel":
            shape = tuple(1 if d.maybe() else size for size in y.shape)
            y = d.emit("Mul", [y, d.leaf(kind, shape)])[0]
        elif step == "full":
            y = d.emit("Add", [y, d.leaf(kind, y.shape)])[0]
        elif step == "normal" and kind == "float32":
            groups = d.rng.choice([n for n in range(1, y.shape[0] * y.shape[1] + 1) if (y.shape[0] * y.shape[1]) % n == 0])
            scale, bias = d.leaf(kind, (groups,), "constant"), d.leaf(kind, (groups,), "constant")
            rows = _reshaped(d, y, 1, groups, y.own.size // groups)
            y = _reshaped(d, d.emit("InstanceNormalization", [rows, scale, bias])[0], *y.shape)
        elif step == "slice":
            axis = d.rng.randrange(y.own.ndim)
            first = d.rng.randrange(y.shape[axis])
            y = d.emit("Slice", [y, d.constant([first]), d.constant([first + 3]), d.constant([axis])])[0]
        elif step == "reduce" and kind == "float32":
            y = d.emit("ReduceSum", [y, d.constant([d.rng.randrange(y.own.ndim)])], keepdims=1)[0]
        elif step == "merge" and y.own.ndim == rank and rank > 2:
            axis = d.rng.randrange(rank - 1)
            merged = _reshaped(d, y, *y.shape[:axis], y.shape[axis] * y.shape[axis + 1], *y.shape[axis + 2 :])
            y = _reshaped(d, d.emit("Neg", [merged])[0], *y.shape)
    y = d.emit("Transpose", [y], perm=[order.index(axis) for axis in range(rank)])[0]
    if y.shape == x.shape and d.maybe():
        d.emit("Add", [x, y])
