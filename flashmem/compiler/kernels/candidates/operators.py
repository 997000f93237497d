"""Candidates: the largest elements of each row, and the sum of the row's exponentials; the choice of a token needs no more.

Input 0 is x [..., depth]; input 1 has the temperatures T > 0, each of equally many rows, one after the other. With k, the
attribute `k`, the output is int32 [..., 2 k + 1]: the positions of the k largest elements, the largest first, and of equal ones
the first; their values, as the bits of floats; and, as such bits, the sum of exp((v - the largest) / T) over all elements v of
the row. The sum is NaN if an element is NaN or infinite upwards, and 0 if all are infinite downwards. Its relative error is at
most `flashmem.bundle.language.SUM_ERROR`.

Only the frontend of language models produces it (`compiler.frontend.language.candidates`).
"""

from __future__ import annotations

from flashmem.compiler.operators.registry import FLOAT, Operator, fp32_inputs, register

register(
    __name__,
    Operator("Candidates", (FLOAT,), kernel="candidates", keep_fp32=fp32_inputs(1), onnx=False),
)
