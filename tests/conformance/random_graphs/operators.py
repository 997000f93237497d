"""Random nodes of each operator: operands, attributes, and constants such as shapes and axes.

An operator's element types are those of its ONNX schema (`Drawing.types_of`). `FAMILIES` is the pool. A family is drawn first,
so that the many elementwise operators do not displace the others.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import helper

from .drawing import Drawing, Shape
from .patterns import packed, turned, windows
from .values import DTYPES, FLOATS, INTEGERS, Array, RejectedNodeError, Value, leaf

Draw = Callable[[Drawing, str], None]
Family = tuple[float, Draw, tuple[str, ...]]

_ATTRIBUTES: dict[str, dict[str, tuple[float, ...]]] = {
    "Celu": {"alpha": (0.5, 2.0)},
    "Elu": {"alpha": (0.5, 2.0)},
    "HardSigmoid": {"alpha": (0.1, 0.5), "beta": (0.3,)},
    "LeakyRelu": {"alpha": (0.1, -0.5)},
    "Selu": {"alpha": (1.5,), "gamma": (1.2,)},
    "Shrink": {"lambd": (0.3,), "bias": (0.2,)},
    "ThresholdedRelu": {"alpha": (0.5,)},
}


def _unary(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op))
    attributes = {key: d.rng.choice(values) for key, values in _ATTRIBUTES.get(op, {}).items() if d.maybe()}
    if op == "Gelu" and d.maybe():
        d.emit(op, [x], approximate="tanh")
    else:
        d.emit(op, [x], **attributes)


def _binary(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op))
    y = d.beside(x)
    if (op in ("Div", "Mod") and not x.is_float) or op == "BitShift":
        y = _safe_divisor(d, x) if op != "BitShift" else _shift(d, x)
    elif d.maybe(0.3) and op != "PRelu":
        x, y = y, x
    attributes: dict[str, object] = {}
    if op == "Mod" and (x.is_float or d.maybe(0.3)):
        attributes["fmod"] = 1
    if op == "BitShift":
        attributes["direction"] = d.rng.choice(("LEFT", "RIGHT"))
    if op == "PRelu":
        y = d.pick((x.dtype,), fits=lambda v: _broadcasts_to(v.shape, x.shape), shape=lambda: d.broadcastable(x.shape))
    d.emit(op, [x, y], **attributes)


def _broadcasts_to(shape: Shape, target: Shape) -> bool:
    try:
        return np.broadcast_shapes(shape, target) == target
    except ValueError:
        return False


def _safe_divisor(d: Drawing, x: Value) -> Value:
    y = d.leaf(x.dtype, d.broadcastable(x.shape))
    data = np.where(y.own == 0, np.asarray(3, y.own.dtype), y.own)
    if data.dtype.kind == "i":
        data = np.where(data == -1, np.asarray(-2, data.dtype), data)
    return _with_data(y, data)


def _shift(d: Drawing, x: Value) -> Value:
    y = d.leaf(x.dtype, d.broadcastable(x.shape))
    data = (np.abs(y.own.astype(np.int64)) % (8 * x.own.dtype.itemsize)).astype(x.own.dtype)
    return _with_data(y, data)


def _with_data(y: Value, data: Array) -> Value:
    """The leaf `y` with other data."""
    assert y.leaf is not None
    return leaf(y.name, data, y.leaf)


def _pow(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op))
    if x.is_float and d.maybe(0.6):
        d.emit(op, [x, d.constant(d.rng.choice((2, 3, 0.5, 1, -1, 0, 1.5, 4)), x.dtype)])
        return
    kinds = sorted({*FLOATS, *INTEGERS} & d.types) if x.is_float else sorted({*INTEGERS} & d.types)
    exponents = np.random.default_rng(d.rng.getrandbits(30)).integers(0, 4, d.broadcastable(x.shape))
    d.emit(op, [x, d.constant(exponents, d.rng.choice(kinds))])


def _variadic(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op))
    others = [d.beside(x) for _ in range(d.rng.randint(0, 2))]
    d.emit(op, [x, *others])


def _where(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op, 1))
    d.emit(op, [d.beside(x, "bool"), x, d.beside(x)])


def _clip(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op))
    unsigned = x.dtype.startswith("uint")
    low = d.constant(d.rng.choice((0, 1, 2) if unsigned else (-3, -1, 0)), x.dtype) if d.maybe(0.7) else None
    high = d.constant(d.rng.choice((3, 6)), x.dtype) if d.maybe(0.7) else None
    d.emit(op, [x, low, high][: 3 if high else 2 if low else 1])


def _cast(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op))
    target = d.rng.choice(sorted(d.types - {x.dtype}))
    d.emit(op, [x], to=helper.np_dtype_to_tensor_dtype(DTYPES[target]))


def _axes(d: Drawing, rank: int, least: int = 0) -> list[int]:
    axes = d.rng.sample(range(rank), d.rng.randint(min(least, rank), rank))
    return [axis - rank if d.maybe(0.3) else axis for axis in axes]


def _axis(d: Drawing, rank: int) -> int:
    return d.rng.randrange(-rank, rank)


def _reduce(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op))
    axes = _axes(d, x.own.ndim)
    inputs = [x, d.constant(axes)] if axes or d.maybe() else [x]
    d.emit(op, inputs, keepdims=d.rng.choice((None, 0, 1)), noop_with_empty_axes=d.rng.choice((None, None, 1)))


def _arg(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (1, 5))
    last = d.rng.choice((None, 1))
    d.emit(op, [x], axis=_axis(d, x.own.ndim), keepdims=d.rng.choice((None, 0)), select_last_index=last)


def _softmax(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (1, 5))
    d.emit(op, [x], axis=d.rng.choice((None, _axis(d, x.own.ndim))))


def _layer_normalization(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (1, 4))
    axis = _axis(d, x.own.ndim)
    shape = x.shape[axis:]
    operands = [x, d.leaf(x.dtype, shape)]
    if op == "LayerNormalization" and d.maybe():
        operands.append(d.leaf(x.dtype, shape))
    outputs = 3 if op == "LayerNormalization" and d.maybe(0.2) else 1
    d.emit(op, operands, outputs, axis=axis, epsilon=d.rng.choice((None, 1e-2)))


def _batch_normalization(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (2, 4))
    parameters = [d.leaf(x.dtype, (x.shape[1],), "constant" if d.maybe(0.8) else "input") for _ in range(3)]
    spread = d.constant(np.random.default_rng(d.rng.getrandbits(30)).uniform(0.5, 2, x.shape[1]), x.dtype)
    if d.maybe(0.2):
        d.emit(op, [x, *parameters, spread], 3, training_mode=1, momentum=d.rng.choice((None, 0.5)))
    else:
        d.emit(op, [x, *parameters, spread], epsilon=d.rng.choice((None, 1e-2)))


def _instance_normalization(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (3, 4))
    parameters = [d.leaf(x.dtype, (x.shape[1],), "constant") for _ in range(2)]
    if op == "GroupNormalization":
        groups = d.rng.choice([n for n in range(1, x.shape[1] + 1) if x.shape[1] % n == 0] or [1])
        d.emit(op, [x, *parameters], num_groups=groups)
    else:
        d.emit(op, [x, *parameters])


def _lp_normalization(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (1, 4))
    d.emit(op, [x], axis=_axis(d, x.own.ndim), p=d.rng.choice((1, 2)))


def _matmul(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (1, 4))
    columns = d.rng.choice(d.sizes)
    inner = x.shape[-1]

    def shape() -> Shape:
        choice = d.rng.random()
        if choice < 0.15:
            return (inner,)
        batch = x.shape[:-2] if choice < 0.5 else tuple(1 if d.maybe(0.3) else size for size in x.shape[:-2])
        return (*(batch if d.maybe() else ()), inner, columns)

    def fits(v: Value) -> bool:
        return v.own.ndim >= 1 and v.shape[-min(2, v.own.ndim)] == inner

    d.emit(op, [x, d.pick((x.dtype,), (1, 4), fits, shape, fresh=0.6)])


def _attention(d: Drawing, op: str) -> None:
    """Attention: queries, keys and values in any layout, changes of scores, softmax, and the product; each step is a node."""
    kind = d.rng.choice(d.types_of(op))
    sizes = [size for size in d.sizes if size]
    batch = tuple(d.rng.choice(sizes) for _ in range(d.rng.choice((0, 1, 2, 2))))
    rows, keys, depth, columns = (d.rng.choice([*sizes, 1, 19, 70]) for _ in range(4))
    if np.prod(batch) * rows * keys > 20000:
        raise RejectedNodeError("too large")
    queries, values = _matrices(d, kind, batch, rows, depth), _matrices(d, kind, batch, keys, columns)
    turned = _matrices(d, kind, batch, keys, depth)
    perm = [*range(len(batch)), len(batch) + 1, len(batch)]
    turned = d.emit("Transpose", [turned], perm=perm)[0] if d.maybe(0.8) else _matrices(d, kind, batch, depth, keys)
    if d.maybe(0.4):
        queries = d.emit("Mul", [queries, d.constant(0.5, kind)])[0]
    scores = d.emit("MatMul", [queries, turned])[0]
    for step in d.rng.sample(("Mul", "Div", "Add", "Where", "Tanh"), d.rng.randint(0, 3)):
        if step == "Tanh":
            scores = d.emit(step, [scores])[0]
        elif step == "Where":
            mask = d.leaf("bool", tuple(1 if d.maybe(0.3) else size for size in scores.shape))
            scores = d.emit(step, [mask, scores, d.constant(d.rng.choice((-np.inf, -65504.0, 0.0)), kind)])[0]
        else:
            shape = () if step == "Div" else tuple(1 if d.maybe(0.4) else size for size in scores.shape)
            scores = d.emit(step, [scores, d.constant(2.0, kind) if step == "Div" else d.leaf(kind, shape)])[0]
    answer = d.emit("MatMul", [d.emit(op, [scores], axis=-1)[0], values])[0]
    if len(batch) > 1 and d.maybe(0.7):
        d.emit("Transpose", [answer], perm=[0, 2, 1, 3])


def _matrices(d: Drawing, kind: str, batch: Shape, rows: int, columns: int) -> Value:
    """Run-time data of shape (*batch, rows, columns), brought to this shape in one of the ways that models use."""
    shape = (*batch, rows, columns)
    way = d.rng.choice(("plain", "turned", "repeated", "part"))
    if way == "turned":
        perm = d.rng.sample(range(len(shape)), len(shape))
        given = d.leaf(kind, tuple(shape[perm.index(axis)] for axis in range(len(shape))), "input")
        return d.emit("Transpose", [given], perm=perm)[0]
    if way == "repeated" and batch:
        return d.emit("Expand", [d.leaf(kind, (1, *shape[1:]), "input"), d.constant(shape)])[0]
    if way == "part":
        axis = d.rng.randrange(len(shape))
        given = d.leaf(kind, tuple(size + 3 * (at == axis) for at, size in enumerate(shape)), "input")
        first = d.rng.randint(0, 3)
        return d.emit("Slice", [given, d.constant([first]), d.constant([first + shape[axis]]), d.constant([axis])])[0]
    return d.leaf(kind, shape, "input")


def _is_moderate(x: Value) -> bool:
    """Whether it has elements, and ONNX Runtime converts all of them to integers as ONNX says."""
    return x.own.size > 0 and bool(np.all(np.abs(x.own.astype(np.float64)) < 1e6))


def _linear(d: Drawing, op: str) -> None:
    """QuantizeLinear of float32, DequantizeLinear; scales at run time or constant, for the tensor, an axis, or blocks."""
    kinds = ["float32"] if op == "QuantizeLinear" else [kind for kind in d.types_of(op) if kind in INTEGERS]
    if not kinds or (kinds == ["float32"] and "float32" not in d.types):
        raise RejectedNodeError("no such type")
    x = d.pick(kinds, (1, 4), _is_moderate)
    axis = d.rng.randrange(x.own.ndim)
    counts: Shape = ()
    attributes: dict[str, object] = {}
    if d.maybe(0.6):
        counts, attributes = (x.shape[axis],), {"axis": axis}
        if d.opset >= 21 and d.maybe(0.4):
            block = d.rng.choice((1, 2, 3, 4, 16))
            counts = tuple(-(-n // block) if a == axis else n for a, n in enumerate(x.shape))
            attributes["block_size"] = block
    random = np.random.default_rng(d.rng.getrandbits(30))
    scale = leaf(d.name("s"), (random.random(counts) + 0.05).astype(np.float32), d.rng.choice(("input", "constant")))
    target = d.rng.choice(("int8", "uint8")) if op == "QuantizeLinear" else x.dtype
    zero = d.leaf(target, counts) if target != "int32" and (d.maybe() or target == "int8") else None
    d.emit(op, [x, scale, zero] if zero is not None else [x, scale], **attributes)


def _dynamic_quantize(d: Drawing, op: str) -> None:
    d.emit(op, [d.pick(d.types_of(op), (1, 4), _is_moderate)], 3)


def _matmul_integer(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (2, 4), lambda v: v.own.size > 0)
    columns = d.rng.choice([size for size in d.sizes if size])
    y = d.leaf(d.rng.choice(("int8", "uint8")), (x.shape[-1], columns))
    zeros = [d.leaf(x.dtype, ()) if d.maybe() else None, d.leaf(y.dtype, d.rng.choice(((), (columns,)))) if d.maybe() else None]
    d.emit(op, [x, y, *zeros])


def _conv_integer(d: Drawing, op: str) -> None:
    x = _image(d, op)
    channels = x.shape[1]
    group = d.rng.choice([n for n in (1, 1, 2, channels) if n and channels % n == 0] or [1])
    attributes = _window(d, x.shape[2:])
    filters = d.rng.choice((1, 2, 3, 5)) * group
    shape = (filters, channels // group, *attributes["kernel_shape"])  # type: ignore[misc]
    weight = d.leaf(d.rng.choice(("int8", "uint8")), shape, "constant")
    d.emit(op, [x, weight, d.leaf(x.dtype, ()) if d.maybe() else None], group=group if group > 1 else None, **attributes)


def _gemm(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (2, 2))
    transposed, turned = d.maybe(), d.maybe()
    inner, rows = (x.shape[0], x.shape[1]) if transposed else (x.shape[1], x.shape[0])
    columns = d.rng.choice(d.sizes)
    operands = [x, d.leaf(x.dtype, (columns, inner) if turned else (inner, columns))]
    if d.maybe(0.7):
        operands.append(d.leaf(x.dtype, d.rng.choice(((columns,), (rows, columns), (1, columns), (rows, 1), ()))))
    scale = (None, 0.5, 2.0) if x.is_float else (None,)  # ONNX Runtime scales integers as floats
    d.emit(op, operands, transA=int(transposed), transB=int(turned), alpha=d.rng.choice(scale), beta=d.rng.choice(scale))


def _einsum(d: Drawing, op: str) -> None:
    kinds = [kind for kind in d.types_of(op) if kind in (*FLOATS, "int32", "int64", "uint32", "uint64")]  # as for MatMul
    if not kinds:
        raise RejectedNodeError("no such type")
    x = d.pick(kinds, (1, 4), lambda value: value.own.size > 0)
    sizes: dict[str, int] = {}

    def term(shape: Shape) -> str:
        """Labels for a shape; sometimes an earlier label of the same size."""
        labels = ""
        for size in shape:
            known = [label for label, other in sizes.items() if other == size and (label not in labels or d.maybe(0.15))]
            label = d.rng.choice(known) if known and d.maybe(0.7) else "abcdEFGHijklmnop"[len(sizes)]
            sizes[label] = size
            labels += label
        return labels

    operands, terms = [x], [term(x.shape)]
    for _ in range(d.rng.choice((0, 1, 1, 1, 2))):
        shape = tuple(d.rng.choice((*x.shape, d.rng.choice(d.sizes))) for _ in range(d.rng.randint(1, 3)))
        operands.append(d.leaf(x.dtype, shape))
        terms.append(term(shape))
    if np.prod(list(sizes.values()), dtype=np.float64) > 2e5:
        raise RejectedNodeError("too much to compute")
    output = "".join(d.rng.sample(sorted(sizes), d.rng.randint(0, len(sizes))))
    d.emit(op, operands, equation=",".join(terms) + (f"->{output}" if d.maybe(0.8) else ""))


def _recurrent(d: Drawing, op: str) -> None:
    """Default activations only: the reference evaluator supports no others."""

    def fits(v: Value) -> bool:
        return max(v.shape[:2]) <= 8 and v.own.size > 0

    x = d.pick(d.types_of(op), (3, 3), fits, lambda: tuple(d.rng.randint(1, 5) for _ in range(3)))
    direction = d.rng.choice((None, "reverse", "bidirectional"))
    layout = d.rng.choice((None, None, 1))
    ways, gates, hidden = 1 + (direction == "bidirectional"), {"LSTM": 4, "GRU": 3, "RNN": 1}[op], d.rng.choice((1, 3, 4, 6))
    batch = x.shape[0] if layout else x.shape[1]
    state = (batch, ways, hidden) if layout else (ways, batch, hidden)
    shapes: list[Shape | None] = [(ways, gates * hidden, x.shape[2]), (ways, gates * hidden, hidden)]
    shapes += [(ways, 2 * gates * hidden) if d.maybe(0.7) else None, None, state if d.maybe() else None]
    if op == "LSTM":
        shapes += [state if d.maybe() else None, (ways, 3 * hidden) if d.maybe(0.3) else None]
    operands = [x, *(None if shape is None else d.leaf(x.dtype, shape) for shape in shapes)]
    after = d.rng.choice((None, 1)) if op == "GRU" else None
    count = d.rng.randint(1, 3 if op == "LSTM" else 2)
    d.emit(op, operands, count, hidden_size=hidden, direction=direction, layout=layout, linear_before_reset=after)


def _window(d: Drawing, sizes: Shape, *, ceil: bool = False, dilated: bool = True) -> dict[str, object]:
    """Attributes of a sliding window over `sizes`."""
    rank = len(sizes)
    kernel = [d.rng.randint(1, max(1, min(size, 4))) for size in sizes]
    attributes: dict[str, object] = {"kernel_shape": kernel}
    if d.maybe(0.6):
        attributes["strides"] = [d.rng.randint(1, 3) for _ in range(rank)]
    if dilated and d.maybe(0.25):
        attributes["dilations"] = [d.rng.randint(1, 2) for _ in range(rank)]
    choice = d.rng.random()
    if choice < 0.4:
        attributes["pads"] = [d.rng.randint(0, size // 2 + (size == 3)) for size in kernel * 2]
    elif choice < 0.6:
        attributes["auto_pad"] = d.rng.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))
    if ceil and choice < 0.5 and d.maybe(0.4):
        attributes["ceil_mode"] = 1
    return attributes


def _image(d: Drawing, op: str) -> Value:
    def fits(v: Value) -> bool:
        return v.own.size <= 1500

    return d.pick(d.types_of(op), (3, 5), fits, lambda: _image_shape(d))


def _image_shape(d: Drawing) -> Shape:
    sizes = [size for size in d.sizes if size <= 17] or [5]
    spatial = (
        [d.rng.choice((*sizes, 5, 6)) for _ in range(d.rng.choice((1, 2, 2)))]
        if d.maybe(0.8)
        else d.rng.choices((2, 3, 5), k=3)
    )
    return (d.rng.choice((1, 1, 2)), d.rng.choice((1, 2, 3, 4, 8)), *spatial)


def _conv(d: Drawing, op: str) -> None:
    x = _image(d, op)
    channels = x.shape[1]
    group = d.rng.choice([n for n in (1, 1, 1, 2, 4, channels) if n and channels % n == 0] or [1])
    attributes = _window(d, x.shape[2:])
    kernel = tuple(attributes.pop("kernel_shape")) if d.maybe(0.3) else tuple(attributes["kernel_shape"])  # type: ignore[arg-type]
    per_group = d.rng.choice((1, 2, 3, 4))
    if op == "Conv":
        weight: Shape = (per_group * group, channels // group, *kernel)
    else:
        weight = (channels, per_group, *kernel)
        strides = attributes.get("strides", [1] * len(kernel))
        if "auto_pad" in attributes and any(s > k for s, k in zip(strides, kernel, strict=True)):  # type: ignore[call-overload]
            raise RejectedNodeError("SAME would need negative pads")
        if d.maybe(0.2) and "auto_pad" not in attributes:
            attributes["output_padding"] = [d.rng.randint(0, stride - 1) for stride in strides]  # type: ignore[attr-defined]
    kind = None if d.maybe(0.1) else "constant"
    operands = [x, d.leaf(x.dtype, weight, kind)]  # type: ignore[arg-type]
    if d.maybe():
        operands.append(d.leaf(x.dtype, (per_group * group,), kind))  # type: ignore[arg-type]
    d.emit(op, operands, group=group if group > 1 else None, **attributes)


def _pool(d: Drawing, op: str) -> None:
    x = _image(d, op)
    attributes = _window(d, x.shape[2:], ceil=op != "LpPool")
    if op == "AveragePool":
        attributes["count_include_pad"] = d.rng.choice((0, 1))
    if op == "LpPool":
        attributes["p"] = d.rng.choice((1, 2, 3))
    if op == "MaxPool" and d.maybe(0.3):
        d.emit(op, [x], 2, storage_order=d.rng.choice((None, 1)), **attributes)
    else:
        d.emit(op, [x], **attributes)


def _global_pool(d: Drawing, op: str) -> None:
    d.emit(op, [d.pick(d.types_of(op), (3, 5))])


def _window_of_channels(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (4, 4))
    d.emit(op, [x], size=d.rng.choice((1, 3, 5)), alpha=d.rng.choice((None, 0.3)), beta=d.rng.choice((None, 0.5)))


def _grid_sample(d: Drawing, op: str) -> None:
    def fits(v: Value) -> bool:
        return 0 < v.own.size <= 300

    x = d.pick(
        ("float32",), (4, 5), fits, lambda: (d.rng.choice((1, 2)), d.rng.choice((1, 3)), *d.rng.choices((1, 2, 3, 5), k=2))
    )
    rank = x.own.ndim - 2
    shape = (x.shape[0], *d.rng.choices((1, 2, 4), k=rank), rank)
    places = np.random.default_rng(d.rng.getrandbits(30)).uniform(-1.5, 1.5, shape).astype(np.float32)
    modes = ("linear", "nearest", "cubic") if rank == 2 else ("linear", "nearest")
    mode, padding = d.rng.choice(modes), d.rng.choice(("zeros", "border", "reflection"))
    if (mode, padding) == ("cubic", "border"):
        raise RejectedNodeError("the reference evaluator clamps places, not taps")
    d.emit(op, [x, leaf(d.name("x"), places, "input")], mode=mode, padding_mode=padding, align_corners=d.rng.choice((0, 1)))


def _transform(d: Drawing, op: str) -> None:
    def fits(v: Value) -> bool:
        return v.shape[-1] in (1, 2) and 0 < v.own.size <= 600

    x = d.pick(
        ("float32",), (3, 4), fits, lambda: (2, *d.rng.choices((1, 2, 5, 8), k=d.rng.choice((1, 2))), d.rng.choice((1, 2)))
    )
    axis = d.constant(d.rng.randrange(1, x.own.ndim - 1))
    attributes = {"onesided": 1} if x.shape[-1] == 1 and d.maybe() else {"inverse": 1} if x.shape[-1] == 2 and d.maybe() else {}
    d.emit(op, [x, d.constant(d.rng.choice((3, 8))) if d.maybe(0.3) else None, axis], **attributes)


def _determinant(d: Drawing, op: str) -> None:
    size = d.rng.choice((1, 2, 3, 5))
    d.emit(op, [d.leaf("float32", (*d.shape(0, 2), size, size))])


def _resize(d: Drawing, op: str) -> None:
    def fits(v: Value) -> bool:
        return 0 < v.own.size <= 128

    x = d.pick(d.types_of(op), (2, 4), fits, lambda: (1, d.rng.choice((1, 2, 3)), *(d.rng.randint(1, 6) for _ in range(2))))
    rank = x.own.ndim
    changed = [axis >= rank - 2 or d.maybe(0.05) for axis in range(rank)]
    mode = d.rng.choice(("nearest", "linear", "cubic")) if x.is_float else "nearest"
    coordinates = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "half_pixel_symmetric")
    attributes: dict[str, object] = {"mode": mode, "coordinate_transformation_mode": d.rng.choice((None, *coordinates))}
    if mode == "nearest":
        attributes["nearest_mode"] = d.rng.choice((None, "floor", "ceil", "round_prefer_ceil", "round_prefer_floor"))
    if mode == "cubic":
        attributes["cubic_coeff_a"] = d.rng.choice((None, -0.5))
        attributes["exclude_outside"] = d.rng.choice((None, 1))
    if mode != "nearest" and d.maybe(0.1):
        attributes["antialias"] = 1
    if d.maybe():
        scales = [d.rng.choice((0.5, 0.6, 0.75, 1.0, 1.5, 2.0, 2.3, 3.0)) if c else 1.0 for c in changed]
        if any(int(np.floor(n * s)) < 1 for n, s in zip(x.shape, scales, strict=True)):
            raise RejectedNodeError("empty")
        d.emit(op, [x, None, d.constant(scales, "float32")], **attributes)
    else:
        sizes = [d.rng.randint(1, 2 * n + 1) if c else n for n, c in zip(x.shape, changed, strict=True)]
        d.emit(op, [x, None, None, d.constant(sizes)], **attributes)


def _pad(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (1, 4))
    mode = d.rng.choice(("constant", "constant", "edge", "reflect", "wrap"))
    limits = x.shape if mode != "constant" else [max(n, 4) for n in x.shape]
    rank = x.own.ndim
    pads = [0] * (2 * rank)
    for axis in range(rank):
        if d.maybe(0.6) and x.shape[axis]:
            pads[axis], pads[axis + rank] = (d.rng.randint(-min(1, x.shape[axis] - 1), min(3, limits[axis] - 1)) for _ in "lr")
    if any(n + a + b < 0 for n, a, b in zip(x.shape, pads, pads[rank:], strict=False)):
        raise RejectedNodeError("negative size")
    operands: list[Value | None] = [x, d.constant(pads)]
    if mode == "constant" and d.maybe():
        operands.append(d.constant(d.rng.choice((0, 1, 7)), x.dtype))
    d.emit(op, operands, mode=mode)


def _slice(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (1, 5))
    axes = d.rng.sample(range(x.own.ndim), d.rng.randint(1, x.own.ndim))
    starts, ends, steps = [], [], []
    for axis in axes:
        size = x.shape[axis]
        far = d.rng.choice((0, 0, 3, 2**31, 2**62))
        starts.append(d.rng.randint(-size - far, size + far))
        ends.append(d.rng.randint(-size - far, size + far))
        steps.append(d.rng.choice((1, 1, 2, 3, -1, -2)))
        if d.maybe(0.7) and (starts[-1] % max(size, 1) < ends[-1] % max(size, 1)) != (steps[-1] > 0):
            starts[-1], ends[-1] = ends[-1], starts[-1]
    operands = [x, d.constant(starts), d.constant(ends), d.constant([a - x.own.ndim if d.maybe(0.3) else a for a in axes])]
    if any(step != 1 for step in steps) or d.maybe(0.3):
        operands.append(d.constant(steps))
    d.emit(op, operands)


def _gather(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (1, 4))
    axis = _axis(d, x.own.ndim)
    size = x.shape[axis]
    if size == 0:
        raise RejectedNodeError("empty")
    random_ = np.random.default_rng(d.rng.getrandbits(30))
    shape = d.rng.choice(((), (1,), (3,), (2, 3), (5,)))
    if op == "GatherElements":
        shape = tuple(size if a == axis % x.own.ndim else n for a, n in enumerate(x.shape))
    data = random_.integers(-size, size, shape)
    indices = d.constant(data, "int32" if "int32" in d.types else "int64")
    if d.maybe():
        indices = leaf(d.name("x"), indices.own, "input")
    d.emit(op, [x, indices], axis=axis)


def _indices(d: Drawing, sizes: Shape, shape: Shape, *, distinct: bool = False) -> Value:
    """Indices of `shape` into dimensions of `sizes`, one each along the last axis if there are several; some negative."""
    random_ = np.random.default_rng(d.rng.getrandbits(30))
    count, total = int(np.prod(shape)), int(np.prod(sizes))
    if not total:
        raise RejectedNodeError("empty")
    flat = random_.permutation(total)[:count] if distinct and count <= total else random_.integers(0, total, count)
    found = np.stack(np.unravel_index(flat, sizes), -1).reshape(*shape, len(sizes))
    data = np.where(random_.random(found.shape) < 0.3, found - np.array(sizes), found)
    made = d.constant(data)
    return leaf(d.name("x"), made.own, "input") if d.maybe() else made


def _gather_nd(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (1, 5))
    batch = d.rng.randint(0, max(0, x.own.ndim - 2)) if d.maybe(0.4) else 0
    parts = d.rng.randint(1, x.own.ndim - batch)
    indices = _indices(d, x.shape[batch : batch + parts], (*x.shape[:batch], *d.rng.choice(((), (3,), (2, 2)))))
    d.emit(op, [x, indices], batch_dims=batch or None)


def _scatter(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (1, 4))
    reduction = d.rng.choice((None, None, *(("add", "mul", "max", "min") if x.dtype != "bool" else ())))
    if op == "ScatterND":
        parts = d.rng.randint(1, x.own.ndim)
        shape: Shape = d.rng.choice(((), (3,), (2, 2), (5,)))
        indices = _indices(d, x.shape[:parts], shape, distinct=reduction is None or d.maybe())
        if reduction is None and int(np.prod(shape)) > int(np.prod(x.shape[:parts])):
            raise RejectedNodeError("indices repeat")
        d.emit(op, [x, indices, d.leaf(x.dtype, (*shape, *x.shape[parts:]))], reduction=reduction)
        return
    axis = _axis(d, x.own.ndim)
    size = x.shape[axis]
    if not x.own.size:
        raise RejectedNodeError("empty")
    length = d.rng.randint(1, size if reduction is None else size + 2)
    shape = tuple(length if a == axis % x.own.ndim else d.rng.randint(1, n) for a, n in enumerate(x.shape))
    random_ = np.random.default_rng(d.rng.getrandbits(30))
    if reduction is None:
        lines = [random_.permutation(size)[:length] for _ in range(int(np.prod(shape)) // length)]
        data = np.moveaxis(np.reshape(lines, (*shape[: axis % x.own.ndim], *shape[axis % x.own.ndim + 1 :], length)), -1, axis)
    else:
        data = random_.integers(-size, size, shape)
    indices = d.constant(data)
    if d.maybe():
        indices = leaf(d.name("x"), indices.own, "input")
    d.emit(op, [x, indices, d.leaf(x.dtype, shape)], axis=axis, reduction=reduction)


def _top(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (1, 4))
    axis = _axis(d, x.own.ndim)
    k = d.constant([d.rng.randint(1, max(1, x.shape[axis]))])
    d.emit(op, [x, k], outputs=2, axis=axis, largest=d.rng.choice((None, 0)))


def _one_hot(d: Drawing, op: str) -> None:
    random_ = np.random.default_rng(d.rng.getrandbits(30))
    shape = d.shape(0, 3)
    indices = leaf(d.name("x"), random_.integers(-5, 5, shape), "input")
    values = d.leaf(d.rng.choice(d.types_of(op, 2)), (2,))
    d.emit(op, [indices, d.constant(d.rng.randint(1, 4)), values], axis=d.rng.randint(-len(shape) - 1, len(shape)))


def _eye(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (2, 2))
    d.emit(op, [x], k=d.rng.choice((None, -1, 1, 3)))


def _reverse(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (2, 4))
    if not x.own.size:
        raise RejectedNodeError("empty")
    time = d.rng.choice((0, 1))
    random_ = np.random.default_rng(d.rng.getrandbits(30))
    lengths = leaf(d.name("x"), random_.integers(1, x.shape[time] + 1, x.shape[1 - time]), d.rng.choice(("input", "constant")))
    d.emit(op, [x, lengths], time_axis=time, batch_axis=1 - time)


def _concat(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (1, 4))
    axis = _axis(d, x.own.ndim)

    def like() -> Shape:
        return tuple(d.rng.choice(d.sizes) if a == axis % x.own.ndim else n for a, n in enumerate(x.shape))

    def fits(v: Value) -> bool:
        return all(a == axis % x.own.ndim or n == v.shape[a] for a, n in enumerate(x.shape))

    others = [d.pick((x.dtype,), (x.own.ndim,) * 2, fits, like) for _ in range(d.rng.randint(0, 2))]
    operands = [x, *others]
    d.rng.shuffle(operands)
    d.emit(op, operands, axis=axis)


def _split(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (1, 4))
    axis = _axis(d, x.own.ndim)
    size = x.shape[axis]
    parts = d.rng.randint(1, 3)
    if d.maybe():
        if -(-size // parts) * (parts - 1) >= size:
            raise RejectedNodeError("an empty last part")
        d.emit(op, [x], parts, axis=axis, num_outputs=parts)
        return
    cuts = sorted(d.rng.randint(0, size) for _ in range(parts - 1))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    d.emit(op, [x, d.constant(sizes)], parts, axis=axis)


def _transpose(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (1, 5))
    order = list(range(x.own.ndim))
    d.rng.shuffle(order)
    d.emit(op, [x], perm=order if d.maybe(0.8) else None)


def _reshape(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op))
    sizes = list(x.shape)
    for _ in range(d.rng.randint(0, 3)):
        place = d.rng.randint(0, len(sizes))
        if len(sizes) > 1 and place < len(sizes) - 1 and d.maybe(0.6):
            sizes[place : place + 2] = [sizes[place] * sizes[place + 1]]
        elif len(sizes) < 5:
            even = place < len(sizes) and sizes[place] % 2 == 0 and sizes[place] > 0
            sizes[place : place + even] = [2, sizes[place] // 2] if even else [1]
    if sizes and x.own.size and d.maybe(0.4):
        sizes[d.rng.randrange(len(sizes))] = -1
    if x.own.size == 0:
        d.emit(op, [x, d.constant(sizes)], allowzero=1)
    else:
        d.emit(op, [x, d.constant(np.array(sizes, np.int64))])


def _expand(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (0, 4), lambda v: v.own.size <= 600)
    sizes = [d.rng.choice((1, 2, 3, 5)) if n == 1 and d.maybe() else d.rng.choice((1, n)) for n in x.shape]
    sizes = [d.rng.choice((1, 2, 3)) for _ in range(d.rng.randint(0, 1))] + sizes
    d.emit(op, [x, d.constant(np.array(sizes, np.int64))])


def _tile(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (1, 4), lambda v: v.own.size <= 600)
    d.emit(op, [x, d.constant([d.rng.choice((1, 1, 2, 3)) for _ in x.shape])])


def _squeeze(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (1, 5), lambda v: 1 in v.shape, lambda: (1, *d.shape(0, 3)))
    ones = [axis for axis, size in enumerate(x.shape) if size == 1]
    axes = d.rng.sample(ones, d.rng.randint(1, len(ones)))
    d.emit(op, [x] if d.maybe(0.2) else [x, d.constant([a - x.own.ndim if d.maybe(0.3) else a for a in axes])])


def _unsqueeze(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (0, 3))
    rank = x.own.ndim + d.rng.randint(1, 2)
    axes = d.rng.sample(range(rank), rank - x.own.ndim)
    d.emit(op, [x, d.constant([a - rank if d.maybe(0.3) else a for a in axes])])


def _flatten(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op))
    d.emit(op, [x], axis=d.rng.randint(-x.own.ndim, x.own.ndim))


def _blocks(d: Drawing, op: str) -> None:
    block = 2
    n, c, h, w = d.rng.choice((1, 2)), d.rng.choice((1, 2, 3)), d.rng.choice((1, 2, 3)), d.rng.choice((1, 2, 4))
    shape = (n, c * block**2, h, w) if op == "DepthToSpace" else (n, c, h * block, w * block)
    x = d.leaf(d.rng.choice(d.types_of(op)), shape, "input")
    mode = {"mode": d.rng.choice(("DCR", "CRD"))} if op == "DepthToSpace" else {}
    d.emit(op, [x], blocksize=block, **mode)


def _cumulative(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (1, 4))
    axis = d.constant(_axis(d, x.own.ndim))
    d.emit(op, [x, axis], exclusive=d.rng.choice((None, 1)), reverse=d.rng.choice((None, 1)))


def _triangle(d: Drawing, op: str) -> None:
    x = d.pick(d.types_of(op), (2, 4))
    operands = [x, d.constant(d.rng.randint(-3, 3))] if d.maybe() else [x]
    d.emit(op, operands, upper=d.rng.choice((0, 1)))


def _describe(d: Drawing, op: str) -> None:
    d.emit(op, [d.pick(d.types_of(op))])


FAMILIES: tuple[Family, ...] = (
    (
        7.0,
        _unary,
        (
            *("Abs", "Neg", "Ceil", "Floor", "Round", "Exp", "Log", "Sqrt", "Sin", "Cos", "Tanh", "Sigmoid", "Erf", "Relu"),
            *("LeakyRelu", "Elu", "Selu", "HardSigmoid", "HardSwish", "Softplus", "Softsign", "Gelu", "Mish", "Sign", "Not"),
            *("Reciprocal", "Identity", "IsNaN", "IsInf", "Celu", "ThresholdedRelu", "Shrink", "BitwiseNot", "Tan", "Asin"),
            *("Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh"),
        ),
    ),
    (
        8.0,
        _binary,
        (
            *("Add", "Sub", "Mul", "Div", "Mod", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or"),
            *("Xor", "PRelu", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor"),
        ),
    ),
    (0.5, _pow, ("Pow",)),
    (1.0, _variadic, ("Max", "Min", "Sum", "Mean")),
    (1.0, _where, ("Where",)),
    (0.7, _clip, ("Clip",)),
    (2.0, _cast, ("Cast",)),
    (
        2.0,
        _reduce,
        tuple(
            f"Reduce{kind}" for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
        ),
    ),
    (0.4, _arg, ("ArgMax", "ArgMin")),
    (1.0, _softmax, ("Softmax", "LogSoftmax", "Hardmax")),
    (0.8, _layer_normalization, ("LayerNormalization", "RMSNormalization")),
    (0.3, _batch_normalization, ("BatchNormalization",)),
    (0.5, _instance_normalization, ("InstanceNormalization", "GroupNormalization")),
    (0.2, _lp_normalization, ("LpNormalization",)),
    (1.5, _matmul, ("MatMul",)),
    (0.8, _attention, ("Softmax",)),
    (0.8, packed, ("MatMul",)),
    (0.6, windows, ("LayerNormalization",)),
    (0.8, turned, ("Neg",)),
    (1.0, _gemm, ("Gemm",)),
    (1.0, _einsum, ("Einsum",)),
    (0.5, _recurrent, ("GRU", "LSTM", "RNN")),
    (1.0, _linear, ("QuantizeLinear", "DequantizeLinear", "DequantizeLinear")),
    (0.3, _dynamic_quantize, ("DynamicQuantizeLinear",)),
    (0.8, _matmul_integer, ("MatMulInteger",)),
    (0.5, _conv_integer, ("ConvInteger",)),
    (2.0, _conv, ("Conv", "Conv", "ConvTranspose")),
    (1.2, _pool, ("MaxPool", "AveragePool", "LpPool")),
    (0.4, _global_pool, ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")),
    (0.3, _window_of_channels, ("LRN",)),
    (0.4, _grid_sample, ("GridSample",)),
    (0.3, _transform, ("DFT",)),
    (0.1, _determinant, ("Det",)),
    (0.8, _resize, ("Resize",)),
    (1.2, _pad, ("Pad",)),
    (1.2, _slice, ("Slice",)),
    (1.2, _gather, ("Gather", "Gather", "GatherElements")),
    (0.4, _gather_nd, ("GatherND",)),
    (1.0, _scatter, ("ScatterElements", "ScatterND")),
    (0.4, _top, ("TopK",)),
    (0.3, _one_hot, ("OneHot",)),
    (0.1, _eye, ("EyeLike",)),
    (0.2, _reverse, ("ReverseSequence",)),
    (1.2, _concat, ("Concat",)),
    (0.8, _split, ("Split",)),
    (1.2, _transpose, ("Transpose",)),
    (1.0, _reshape, ("Reshape",)),
    (0.8, _expand, ("Expand",)),
    (0.6, _tile, ("Tile",)),
    (0.6, _squeeze, ("Squeeze",)),
    (0.6, _unsqueeze, ("Unsqueeze",)),
    (0.3, _flatten, ("Flatten",)),
    (0.3, _blocks, ("DepthToSpace", "SpaceToDepth")),
    (0.3, _cumulative, ("CumSum",)),
    (0.2, _triangle, ("Trilu",)),
    (0.2, _describe, ("Shape", "Size")),
)
"""(weight, how a node is drawn, operators of the family)."""
