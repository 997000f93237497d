"""Random graphs of layouts: products, attention, convolutions, pools and norms; their operands arrive and leave by moves.

Their shapes have tails: few are multiples of the widths of vectors, tiles and groups. Every value is known in float64, with a
bound of the errors that a device may make (`arithmetic`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import erf

import numpy as np

from benchmarks.device.arithmetic import Arithmetic, Known, largest, windows
from benchmarks.device.drawing import Drawing, Tensor, UndefinedError
from benchmarks.device.moves import arrive, depart, reshape, transpose
from flashmem.base.types import Precision

_SMALL = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 15, 16, 17, 20, 24)
_MIDDLE = (*_SMALL, 28, 31, 32, 33, 36, 40, 47, 48, 63, 64, 65, 72)
_LARGE = (*_MIDDLE, 80, 96, 100, 127, 128, 129, 160, 192, 196, 197, 255, 256, 257)
_MOST_DRAWS = 200
_MOST_ELEMENTS = 1 << 17


def drawn(seed: int, index: int, precision: Precision, *, large: bool = True) -> Drawing:
    """Graph number `index` of a seed. `large`: sizes up to 257, for which GPUs have other kernels."""
    rng = random.Random(f"{seed} {index} {precision}")
    for _ in range(_MOST_DRAWS):
        draw = Drawing(rng, Arithmetic(precision), f"g{index}_")
        try:
            value = rng.choice(_PARTS)(draw, large)
            value = depart(draw, value)
            for _ in range(rng.choice((0, 0, 1, 1, 2))):
                value = depart(draw, rng.choice(_CONTINUED)(draw, value))
            draw.finish(value)
        except UndefinedError:
            continue
        if max(each.known.exact.size for each in draw.tensors) <= _MOST_ELEMENTS:
            return draw
    raise AssertionError(f"graph {index} of seed {seed}: none of {_MOST_DRAWS} drawings shows anything")


def _size(draw: Drawing, large: bool) -> int:
    return draw.rng.choice(_LARGE if large and draw.chance(0.3) else _MIDDLE)


def _batch(draw: Drawing) -> tuple[int, ...]:
    return draw.rng.choice(((), (), (1,), (2,), (3,), (5,), (2, 3), (1, 4)))


def _product(draw: Drawing, large: bool) -> Tensor:
    """MatMul of any two operands, of which one may be a constant matrix, and what follows it in networks."""
    rows, depth, columns = (_size(draw, large) for _ in range(3))
    batch = _batch(draw)
    a = arrive(draw, (*batch, rows, depth), constant=False if draw.chance(0.7) else None)
    if draw.chance(0.6):
        b = arrive(draw, (depth, columns), steps=draw.rng.choice((0, 0, 1)), constant=True, size=depth**-0.5)
    else:
        b = arrive(draw, (depth, columns) if draw.chance(0.3) else (*batch, depth, columns), size=depth**-0.5)
    made = draw.node("MatMul", [a, b], draw.arithmetic.product(a.known, b.known, constant=_fixed(draw, a, b)))
    return _followed(draw, made)


def _fixed(draw: Drawing, *operands: Tensor) -> bool:
    """Whether one of them can be a constant for the compiler, which folds what it knows."""
    moving = set(draw.feeds)
    for node in draw.nodes:
        if moving.intersection(node.input):
            moving.update(node.output)
    return any(each.name not in moving for each in operands)


def _gemm(draw: Drawing, large: bool) -> Tensor:
    rows, depth, columns = (_size(draw, large) for _ in range(3))
    turned = [draw.chance(0.5), draw.chance(0.5)]
    a = arrive(draw, (depth, rows) if turned[0] else (rows, depth), constant=False)
    b = arrive(draw, (columns, depth) if turned[1] else (depth, columns), constant=draw.chance(0.7), size=depth**-0.5)
    flipped = [each.known.moved(np.transpose) if turn else each.known for each, turn in zip((a, b), turned, strict=True)]
    known = draw.arithmetic.product(flipped[0], flipped[1], constant=_fixed(draw, a, b))
    operands = [a, b]
    if draw.chance(0.7):
        c = draw.leaf(draw.rng.choice(((columns,), (1, columns), (rows, 1), (rows, columns))))
        operands.append(c)
        known = draw.arithmetic.plus(known, c.known)
    return _followed(draw, draw.node("Gemm", operands, known, transA=int(turned[0]), transB=int(turned[1])))


def _followed(draw: Drawing, value: Tensor) -> Tensor:
    """What is fused with a product or a convolution: a bias, an activation, a residual."""
    for _ in range(draw.rng.choice((0, 1, 1, 2, 3))):
        value = draw.rng.choice((_biased, _activated, _residual))(draw, value)
    return value


def _biased(draw: Drawing, value: Tensor) -> Tensor:
    shape = [1] * len(value.shape)
    if value.shape:
        axis = draw.rng.choice((-1, draw.rng.randrange(len(shape))))
        shape[axis] = value.shape[axis]
    other = draw.leaf(shape)
    if draw.chance(0.7):
        return draw.node("Add", [value, other], draw.arithmetic.plus(value.known, other.known))
    return draw.node("Mul", [value, other], draw.arithmetic.times(value.known, other.known))


def _residual(draw: Drawing, value: Tensor) -> Tensor:
    other = arrive(draw, value.shape)
    pair = [value, other] if draw.chance(0.5) else [other, value]
    return draw.node("Add", pair, draw.arithmetic.plus(value.known, other.known))


_erf = np.vectorize(erf, otypes=[float])
_FUNCTIONS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "Sigmoid": (lambda x: 1 / (1 + np.exp(-x)), 0.25),
    "Tanh": (np.tanh, 1.0),
    "Gelu": (lambda x: 0.5 * x * (1 + _erf(x * 0.5**0.5)), 1.13),
}


def _activated(draw: Drawing, value: Tensor) -> Tensor:
    op = draw.rng.choice(("Relu", "Relu", "Neg", *_FUNCTIONS))
    if op == "Relu":
        known = Known(np.maximum(value.known.exact, 0), value.known.error)
    elif op == "Neg":
        known = Known(-value.known.exact, value.known.error)
    else:
        known = draw.arithmetic.function(value.known, *_FUNCTIONS[op])
    return draw.node(op, [value], known)


def _attention(draw: Drawing, large: bool) -> Tensor:
    """Softmax(Q K' * scale + mask) V, whose operands come from the layouts that exporters write."""
    batch, heads = draw.rng.choice((1, 1, 2, 3)), draw.rng.choice((1, 2, 3, 4, 5))
    queries, keys = _size(draw, large), _size(draw, large)
    keys = queries if draw.chance(0.4) else keys
    width, value_width = draw.rng.choice((3, 4, 8, 12, 16, 17, 24, 32, 33, 64)), draw.rng.choice((4, 5, 8, 16, 31, 32, 64))
    value_width = width if draw.chance(0.7) else value_width

    def operand(rows: int, columns: int, size: float = 1.0) -> Tensor:
        if draw.chance(0.5):  # the rows of all heads beside each other, as a projection makes them
            flat = arrive(draw, (batch, rows, heads * columns), steps=draw.rng.randint(0, 1), constant=False, size=size)
            return transpose(draw, reshape(draw, flat, (batch, rows, heads, columns)), (0, 2, 1, 3))
        return arrive(draw, (batch, heads, rows, columns), constant=False, size=size)

    q, v = operand(queries, width), operand(keys, value_width)
    if draw.chance(0.3):
        k = arrive(draw, (batch, heads, width, keys), constant=False)
    else:
        k = transpose(draw, operand(keys, width), (0, 1, 3, 2))
    scale = draw.leaf((), constant=True, around=0.0, size=width**-0.5)
    if draw.chance(0.3):
        q = draw.node("Mul", [q, scale], draw.arithmetic.times(q.known, scale.known))
        scores = draw.node("MatMul", [q, k], draw.arithmetic.product(q.known, k.known, constant=False))
    else:
        scores = draw.node("MatMul", [q, k], draw.arithmetic.product(q.known, k.known, constant=False))
        scores = draw.node("Mul", [scores, scale], draw.arithmetic.times(scores.known, scale.known))
    if draw.chance(0.4):
        mask = draw.leaf(
            draw.rng.choice(((queries, keys), (batch, 1, 1, keys), (1, heads, queries, keys), (batch, 1, queries, keys)))
        )
        scores = draw.node("Add", [scores, mask], draw.arithmetic.plus(scores.known, mask.known))
    weights = draw.node("Softmax", [scores], draw.arithmetic.softmax(scores.known, -1), axis=-1)
    made = draw.node("MatMul", [weights, v], draw.arithmetic.product(weights.known, v.known, constant=False))
    if draw.chance(0.6):
        made = reshape(draw, transpose(draw, made, (0, 2, 1, 3)), (batch, queries, heads * value_width))
    return made


def _convolution(draw: Drawing, large: bool) -> Tensor:
    """Conv in two dimensions: pointwise, with taps, depthwise or grouped; its image may arrive as NHWC."""
    kind = draw.rng.choice(("pointwise", "taps", "taps", "depthwise", "grouped"))
    groups = draw.rng.choice((2, 3, 4)) if kind == "grouped" else 1
    channels, outputs = (groups * max(1, _size(draw, large) // groups) for _ in range(2))
    if kind == "depthwise":
        groups = channels
        outputs = channels * draw.rng.choice((1, 1, 1, 2))
    taps = (1, 1) if kind == "pointwise" else draw.rng.choice(((3, 3), (3, 3), (5, 5), (1, 3), (3, 1), (2, 2), (7, 7), (4, 3)))
    strides = draw.rng.choice(((1, 1), (1, 1), (2, 2), (1, 2), (3, 3)))
    dilations = (1, 1) if kind == "pointwise" else draw.rng.choice(((1, 1), (1, 1), (1, 1), (2, 2), (1, 2)))
    pads = [
        draw.rng.choice((0, (k - 1) * d // 2, (k - 1) * d // 2, k - 1)) for k, d in zip(2 * taps, 2 * dilations, strict=True)
    ]
    spans = [(k - 1) * d + 1 - before - after for k, d, before, after in zip(taps, dilations, pads[:2], pads[2:], strict=True)]
    height, width = (max(1, span) + draw.rng.choice((0, 1, 3, 6, 7, 11, 13, 27 if large else 5)) for span in spans)
    batch = draw.rng.choice((1, 1, 1, 2, 3))
    if draw.chance(0.4):
        x = transpose(draw, arrive(draw, (batch, height, width, channels), constant=False), (0, 3, 1, 2))
    else:
        x = arrive(draw, (batch, channels, height, width), constant=False)
    depth = channels // groups * taps[0] * taps[1]
    w = draw.leaf((outputs, channels // groups, *taps), constant=True, size=depth**-0.5)
    known = draw.arithmetic.convolution(x.known, w.known, strides, pads, dilations, groups)
    operands = [x, w]
    if draw.chance(0.6):
        bias = draw.leaf((outputs,), constant=True)
        operands.append(bias)
        known = draw.arithmetic.plus(known, bias.known.moved(lambda each: each[:, None, None]))
    made = draw.node("Conv", operands, known, strides=strides, pads=pads, dilations=dilations, group=groups, kernel_shape=taps)
    made = _followed(draw, made)
    return transpose(draw, made, (0, 2, 3, 1)) if draw.chance(0.3) else made


def _pool(draw: Drawing, large: bool) -> Tensor:
    size, stride = draw.rng.choice((2, 3, 5)), draw.rng.choice((1, 2, 3))
    height, width = (size + draw.rng.choice((0, 1, 4, 9, 12)) for _ in range(2))
    x = arrive(draw, (draw.rng.choice((1, 2)), _size(draw, large), height, width), constant=False)
    inside = windows(x.known, size, stride)
    if draw.chance(0.5):
        known, op = largest(inside, (4, 5)), "MaxPool"
    else:
        known, op = draw.arithmetic.total(inside, (4, 5), mean=True), "AveragePool"
    known = known.moved(lambda each: each[..., 0, 0])
    return draw.node(op, [x], known, kernel_shape=[size, size], strides=[stride, stride])


def _only_moves(draw: Drawing, large: bool) -> Tensor:
    shape = [draw.rng.choice(_SMALL) for _ in range(draw.rng.randint(1, 5))]
    while np.prod(shape) > 20000:
        shape[shape.index(max(shape))] //= 2
    moved = depart(draw, arrive(draw, shape, steps=draw.rng.randint(1, 3), constant=False))
    return draw.rng.choice((_biased, _residual, _activated))(draw, moved)


def _project(draw: Drawing, value: Tensor) -> Tensor:
    """A product of the value, flattened or as it is, with a matrix."""
    if not value.shape or draw.chance(0.3):
        count = value.known.exact.size
        rows = draw.rng.choice([each for each in range(1, min(count, 64) + 1) if count % each == 0])
        value = reshape(draw, value, (rows, count // rows))
    depth, columns = value.shape[-1], draw.rng.choice(_MIDDLE)
    if depth * columns > 1 << 16:
        return _biased(draw, value)
    w = draw.leaf((depth, columns), constant=draw.chance(0.8), size=depth**-0.5)
    if len(value.shape) == 1:
        value = reshape(draw, value, (1, depth))
    known = draw.arithmetic.product(value.known, w.known, constant=_fixed(draw, value, w))
    return _followed(draw, draw.node("MatMul", [value, w], known))


def _norm(draw: Drawing, value: Tensor) -> Tensor:
    if not value.shape or value.shape[-1] < 2:
        return _biased(draw, value)
    scale, bias = (draw.leaf(value.shape[-1:], constant=draw.chance(0.8), around=1.0) for _ in range(2))
    known = draw.arithmetic.normalised(value.known, scale.known, bias.known, 1e-3)
    return draw.node("LayerNormalization", [value, scale, bias], known, epsilon=1e-3)


def _soft(draw: Drawing, value: Tensor) -> Tensor:
    if not value.shape:
        return _activated(draw, value)
    axis = draw.rng.randrange(len(value.shape))
    return draw.node("Softmax", [value], draw.arithmetic.softmax(value.known, axis), axis=axis)


def _reduced(draw: Drawing, value: Tensor) -> Tensor:
    if not value.shape:
        return _activated(draw, value)
    axes = tuple(sorted(draw.rng.sample(range(len(value.shape)), draw.rng.randint(1, min(2, len(value.shape))))))
    op = draw.rng.choice(("ReduceMean", "ReduceSum", "ReduceMax"))
    known = (
        largest(value.known, axes) if op == "ReduceMax" else draw.arithmetic.total(value.known, axes, mean=op == "ReduceMean")
    )
    made = draw.node(op, [value, draw.integers(axes)], known, keepdims=1)
    return _residual(draw, made)


_PARTS = (_product, _product, _gemm, _attention, _attention, _convolution, _convolution, _convolution, _pool, _only_moves)
_CONTINUED = (_project, _project, _norm, _soft, _reduced, _residual, _activated)
