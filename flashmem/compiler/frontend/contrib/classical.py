"""Expansion of operators of domain ai.onnx.ml, which skl2onnx writes around a network; the specification is ONNX's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from flashmem.compiler.frontend.contrib.expansion import Expand, Expansion, RefusedError

_FLOATS = ("float32", "float64", "int32", "int64")  # the types of inputs that Scaler has


def _scaler(e: Expansion) -> Sequence[ir.Value | None]:
    """(x - offset) * scale, with one offset and one scale or as many as the last dimension, in float32."""
    x = e.input(0)
    columns = e.ranked(0, 1, 2)[-1]
    if e.dtype(x).name not in _FLOATS:
        raise RefusedError(f"of {e.dtype(x)}")
    value = e.cast(x, ir.DataType.FLOAT)
    for op, name in (("Sub", "offset"), ("Mul", "scale")):
        numbers = e.numbers(name)
        if len(numbers) not in (1, columns):
            raise RefusedError(f"with {len(numbers)} numbers as {name} for {columns} columns")
        value = e.op(op, value, e.constant(numbers, dtype=np.float32))
    return [value]


EXPANSIONS: dict[str, Expand] = {"Scaler": _scaler}
"""Expansions by operator name."""
