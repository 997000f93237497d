"""Operators that move elements, forwards from a tensor and backwards from a shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.device.arithmetic import Known
from benchmarks.device.drawing import Drawing, Tensor

_MOST_RANK = 5


def arrive(
    draw: Drawing, shape: Sequence[int], *, steps: int | None = None, constant: bool | None = None, size: float = 1.0
) -> Tensor:
    """A tensor of `shape` that several moves made out of data, or out of a value that the graph has."""
    shape = tuple(shape)
    steps = draw.rng.choice((0, 1, 1, 2, 3)) if steps is None else steps
    if steps == 0:
        if constant is None and draw.chance(0.2):
            count = int(np.prod(shape))
            known = [each for each in draw.tensors if int(np.prod(each.shape)) == count and not each.constant]
            if known:
                return reshape(draw, draw.rng.choice(known), shape)
        return draw.leaf(shape, constant=constant, size=size)

    def before(shape: Sequence[int]) -> Tensor:
        return arrive(draw, shape, steps=steps - 1, constant=constant, size=size)

    ways: list[Callable[[], Tensor]] = [
        lambda: _transposed_from(draw, shape, before),
        lambda: _transposed_from(draw, shape, before),
        lambda: reshape(draw, before(factors(draw, int(np.prod(shape)))), shape),
    ]
    if shape:
        axis = draw.rng.randrange(len(shape))
        ways += [lambda: _sliced_from(draw, shape, axis, before), lambda: _gathered_from(draw, shape, axis, before)]
        if shape[axis] > 1:
            ways.append(lambda: _joined_from(draw, shape, axis, before))
        ways.append(lambda: _split_from(draw, shape, axis, before))
    return draw.rng.choice(ways)()


def depart(draw: Drawing, tensor: Tensor) -> Tensor:
    """The tensor after several moves."""
    for _ in range(draw.rng.choice((0, 1, 1, 2, 3))):
        tensor = draw.rng.choice((_any_transpose, _any_transpose, _any_reshape, _any_slice, _any_join, _any_pad))(draw, tensor)
    return tensor


def transpose(draw: Drawing, tensor: Tensor, perm: Sequence[int]) -> Tensor:
    """Transpose."""
    return draw.node("Transpose", [tensor], tensor.known.moved(lambda each: each.transpose(perm)), perm=list(perm))


def reshape(draw: Drawing, tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Reshape; nothing if it has this shape."""
    if tuple(shape) == tensor.shape:
        return tensor
    return draw.node("Reshape", [tensor, draw.integers(shape)], tensor.known.moved(lambda each: each.reshape(tuple(shape))))


def factors(draw: Drawing, count: int) -> tuple[int, ...]:
    """A random shape of `count` elements."""
    sizes = [1] * draw.rng.randint(1, _MOST_RANK - 1)
    rest, divisor = count, 2
    while rest > 1:
        if divisor * divisor > rest:
            divisor = rest
        if rest % divisor:
            divisor += 1
            continue
        sizes[draw.rng.randrange(len(sizes))] *= divisor
        rest //= divisor
    return tuple(sizes)


def _transposed_from(draw: Drawing, shape: tuple[int, ...], before: Callable[[Sequence[int]], Tensor]) -> Tensor:
    perm = list(range(len(shape)))
    draw.rng.shuffle(perm)
    source = [0] * len(shape)
    for index, axis in enumerate(perm):
        source[axis] = shape[index]
    return transpose(draw, before(source), perm)


def _slice(draw: Drawing, tensor: Tensor, axis: int, start: int, count: int, step: int) -> Tensor:
    index = [slice(None)] * len(tensor.shape)
    stop: int | None = start + count * step
    index[axis] = slice(start, None if stop is not None and stop < 0 else stop, step)
    numbers = [draw.integers([each]) for each in (start, stop if stop is not None and stop >= 0 else -(2**40), axis, step)]
    return draw.node("Slice", [tensor, *numbers], tensor.known.moved(lambda each: each[tuple(index)]))


def _sliced_from(draw: Drawing, shape: tuple[int, ...], axis: int, before: Callable[[Sequence[int]], Tensor]) -> Tensor:
    step, count = draw.rng.choice((1, 1, 2, -1)), shape[axis]
    first, last = draw.rng.randint(0, 5), draw.rng.randint(0, 5)
    span = (count - 1) * abs(step) + 1
    source = (*shape[:axis], first + span + last, *shape[axis + 1 :])
    return _slice(draw, before(source), axis, first if step > 0 else first + span - 1, count, step)


def _gathered_from(draw: Drawing, shape: tuple[int, ...], axis: int, before: Callable[[Sequence[int]], Tensor]) -> Tensor:
    there = draw.rng.randint(1, shape[axis] + 3)
    tensor = before((*shape[:axis], there, *shape[axis + 1 :]))
    places = [draw.rng.randrange(there) for _ in range(shape[axis])]
    return draw.node(
        "Gather", [tensor, draw.integers(places)], tensor.known.moved(lambda each: each.take(places, axis)), axis=axis
    )


def _joined_from(draw: Drawing, shape: tuple[int, ...], axis: int, before: Callable[[Sequence[int]], Tensor]) -> Tensor:
    cut = draw.rng.randint(1, shape[axis] - 1)
    parts = [before((*shape[:axis], count, *shape[axis + 1 :])) for count in (cut, shape[axis] - cut)]
    return _join(draw, parts, axis)


def _join(draw: Drawing, parts: Sequence[Tensor], axis: int) -> Tensor:
    known = Known(*(np.concatenate([getattr(each.known, of) for each in parts], axis) for of in ("exact", "error")))
    return draw.node("Concat", parts, known, axis=axis)


def _split_from(draw: Drawing, shape: tuple[int, ...], axis: int, before: Callable[[Sequence[int]], Tensor]) -> Tensor:
    counts = [shape[axis], *(draw.rng.randint(1, shape[axis] + 2) for _ in range(draw.rng.randint(1, 2)))]
    draw.rng.shuffle(counts)
    tensor = before((*shape[:axis], sum(counts), *shape[axis + 1 :]))
    ends = np.cumsum(counts)[:-1].tolist()
    parts = [
        Known(*pair)
        for pair in zip(*(np.split(each, ends, axis) for each in (tensor.known.exact, tensor.known.error)), strict=True)
    ]
    return draw.split("Split", [tensor, draw.integers(counts)], parts, axis=axis)[counts.index(shape[axis])]


def _any_transpose(draw: Drawing, tensor: Tensor) -> Tensor:
    return transpose(draw, tensor, draw.rng.sample(range(len(tensor.shape)), len(tensor.shape)))


def _any_reshape(draw: Drawing, tensor: Tensor) -> Tensor:
    return reshape(draw, tensor, factors(draw, int(np.prod(tensor.shape))))


def _any_slice(draw: Drawing, tensor: Tensor) -> Tensor:
    if not tensor.shape:
        return tensor
    axis = draw.rng.randrange(len(tensor.shape))
    there, step = tensor.shape[axis], draw.rng.choice((1, 1, 2, -1))
    start = draw.rng.randrange(there)
    longest = (start + 1 if step < 0 else -(-(there - start) // step)) if there else 0
    return _slice(draw, tensor, axis, start, draw.rng.randint(1, longest), step)


def _any_join(draw: Drawing, tensor: Tensor) -> Tensor:
    if not tensor.shape:
        return tensor
    axis = draw.rng.randrange(len(tensor.shape))
    other = arrive(
        draw, (*tensor.shape[:axis], draw.rng.randint(1, 5), *tensor.shape[axis + 1 :]), steps=draw.rng.randint(0, 1)
    )
    parts = [tensor, other]
    draw.rng.shuffle(parts)
    return _join(draw, parts, axis)


def _any_pad(draw: Drawing, tensor: Tensor) -> Tensor:
    rank = len(tensor.shape)
    before, after = ([draw.rng.choice((0, 0, 1, 3)) for _ in range(rank)] for _ in range(2))
    pads = list(zip(before, after, strict=True))
    known = tensor.known.moved(lambda each: np.pad(each, pads))
    return draw.node("Pad", [tensor, draw.integers([*before, *after])], known)
