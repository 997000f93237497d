"""Which operators flashmem lists: the pool that graphs are drawn from."""

from __future__ import annotations

from flashmem.graph.onnx_import import is_native

_DEFINED = {"Shape", "Size", "Mean", "HardSwish", "Celu", "ThresholdedRelu", "Shrink", "RMSNormalization"}
"""Folded when compiling, or written out in others by ONNX's own definition."""


def listed(op: str) -> bool:
    """Whether flashmem says that it runs `op`."""
    return op in _DEFINED or is_native(op)
