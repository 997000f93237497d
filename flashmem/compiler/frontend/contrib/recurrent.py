"""Expansion of LSTM with quantised weights: each direction becomes an LSTM of ONNX whose weights are dequantised.

ONNX Runtime also rounds the inputs of each product to 8 bits, by their range at run time: x by that of all steps, a hidden
state by that of its step, and of the rows that one of its threads has, so its answers depend on the number of threads. On
processors without VNNI, sums of its products saturate. Here inputs and states stay floats: the answers are those of the
weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from flashmem.compiler.frontend.contrib.expansion import Expand, Expansion, RefusedError

_KEPT = ("clip", "hidden_size", "input_forget")
_FUNCTIONS = 3  # of each direction


def _weight(e: Expansion, index: int, scale: int, direction: int) -> ir.Value:
    """The weights of one direction, as ONNX has them: [1, gates, inputs]."""
    count, inputs, gates = e.ranked(index, 3)
    factor = e.input(scale)
    zero = e.optional(scale + 1)
    codes = e.reshape(_of(e, e.input(index), direction, count), inputs, gates)
    shape = e.shape(factor)
    if shape not in ((count,), (count, gates)):
        raise RefusedError(f"whose input {scale} has shape {shape}, not {(count, gates)}")
    e.expect(scale + 1, shape)
    sizes = shape[1:]
    given = [e.reshape(_of(e, value, direction, count), *sizes) for value in (factor, zero) if value is not None]
    dense = e.op("DequantizeLinear", codes, *given, **({"axis": 1} if sizes else {}))
    return e.op("Unsqueeze", e.transpose(dense, 1, 0), *_axes(e)[0], **_axes(e)[1])


def _axes(e: Expansion) -> tuple[list[ir.Value], dict[str, list[int]]]:
    """The first axis, as Unsqueeze has it in this operator set."""
    return ([e.integers(0)], {}) if e.opset >= 13 else ([], {"axes": [0]})


def _of(e: Expansion, value: ir.Value, direction: int, count: int) -> ir.Value:
    """The part of `value` for one of `count` directions."""
    return value if count == 1 else e.part(value, 0, direction, direction + 1)


def _lstm(e: Expansion) -> Sequence[ir.Value | None]:
    way = e.text("direction", "forward")
    ways = {"forward": ["forward"], "reverse": ["reverse"], "bidirectional": ["forward", "reverse"]}.get(way)
    if ways is None:
        raise RefusedError(f"with direction {way!r}")
    count = len(ways)
    if e.ranked(1, 3)[0] != count or e.ranked(2, 3)[0] != count:
        raise RefusedError(f"with direction {way!r} and weights of {e.shape(e.input(1))[0]} directions")
    kept = e.keep("activations", "activation_alpha", "activation_beta", *_KEPT)
    names = kept.pop("activations", None)
    if count == 2 and ("activation_alpha" in kept or "activation_beta" in kept):
        raise RefusedError("of two directions with parameters of activations")
    made = []
    for index, each in enumerate(ways):
        own = {} if names is None else {"activations": list(names)[index * _FUNCTIONS : (index + 1) * _FUNCTIONS]}
        weights = [_weight(e, 1, 8, index), _weight(e, 2, 10, index)]
        bias, peepholes = (None if e.optional(i) is None else _of(e, e.input(i), index, count) for i in (3, 7))
        starts = [None if e.optional(i) is None else _of(e, e.input(i), index, count) for i in (5, 6)]
        inputs = [e.input(0), *weights, bias, e.optional(4), *starts, peepholes]
        made.append(e.ops("LSTM", 3, *inputs, direction=each, **kept, **own))
    return [
        made[0][output] if count == 1 else e.op("Concat", *(each[output] for each in made), axis=axis)
        for output, axis in enumerate((1, 0, 0))
    ]


EXPANSIONS: dict[str, Expand] = {"DynamicQuantizeLSTM": _lstm}
"""Expansions by operator name."""
