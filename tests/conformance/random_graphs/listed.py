"""The operators that flashmem supports: the pool that graphs are drawn from."""

from __future__ import annotations

from flashmem.compiler.operators import is_native

_DEFINED = frozenset({"Celu", "HardSwish", "Mean", "RMSNormalization", "Shape", "Shrink", "Size", "ThresholdedRelu"})
"""Folded in compilation, or expanded by ONNX's own definition, and so without a declaration."""


def listed(op: str) -> bool:
    """Whether flashmem supports `op`."""
    return op in _DEFINED or is_native(op)
