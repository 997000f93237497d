"""ONNX to graph: import, validation, constant folding, control flow, ONNX Runtime's own operators.

Importing this package imports `onnx_ir` without `sympy`, which takes 0.3 s: only sums of symbolic dimensions need it.
"""

from flashmem.base.postponed import postponed

with postponed("sympy", "onnx_ir._symbolic_shapes"):
    import onnx_ir as onnx_ir
