"""Operators in normal form: the ONNX operator set, with its variants over opsets, rewritten into fewer and simpler ones.

After this pass:

- `Reshape` stands for every change of shape that moves no data (Flatten, Squeeze, Unsqueeze, Identity).
- `MatMul` has attribute `transposed` (1 if the constant second operand is stored [N, K]); Gemm is MatMul, Mul and Add.
- `Conv` and `ConvTranspose` are 2D, without bias, with attributes `strides`, `dilations`, `pads` (top, left, bottom, right),
  `group`; `MaxPool` and `AveragePool` likewise with `kernel`.
- `Softmax`, `LogSoftmax`, `Normalize` (zero mean, unit variance) and `Reduce*` have attribute `axes`, a run of adjacent ones.
- `Slice` has `starts` and `steps` for every dimension; `Pad` has `before`; `Tile` has `repeats`.
- `Clip`, `Pow`, `Cast` carry their constants as attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flashmem.graph.builder import Rewriter, constant, derived
from flashmem.graph.ir import Graph, Node, Value
from flashmem.program import DeviceDType

Rule = Callable[[Rewriter, Node, int], None]


def normalize(graph: Graph) -> Graph:
    """`graph` in normal form."""
    rewriter = Rewriter()
    for node in graph.nodes:
        node = Node(node.op, node.name, [rewriter.now(v) for v in node.inputs], node.outputs, node.attributes)
        RULES.get(node.op, _keep)(rewriter, node, graph.opset)
    return rewriter.graph(graph)


def _keep(rewriter: Rewriter, node: Node, opset: int) -> None:
    node.outputs[0].producer = node
    rewriter.nodes.append(node)


def _ints(node: Node, index: int, attribute: str) -> list[int] | None:
    """Integers given by the constant input `index` (newer opsets) or by `attribute` (older ones)."""
    value = node.optional(index)
    if value is not None and value.constant is not None:
        return [int(i) for i in value.constant.array().reshape(-1)]
    given = node.attributes.get(attribute)
    return None if given is None else [int(i) for i in np.atleast_1d(given)]


def _axis(axis: int, rank: int) -> int:
    return axis + rank if axis < 0 else axis


def _reshape(rewriter: Rewriter, node: Node, opset: int) -> None:
    source, output = node.input(0), node.outputs[0]
    if source.constant is not None:
        rewriter.replaced[output] = derived(source, output.name, output.shape, lambda a: a.reshape(output.shape))
    else:
        rewriter.add("Reshape", [source], output, node.name)


def _transpose(rewriter: Rewriter, node: Node, opset: int) -> None:
    source, output = node.input(0), node.outputs[0]
    perm = tuple(node.attributes.get("perm") or reversed(range(len(source.shape))))
    if source.constant is not None:
        swapped = derived(source, output.name, output.shape, lambda a: a.transpose(perm))
        rewriter.replaced[output] = swapped
        if perm == (1, 0):
            rewriter.transposed[swapped] = source
    else:
        transpose(rewriter, source, perm, output)


def transpose(rewriter: Rewriter, source: Value, perm: Sequence[int], output: Value) -> Value:
    """`source` permuted; a Reshape where only dimensions of size 1 change places, which moves no data."""
    moving = [axis for axis in perm if source.shape[axis] != 1]
    if moving == sorted(moving):
        return rewriter.add("Reshape", [source], output)
    return rewriter.add("Transpose", [source], output, perm=tuple(perm))


def _gemm(rewriter: Rewriter, node: Node, opset: int) -> None:
    a, b, c = node.input(0), node.input(1), node.optional(2)
    alpha, beta = float(node.attributes.get("alpha", 1.0)), float(node.attributes.get("beta", 1.0))
    output, dtype = node.outputs[0], a.dtype
    if node.attributes.get("transA", 0):
        a = transpose(rewriter, a, (1, 0), Value(f"{node.name}.a", a.shape[::-1], dtype))
    transposed = int(node.attributes.get("transB", 0))
    if transposed and b.constant is None:
        b, transposed = transpose(rewriter, b, (1, 0), Value(f"{node.name}.b", b.shape[::-1], dtype)), 0
    steps: list[tuple[str, Value]] = []
    if alpha != 1.0:
        steps.append(("Mul", constant(f"{node.name}.alpha", np.array([alpha], np.float32))))
    if c is not None and beta != 0.0:
        if beta != 1.0 and c.constant is not None:
            c = derived(c, f"{c.name}.scaled", c.shape, lambda array: array * np.float32(beta))
        elif beta != 1.0:
            factor = constant(f"{node.name}.beta", np.array([beta], np.float32))
            c = rewriter.emit("Mul", [c, factor], c.shape, dtype, f"{node.name}.c")
        steps.append(("Add", c))
    _chain(rewriter, node, "MatMul", [a, b], output, steps, transposed=transposed)


def _chain(
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


def _matmul(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Vectors become matrices of one row or column; a constant second operand that was transposed is read as stored."""
    a, b, output = node.input(0), node.input(1), node.outputs[0]
    if len(a.shape) > 1 and len(b.shape) > 1:
        stored = rewriter.transposed.get(b)
        rewriter.add("MatMul", [a, stored or b], output, node.name, transposed=int(stored is not None))
        return
    shape = output.shape
    if len(b.shape) == 1:
        shape = (*shape, 1)
        b = _reshaped(rewriter, b, (b.shape[0], 1))
    if len(a.shape) == 1:
        shape = (*shape[:-1], 1, shape[-1])
        a = _reshaped(rewriter, a, (1, a.shape[0]))
    product = rewriter.emit("MatMul", [a, b], shape, output.dtype, node.name, transposed=0)
    rewriter.add("Reshape", [product], output)


def _reshaped(rewriter: Rewriter, value: Value, shape: tuple[int, ...]) -> Value:
    if value.shape == shape:
        return value
    if value.constant is not None:
        return derived(value, f"{value.name}.{len(shape)}d", shape, lambda a: a.reshape(shape))
    return rewriter.emit("Reshape", [value], shape, value.dtype, f"{value.name}.{'x'.join(map(str, shape))}")


def _spatial(node: Node, kernel: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Strides, dilations and pads of a 2D window; `auto_pad` resolved against the shapes."""
    rank = len(kernel)
    strides = tuple(int(i) for i in node.attributes.get("strides") or [1] * rank)
    dilations = tuple(int(i) for i in node.attributes.get("dilations") or [1] * rank)
    pads = [int(i) for i in node.attributes.get("pads") or [0] * (2 * rank)]
    auto = node.attributes.get("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        small, large = node.input(0).shape[2:], node.outputs[0].shape[2:]
        if node.op == "ConvTranspose":
            small, large = large, small
        for axis in range(rank):
            reach = dilations[axis] * (kernel[axis] - 1) + 1
            total = max(0, (large[axis] - 1) * strides[axis] + reach - small[axis])
            first = total // 2 if auto == "SAME_UPPER" else total - total // 2
            pads[axis], pads[axis + rank] = first, total - first
    elif node.op == "ConvTranspose" and node.attributes.get("output_shape"):
        extra = node.attributes.get("output_padding") or [0] * rank
        for axis in range(rank):
            reach = dilations[axis] * (kernel[axis] - 1) + 1
            size = (node.input(0).shape[axis + 2] - 1) * strides[axis] + reach + extra[axis]
            total = size - node.outputs[0].shape[axis + 2]
            first = total // 2 if auto == "SAME_UPPER" else total - total // 2
            pads[axis], pads[axis + rank] = first, total - first
    return {"strides": strides, "dilations": dilations, "pads": tuple(pads)}


def _lift(window: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """A 1D window as a 2D one over a single row."""
    (pad0, pad1), stride, dilation = window["pads"], window["strides"], window["dilations"]
    return {"strides": (1, *stride), "dilations": (1, *dilation), "pads": (0, pad0, 0, pad1)}


def _convolution(rewriter: Rewriter, node: Node, opset: int) -> None:
    x, w, bias, output = node.input(0), node.input(1), node.optional(2), node.outputs[0]
    window = _spatial(node, w.shape[2:])
    group = int(node.attributes.get("group", 1))
    result = output
    if len(x.shape) == 3:
        window = _lift(window)
        x = _reshaped(rewriter, x, (*x.shape[:2], 1, x.shape[2]))
        w = _reshaped(rewriter, w, (*w.shape[:2], 1, w.shape[2]))
        result = Value(f"{output.name}.2d", (*output.shape[:2], 1, output.shape[2]), output.dtype)
    steps = []
    if bias is not None:
        steps.append(("Add", _reshaped(rewriter, bias, (bias.shape[0], 1, 1))))
    _chain(rewriter, node, node.op, [x, w], result, steps, group=group, **window)
    if result is not output:
        rewriter.add("Reshape", [result], output)


def _pool(rewriter: Rewriter, node: Node, opset: int) -> None:
    x, output = node.input(0), node.outputs[0]
    kernel = tuple(int(i) for i in node.attributes["kernel_shape"])
    window = _spatial(node, kernel)
    result = output
    if len(x.shape) == 3:
        window, kernel = _lift(window), (1, *kernel)
        x = _reshaped(rewriter, x, (*x.shape[:2], 1, x.shape[2]))
        result = Value(f"{output.name}.2d", (*output.shape[:2], 1, output.shape[2]), output.dtype)
    count_pads = int(node.attributes.get("count_include_pad", 0))
    rewriter.add(node.op, [x], result, node.name, kernel=kernel, count_include_pad=count_pads, **window)
    if result is not output:
        rewriter.add("Reshape", [result], output)


def _global_pool(rewriter: Rewriter, node: Node, opset: int) -> None:
    op = "ReduceMean" if node.op == "GlobalAveragePool" else "ReduceMax"
    axes = tuple(range(2, len(node.input(0).shape)))
    rewriter.add(op, [node.input(0)], node.outputs[0], node.name, axes=axes)


def _batch_normalization(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Folded into one Mul and one Add per channel, which the producer's epilogue takes in."""
    arrays = []
    for i in range(1, 5):
        source = node.input(i).constant
        assert source is not None
        arrays.append(np.asarray(source.array(), np.float64))
    scale, bias, mean, variance = arrays
    factor = scale / np.sqrt(variance + float(node.attributes.get("epsilon", 1e-5)))
    shape = (-1, *[1] * (len(node.input(0).shape) - 2))
    steps = [
        ("Mul", constant(f"{node.name}.factor", factor.astype(np.float32).reshape(shape))),
        ("Add", constant(f"{node.name}.shift", (bias - mean * factor).astype(np.float32).reshape(shape))),
    ]
    _elementwise_chain(rewriter, node, node.input(0), steps)


def _elementwise_chain(rewriter: Rewriter, node: Node, value: Value, steps: Sequence[tuple[str, Value]]) -> None:
    output = node.outputs[0]
    for i, (op, operand) in enumerate(steps, start=1):
        result = output if i == len(steps) else Value(f"{output.name}.{i}", output.shape, output.dtype)
        value = rewriter.add(op, [value, operand], result, f"{node.name}.{op}")


def _layer_normalization(rewriter: Rewriter, node: Node, opset: int) -> None:
    x, scale, bias = node.input(0), node.input(1), node.optional(2)
    rank = len(x.shape)
    axes = tuple(range(_axis(int(node.attributes.get("axis", -1)), rank), rank))
    steps = [("Mul", scale), *([("Add", bias)] if bias is not None else [])]
    epsilon = float(node.attributes.get("epsilon", 1e-5))
    _chain(rewriter, node, "Normalize", [x], node.outputs[0], steps, axes=axes, epsilon=epsilon)


def _instance_normalization(rewriter: Rewriter, node: Node, opset: int) -> None:
    x, scale, bias = node.input(0), node.input(1), node.input(2)
    rank = len(x.shape)
    shape = (scale.shape[0], *[1] * (rank - 2))
    steps = [("Mul", _reshaped(rewriter, scale, shape)), ("Add", _reshaped(rewriter, bias, shape))]
    epsilon = float(node.attributes.get("epsilon", 1e-5))
    _chain(rewriter, node, "Normalize", [x], node.outputs[0], steps, axes=tuple(range(2, rank)), epsilon=epsilon)


def _group_normalization(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Groups of channels become rows; scale and bias stay per channel (per group before opset 21)."""
    x, scale, bias, output = node.input(0), node.input(1), node.input(2), node.outputs[0]
    groups = int(node.attributes["num_groups"])
    batch, channels = x.shape[:2]
    rows = _reshaped(rewriter, x, (batch * groups, x.size // (batch * groups)))
    epsilon = float(node.attributes.get("epsilon", 1e-5))
    normal = rewriter.emit("Normalize", [rows], rows.shape, x.dtype, f"{node.name}.rows", axes=(1,), epsilon=epsilon)
    normal = _reshaped(rewriter, normal, x.shape)
    shape = (channels, *[1] * (len(x.shape) - 2))
    steps = []
    for op, value in (("Mul", scale), ("Add", bias)):
        if value.shape[0] != channels:
            value = derived(value, f"{value.name}.channels", (channels,), lambda a: a.repeat(channels // groups))
        steps.append((op, _reshaped(rewriter, value, shape)))
    node = Node(node.op, node.name, [normal], [output], {})
    _elementwise_chain(rewriter, node, normal, steps)


def _softmax(rewriter: Rewriter, node: Node, opset: int) -> None:
    x, output = node.input(0), node.outputs[0]
    rank = len(x.shape)
    axis = _axis(int(node.attributes.get("axis", -1 if opset >= 13 else 1)), rank)
    # Before opset 13 everything from `axis` on is one dimension.
    axes = (axis,) if opset >= 13 else tuple(range(axis, rank))
    rewriter.add(node.op, [x], output, node.name, axes=axes)


def _reduce(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Reductions over axes that are not neighbours are done one run of axes after the other."""
    x, output = node.input(0), node.outputs[0]
    rank = len(x.shape)
    given = _ints(node, 1, "axes")
    if not given and node.attributes.get("noop_with_empty_axes", 0):
        rewriter.add("Identity", [x], output, node.name)
        return
    axes = sorted(_axis(a, rank) for a in given or range(rank))
    runs: list[list[int]] = []
    for axis in axes:
        if runs and runs[-1][-1] == axis - 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    inner, outer = _SPLIT_REDUCTION.get(node.op, (node.op, node.op))
    value = x
    for i, run in enumerate(runs):
        shape = tuple(1 if a in run else size for a, size in enumerate(value.shape))
        op = node.op if len(runs) == 1 else inner if i == 0 else outer
        value = rewriter.emit(op, [value], shape, x.dtype, f"{node.name}.{i}", axes=tuple(run))
    if len(runs) > 1 and node.op == "ReduceL2":
        value = rewriter.emit("Sqrt", [value], value.shape, x.dtype, f"{node.name}.root")
    rewriter.add("Reshape", [value], output)


_SPLIT_REDUCTION = {
    "ReduceL1": ("ReduceL1", "ReduceSum"),
    "ReduceL2": ("ReduceSumSquare", "ReduceSum"),
    "ReduceLogSum": ("ReduceSum", "ReduceLogSum"),
    "ReduceLogSumExp": ("ReduceLogSumExp", "ReduceLogSumExp"),
    "ReduceSumSquare": ("ReduceSumSquare", "ReduceSum"),
}


def _slice(rewriter: Rewriter, node: Node, opset: int) -> None:
    x, output = node.input(0), node.outputs[0]
    rank = len(x.shape)
    given, ends = _ints(node, 1, "starts") or [], _ints(node, 2, "ends") or []
    axes = _ints(node, 3, "axes") or list(range(len(given)))
    strides = _ints(node, 4, "steps") or [1] * len(given)
    starts, steps = [0] * rank, [1] * rank
    for axis, start, end, step in zip(axes, given, ends, strides, strict=True):
        axis = _axis(axis, rank)
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


def _split(rewriter: Rewriter, node: Node, opset: int) -> None:
    x = node.input(0)
    rank = len(x.shape)
    axis = _axis(int(node.attributes.get("axis", 0)), rank)
    start = 0
    for i, output in enumerate(node.outputs):
        starts = [start if a == axis else 0 for a in range(rank)]
        _sliced(rewriter, f"{node.name}.{i}", x, output, starts, [1] * rank)
        start += output.shape[axis]


def _pad(rewriter: Rewriter, node: Node, opset: int) -> None:
    x, output = node.input(0), node.outputs[0]
    rank = len(x.shape)
    pads = _ints(node, 1, "pads") or []
    axes = [_axis(a, rank) for a in _ints(node, 3, "axes") or range(rank)]
    before = [0] * rank
    for i, axis in enumerate(axes):
        before[axis] = pads[i]
    fill = node.optional(2)
    value = float(fill.constant.array().reshape(-1)[0]) if fill is not None and fill.constant else 0.0
    mode = node.attributes.get("mode", "constant")
    rewriter.add("Pad", [x], output, node.name, before=tuple(before), mode=mode, value=node.attributes.get("value", value))


def _clip(rewriter: Rewriter, node: Node, opset: int) -> None:
    bounds = [node.attributes.get("min", -np.inf), node.attributes.get("max", np.inf)]
    for i in (1, 2):
        value = node.optional(i)
        if value is not None and value.constant is not None:
            bounds[i - 1] = float(value.constant.array().reshape(-1)[0])
    if node.input(0).dtype == "int32":
        bounds = [float(np.clip(b, -(2**31) + 1, 2**31 - 1)) for b in bounds]
    rewriter.add("Clip", [node.input(0)], node.outputs[0], node.name, minimum=float(bounds[0]), maximum=float(bounds[1]))


def _pow(rewriter: Rewriter, node: Node, opset: int) -> None:
    base, exponent, output = node.input(0), node.input(1), node.outputs[0]
    if exponent.constant is not None and exponent.size == 1 and base.dtype == "float32" and base.shape == output.shape:
        value = float(exponent.constant.array().reshape(-1)[0])
        rewriter.add("Pow", [base], output, node.name, exponent=value)
    elif "int32" in (base.dtype, exponent.dtype):
        # OpenCL has no integer power; float is exact where the result fits its mantissa.
        operands = [_as_float(rewriter, value) for value in (base, exponent)]
        product = rewriter.emit("Pow", operands, output.shape, "float32", f"{node.name}.float")
        rewriter.add("Cast", [product], output, node.name)
    else:
        rewriter.add("Pow", [base, exponent], output, node.name)


def _as_float(rewriter: Rewriter, value: Value) -> Value:
    if value.dtype == "float32":
        return value
    return rewriter.emit("Cast", [value], value.shape, "float32", f"{value.name}.float")


def _cast(rewriter: Rewriter, node: Node, opset: int) -> None:
    x, output = node.input(0), node.outputs[0]
    to_bool = int(node.attributes["to"]) == 9  # onnx.TensorProto.BOOL
    if x.dtype == output.dtype and not to_bool:
        _reshape(rewriter, node, opset)
    else:
        rewriter.add("Cast", [x], output, node.name, to_bool=to_bool)


def _gather(rewriter: Rewriter, node: Node, opset: int) -> None:
    data, indices, output = node.input(0), node.input(1), node.outputs[0]
    rank = len(data.shape)
    axis = _axis(int(node.attributes.get("axis", 0)), rank)
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


def _tile(rewriter: Rewriter, node: Node, opset: int) -> None:
    repeats = tuple(_ints(node, 1, "repeats") or [])
    rewriter.add("Tile", [node.input(0)], node.outputs[0], node.name, repeats=repeats)


def _expand(rewriter: Rewriter, node: Node, opset: int) -> None:
    x, output = node.input(0), node.outputs[0]
    if x.shape == output.shape:
        rewriter.add("Reshape", [x], output, node.name)
    else:
        rewriter.add("Expand", [x], output, node.name)


def _concat(rewriter: Rewriter, node: Node, opset: int) -> None:
    axis = _axis(int(node.attributes["axis"]), len(node.outputs[0].shape))
    inputs = [v for v in node.inputs if v is not None and v.size]
    rewriter.add("Concat", inputs, node.outputs[0], node.name, axis=axis)


def _mean_of_inputs(rewriter: Rewriter, node: Node, opset: int) -> None:
    output = node.outputs[0]
    count = len(node.inputs)
    total = rewriter.emit("Sum", node.inputs, output.shape, output.dtype, f"{node.name}.sum")
    share: DeviceDType = "float32"
    assert output.dtype == share
    rewriter.add("Mul", [total, constant(f"{node.name}.share", np.array([1 / count], np.float32))], output, node.name)


def _resize(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Scales as ONNX defines them: given ones are kept (they need not equal the ratio of the sizes)."""
    x, output = node.input(0), node.outputs[0]
    attributes = dict(node.attributes)
    index = 1 if node.op == "Upsample" or opset < 11 else 2
    given = node.optional(index)
    scales = (
        [float(s) for s in given.constant.array().reshape(-1)] if given is not None and given.constant and given.size else None
    )
    if scales is not None and len(scales) != len(x.shape):
        axes = [_axis(int(a), len(x.shape)) for a in attributes.get("axes", ())]
        scales = [scales[axes.index(a)] if a in axes else 1.0 for a in range(len(x.shape))]
    if node.op == "Upsample" or opset < 11:
        attributes["coordinate_transformation_mode"] = "asymmetric"
        attributes["nearest_mode"] = "floor"
    attributes["scales"] = tuple(scales or (o / i for o, i in zip(output.shape, x.shape, strict=True)))
    rewriter.add("Resize", [x], output, node.name, **attributes)


RULES: dict[str, Rule] = {
    "AveragePool": _pool,
    "BatchNormalization": _batch_normalization,
    "Cast": _cast,
    "Clip": _clip,
    "Concat": _concat,
    "Conv": _convolution,
    "ConvTranspose": _convolution,
    "Expand": _expand,
    "Flatten": _reshape,
    "Gather": _gather,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_pool,
    "GlobalMaxPool": _global_pool,
    "GroupNormalization": _group_normalization,
    "Identity": _reshape,
    "InstanceNormalization": _instance_normalization,
    "LayerNormalization": _layer_normalization,
    "LogSoftmax": _softmax,
    "MatMul": _matmul,
    "MaxPool": _pool,
    "Mean": _mean_of_inputs,
    "Pad": _pad,
    "Pow": _pow,
    **{
        f"Reduce{kind}": _reduce
        for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
    },
    "Reshape": _reshape,
    "Resize": _resize,
    "Slice": _slice,
    "Softmax": _softmax,
    "Split": _split,
    "Squeeze": _reshape,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _reshape,
    "Upsample": _resize,
}
