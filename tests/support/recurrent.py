"""LSTM, GRU and RNN in numpy, in the type of their operands, by the equations of ONNX's specification."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

Array = NDArray[Any]
Activation = Callable[[Array], Array]

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
PARAMETERS = {
    "Affine": (1.0, 0.0), "Elu": (1.0,), "HardSigmoid": (0.2, 0.5), "LeakyRelu": (0.01,), "ScaledTanh": (1.0, 1.0),
    "ThresholdedRelu": (1.0,),
}  # fmt: skip
"""Default alpha, and beta, of the activation functions that have them."""


def sigmoid(x: Array) -> Array:
    return np.where(x < 0, np.exp(np.minimum(x, 0)), 1) / (1 + np.exp(-np.abs(x)))


FUNCTIONS: dict[str, Callable[..., Array]] = {
    "Affine": lambda x, alpha, beta: alpha * x + beta,
    "Elu": lambda x, alpha: np.where(x < 0, alpha * np.expm1(np.minimum(x, 0)), x),
    "HardSigmoid": lambda x, alpha, beta: np.clip(alpha * x + beta, 0, 1),
    "LeakyRelu": lambda x, alpha: np.where(x < 0, alpha * x, x),
    "Relu": lambda x: np.maximum(x, 0),
    "ScaledTanh": lambda x, alpha, beta: alpha * np.tanh(beta * x),
    "Sigmoid": sigmoid,
    "Softplus": lambda x: np.logaddexp(0, x),
    "Softsign": lambda x: x / (1 + np.abs(x)),
    "Tanh": np.tanh,
    "ThresholdedRelu": lambda x, alpha: np.where(x > alpha, x, 0),
}


def recurrent(node: onnx.NodeProto, *operands: Array | None) -> tuple[Array, ...]:
    """The outputs of a node: Y, the last states H, and C of an LSTM."""
    given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    x, w, r, b, lengths, h, c, p = (*operands, *[None] * (8 - len(operands)))
    assert x is not None and w is not None and r is not None
    if given.get("layout"):
        x, h, c = (None if each is None else each.swapaxes(0, 1) for each in (x, h, c))
        assert x is not None
    steps, batch, hidden = x.shape[0], x.shape[1], r.shape[2]
    until = np.full(batch, steps) if lengths is None else lengths
    way = given.get("direction", b"forward").decode()
    functions = _activations(node.op_type, given, len(w))
    made = []
    for d in range(len(w)):
        bias = np.zeros(2 * len(w[d]), x.dtype) if b is None else b[d]
        state = [np.zeros((batch, hidden), x.dtype) if each is None else each[d] for each in (h, c)]
        peepholes = np.zeros((3, hidden), x.dtype) if p is None else p[d].reshape(3, hidden)
        y = np.zeros((steps, batch, hidden), x.dtype)
        for n in range(batch):
            order = range(until[n])
            one = [each[n] for each in state]
            for t in reversed(order) if way == "reverse" or d == 1 else order:
                one = _step(node.op_type, given, functions[d], x[t, n], one, w[d], r[d], bias, peepholes)
                y[t, n] = one[0]
            for each, last in zip(state, one, strict=True):
                each[n] = last
        made.append((y, *state))
    y, last, cells = (np.stack([each[i] for each in made]) for i in range(3))
    y = y.swapaxes(0, 1)  # steps, directions, batch, hidden
    if given.get("layout"):
        y, last, cells = y.transpose(2, 0, 1, 3), last.swapaxes(0, 1), cells.swapaxes(0, 1)
    return (y, last, cells) if node.op_type == "LSTM" else (y, last)


def _activations(op: str, given: dict[str, Any], directions: int) -> list[list[Activation]]:
    """The functions of each direction. Each takes the next of the given parameters."""
    names = [name.decode() for name in given.get("activations", ())] or list(DEFAULTS[op]) * directions
    lists = [list(given.get(f"activation_{which}", ())) for which in ("alpha", "beta")]
    functions: list[Activation] = []
    for name in names:
        values = [each.pop(0) if each else default for each, default in zip(lists, PARAMETERS.get(name, ()), strict=False)]
        functions.append(lambda x, name=name, values=values: FUNCTIONS[name](x, *values))  # type: ignore[misc]
    each = len(DEFAULTS[op])
    return [functions[d * each : (d + 1) * each] for d in range(directions)]


def _step(
    op: str,
    given: dict[str, Any],
    functions: list[Activation],
    x: Array,
    state: list[Array],
    w: Array,
    r: Array,
    bias: Array,
    peepholes: Array,
) -> list[Array]:
    """The next h and c of one element of the batch."""
    h, c = state
    clip = given.get("clip", np.inf)
    wx = np.split(w @ x, GATES[op])
    rh = np.split(r @ h, GATES[op])
    wb, rb = (np.split(part, GATES[op]) for part in np.split(bias, 2))

    def clipped(each: Array) -> Array:
        return np.clip(each, -clip, clip)

    gates = [clipped(wx[i] + rh[i] + wb[i] + rb[i]) for i in range(GATES[op])]
    if op == "RNN":
        return [functions[0](gates[0]), c]
    if op == "GRU":
        z, reset = functions[0](gates[0]), functions[0](gates[1])
        if given.get("linear_before_reset"):
            inner = wx[2] + wb[2] + reset * (rh[2] + rb[2])
        else:
            inner = wx[2] + wb[2] + r[2 * len(h) :] @ (reset * h) + rb[2]
        return [(1 - z) * functions[1](clipped(inner)) + z * h, c]
    f, g, k = functions
    i = f(clipped(wx[0] + rh[0] + wb[0] + rb[0] + peepholes[0] * c))
    forget = 1 - i if given.get("input_forget") else f(clipped(wx[2] + rh[2] + wb[2] + rb[2] + peepholes[2] * c))
    c = forget * c + i * g(gates[3])
    o = f(clipped(wx[1] + rh[1] + wb[1] + rb[1] + peepholes[1] * c))
    return [o * k(c), c]
