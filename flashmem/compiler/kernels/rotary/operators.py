"""Rotary: rotary position embedding of the rows of a tensor, in pairs of elements; only the matcher produces it.

Input 0 is x, [..., D]; inputs 1 and 2 are the tables of cosines and sines, which broadcast to the dimensions before the last.
Of each row, the first 2 * `half` elements rotate; the others are copied. Pair i is the elements i and i + half, or 2i and
2i + 1 if `interleaved`. A table has one number for each pair, or one for each element that rotates.
"""

from __future__ import annotations

from flashmem.compiler.operators.registry import FLOAT, Operator, fp32_inputs, register

register(
    __name__,
    Operator(
        "Rotary", (FLOAT,), kernel="rotary", in_place="input", keep_fp32=fp32_inputs(1, 2), onnx=False,
    ),
)  # fmt: skip
