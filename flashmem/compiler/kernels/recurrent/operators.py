"""LSTM, GRU and RNN: one MatMul for the inputs of all steps, then one kernel that runs the steps.

After the rewrites a node runs one direction. Its inputs are `INPUTS`, without those that do not apply. Its one output contains
the results of the steps, [steps, batch, hidden] or (with `layout` 1) [batch, steps, hidden]. With `finals`, the last hidden
state and the last cell follow. Attributes: `steps`, `batch`, `hidden`, `reverse`, `activations` (name, alpha, beta), `clip` or
None, `input_forget`, `linear_before_reset`, `layout`, `finals`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.types import DType
from flashmem.compiler.ir.builder import Rewriter, derived
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.operators.registry import FLOAT, Types, all_fp32, each, register
from flashmem.compiler.operators.rewriting import reshaped

INPUTS = ("projected", "recurrence", "candidate", "lengths", "hidden", "cell", "peepholes", "bias")
"""Inputs of a rewritten node, in order.

They are projected inputs [rows, gates * hidden] with all biases that can be added in advance; recurrent weights [gates *
hidden, hidden]; a GRU's separate candidate weights, if it resets before them; steps of each sequence; first states; peepholes
[3 * hidden]; a GRU's recurrent bias of the candidate [hidden], if it resets after.
"""

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}

_FUNCTIONS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}

ACTIVATIONS: dict[str, tuple[float | None, float | None]] = {
    "affine": (1.0, 0.0), "elu": (1.0, None), "hardsigmoid": (0.2, 0.5), "leakyrelu": (0.01, None), "relu": (None, None),
    "scaledtanh": (1.0, 1.0), "sigmoid": (None, None), "softplus": (None, None), "softsign": (None, None), "tanh": (None, None),
    "thresholdedrelu": (1.0, None),
}  # fmt: skip
"""Activation functions, by lower-case name, with the defaults of alpha and beta; None without a default."""

_INT32: Types = frozenset({"int32"})


def _directions(node: Node) -> list[bool]:
    """For each direction, whether it runs from the last step to the first."""
    return {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[node.attributes.get("direction", "forward")]


def _activations(node: Node) -> list[tuple[str, float, float]]:
    """Name, alpha and beta of the functions of all directions; functions with parameters consume the given numbers in order."""
    names = node.attributes.get("activations") or _FUNCTIONS[node.op] * len(_directions(node))
    given = [list(node.attributes.get(key) or ()) for key in ("activation_alpha", "activation_beta")]
    chosen = []
    for name in names:
        numbers = [
            0.0 if default is None else float(left.pop(0)) if left else default
            for default, left in zip(ACTIVATIONS[name.lower()], given, strict=True)
        ]
        chosen.append((name.lower(), numbers[0], numbers[1]))
    return chosen


def _sizes(node: Node) -> tuple[int, int, int]:
    """Steps, batch and hidden size."""
    first, second, _ = node.input(0).shape
    steps, batch = (second, first) if node.attributes.get("layout", 0) else (first, second)
    return steps, batch, node.input(2).shape[-1]


def _piece(
    rewriter: Rewriter, value: Value, name: str, axis: int, at: int, part: tuple[int, int] | None, shape: Sequence[int]
) -> Value:
    """The part of `value` at index `at` of dimension `axis`, there the rows `part` of the next dimension, in `shape`."""
    if value.constant is not None:

        def take(array: NDArray[Any]) -> NDArray[Any]:
            chosen: NDArray[Any] = array[(slice(None),) * axis + (at,)]
            return (chosen if part is None else chosen[slice(*part)]).reshape(shape)

        return derived(value, name, shape, take)
    starts = [0] * len(value.shape)
    sizes = list(value.shape)
    starts[axis] = at
    sizes[axis] = 1
    if part is not None:
        starts[axis + 1] = part[0]
        sizes[axis + 1] = part[1] - part[0]
    if tuple(sizes) != value.shape:
        steps = (1,) * len(sizes)
        value = rewriter.emit("Slice", [value], sizes, value.dtype, f"{name}.slice", starts=tuple(starts), steps=steps)
    return reshaped(rewriter, value, tuple(shape))


def _rewrite_recurrent(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite a recurrent node: one node for each direction, and the nodes that join their results."""
    steps, batch, hidden = _sizes(node)
    directions = _directions(node)
    layout = int(node.attributes.get("layout", 0))
    wanted = [value if value.name else None for value in node.outputs] + [None] * (3 - len(node.outputs))
    finals = wanted[1] is not None or wanted[2] is not None
    made = steps * batch * hidden
    state = batch * hidden
    states = state * (2 if node.op == "LSTM" else 1) if finals else 0
    results = [_direction(rewriter, node, index, reverse, finals, (made + states,)) for index, reverse in enumerate(directions)]
    axes = ((2, 1, 1) if layout else (1, 0, 0), (batch, steps, 1, hidden) if layout else (steps, 1, batch, hidden))
    one = (batch, 1, hidden) if layout else (1, batch, hidden)
    for output, start, size, axis, shape in zip(
        wanted, (0, made, made + state), (made, state, state), axes[0], (axes[1], one, one), strict=True
    ):
        if output is None:
            continue
        parts = []
        for result in results:
            if result.shape != (size,):
                result = rewriter.emit(
                    "Slice", [result], (size,), "float32", f"{output.name}.part", starts=(start,), steps=(1,)
                )
            parts.append(reshaped(rewriter, result, shape))
        if len(parts) > 1:
            rewriter.add("Concat", parts, output, f"{node.name}.join", axis=axis)
        else:
            rewriter.add("Reshape", parts, output)


def _direction(rewriter: Rewriter, node: Node, index: int, reverse: bool, finals: bool, shape: tuple[int, ...]) -> Value:
    """Append the node of direction `index`."""
    op = node.op
    name = f"{node.name}.{index}"
    steps, batch, hidden = _sizes(node)
    x = node.input(0)
    w = node.input(1)
    r = node.input(2)
    b = node.optional(3)
    lengths = node.optional(4)
    first_h = node.optional(5)
    first_c, peepholes = (node.optional(6), node.optional(7)) if op == "LSTM" else (None, None)
    rows = GATES[op] * hidden
    gates = GATES[op]
    layout = int(node.attributes.get("layout", 0))
    after = bool(node.attributes.get("linear_before_reset", 0))

    def piece(value: Value, suffix: str, part: tuple[int, int] | None, shape: Sequence[int], axis: int = 0) -> Value:
        return _piece(rewriter, value, f"{value.name}.{index}{suffix}", axis, index, part, shape)

    flat = reshaped(rewriter, x, (steps * batch, x.shape[2]))
    weights = piece(w, "", None, (rows, x.shape[2]))
    transposed = int(weights.constant is not None)
    if not transposed:
        weights = rewriter.emit("Transpose", [weights], (x.shape[2], rows), "float32", f"{name}.w", perm=(1, 0))
    projected = rewriter.emit("MatMul", [flat, weights], (steps * batch, rows), "float32", f"{name}.in", transposed=transposed)
    late = None
    if b is not None:
        ahead = (gates - 1) * hidden if op == "GRU" and after else rows
        late = piece(b, ".late", (2 * rows - hidden, 2 * rows), (hidden,)) if ahead < rows else None
        if b.constant is not None:
            biases = [
                derived(
                    b, f"{b.name}.{index}", (rows,), lambda a: a[index, :rows] + _widened(a[index, rows : rows + ahead], rows)
                )
            ]
        else:
            recurrent = piece(b, ".r", (rows, rows + ahead), (ahead,))
            if ahead < rows:
                recurrent = rewriter.emit("Pad", [recurrent], (rows,), b.dtype, f"{name}.padded", before=(0,), value=0.0)
            biases = [piece(b, ".w", (0, rows), (rows,)), recurrent]
        for i, bias in enumerate(biases):
            projected = rewriter.emit("Add", [projected, bias], projected.shape, "float32", f"{name}.bias{i}")
    split = op == "GRU" and not after
    recurrence = piece(r, "", (0, 2 * hidden) if split else None, (2 * hidden if split else rows, hidden))
    candidate = piece(r, ".candidate", (2 * hidden, rows), (hidden, hidden)) if split else None
    axis = 1 if layout else 0
    starts = [None if each is None else piece(each, "", None, (batch, hidden), axis) for each in (first_h, first_c)]
    holes = None if peepholes is None else piece(peepholes, "", None, (3 * hidden,))
    functions = _activations(node)
    count = len(_FUNCTIONS[op])
    clip = node.attributes.get("clip")
    inputs = [projected, recurrence, candidate, lengths, *starts, holes, late]
    return rewriter.emit(
        op, inputs, shape, "float32", name, steps=steps, batch=batch, hidden=hidden, reverse=reverse,
        activations=tuple(functions[index * count : (index + 1) * count]), clip=None if clip is None else float(clip),
        input_forget=bool(node.attributes.get("input_forget", 0)), linear_before_reset=after, layout=layout, finals=finals,
    )  # fmt: skip


def _widened(bias: NDArray[Any], rows: int) -> NDArray[Any]:
    """`bias` padded with zeros."""
    return np.pad(bias, (0, rows - len(bias)))


def _check_recurrent(node: Node) -> str | None:
    direction = node.attributes.get("direction", "forward")
    if direction not in ("forward", "reverse", "bidirectional"):
        return f"{node.op} with direction {direction!r}"
    if node.attributes.get("layout", 0) not in (0, 1):
        return f"{node.op} with layout {node.attributes['layout']}"
    ranks = [len(node.input(index).shape) for index in range(3)]
    if ranks != [3, 3, 3]:
        return f"{node.op} with an input and weights of {ranks} dimensions, not 3 each"
    directions = len(_directions(node))
    _, batch, hidden = _sizes(node)
    rows = GATES[node.op] * hidden
    states = (batch, directions, hidden) if node.attributes.get("layout", 0) else (directions, batch, hidden)
    wanted: list[tuple[int, ...]] = [
        node.input(0).shape, (directions, rows, node.input(0).shape[2]), (directions, rows, hidden), (directions, 2 * rows),
        (batch,), states, states, (directions, 3 * hidden),
    ]  # fmt: skip
    for index, shape in enumerate(wanted[: 8 if node.op == "LSTM" else 6]):
        value = node.optional(index)
        if value is not None and value.shape != shape:
            return f"{node.op} with input {index} ({value.name}) of shape {value.shape}, not {shape}"
    if node.attributes.get("hidden_size", hidden) != hidden:
        return f"{node.op} with hidden_size {node.attributes['hidden_size']} and weights for {hidden}"
    names = node.attributes.get("activations") or ()
    if names and len(names) != len(_FUNCTIONS[node.op]) * directions:
        return f"{node.op} with {len(names)} activations over {directions} direction{'s' * (directions > 1)}"
    unknown = [name for name in names if name.lower() not in ACTIVATIONS]
    if unknown:
        return f"{node.op} with activation {unknown[0]!r} is not implemented"
    if float(node.attributes.get("clip", 1.0)) < 0:
        return f"{node.op} with clip {node.attributes['clip']}"
    return None


_TYPES: tuple[frozenset[DType], ...] = (FLOAT, FLOAT, FLOAT, FLOAT, _INT32, FLOAT, FLOAT, FLOAT)

register(
    __name__,
    *each(
        ("GRU", "LSTM", "RNN"), inputs=_TYPES, check=_check_recurrent, rewrite=_rewrite_recurrent, kernel="recurrent",
        keep_fp32=all_fp32, operator_class="reusable",
    ),
)  # fmt: skip
