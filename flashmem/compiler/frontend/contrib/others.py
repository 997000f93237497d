"""Expansion of operators that ONNX has adopted since, and of Fourier transforms."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from flashmem.compiler.frontend.contrib.expansion import Expand, Expansion, RefusedError

_LONGEST = 4096


def _trilu(e: Expansion) -> list[ir.Value]:
    """Trilu as a Where with a constant mask."""
    x = e.input(0)
    shape = e.shape(e.input(0))
    diagonal = 0
    if (k := e.optional(1)) is not None:
        known = e.known(k)
        if known is None or known.size != 1:
            raise RefusedError("whose diagonal is computed at run time")
        diagonal = int(known.reshape(-1)[0])
    if len(shape) < 2:
        raise RefusedError(f"of a tensor of {len(shape)} dimensions")
    diagonal = max(-shape[-2], min(diagonal, shape[-1]))
    upper = bool(e.integer("upper", 1))
    kept = np.tri(shape[-2], shape[-1], diagonal - upper, np.bool_) ^ upper
    return [e.op("Where", e.constant(kept, dtype=np.bool_), x, e.constant(0, x))]


def _grid_sample(e: Expansion) -> list[ir.Value]:
    mode = e.text("mode", "bilinear")
    if e.opset >= 20:
        mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    return [e.op("GridSample", e.input(0), e.input(1), mode=mode, **e.keep("align_corners", "padding_mode"))]


def _gather_nd(e: Expansion) -> list[ir.Value]:
    return [e.op("GatherND", e.input(0), e.input(1))]


def _expand_dims(e: Expansion) -> list[ir.Value]:
    known = e.known(e.input(1))
    shape = list(e.shape(e.input(0)))
    if known is None or known.size != 1:
        raise RefusedError("whose axis is computed at run time")
    axis = int(known.reshape(-1)[0])
    if not -len(shape) - 1 <= axis <= len(shape):
        raise RefusedError(f"along axis {axis} of a tensor of {len(shape)} dimensions")
    shape.insert(axis if axis >= 0 else axis + len(shape) + 1, 1)
    return [e.reshape(e.input(0), *shape)]


def _rfft(e: Expansion) -> list[ir.Value]:
    """The Fourier transform of real rows as a product: [..., n] -> [..., n / 2 + 1, 2]."""
    x = e.input(0)
    shape = e.shape(e.input(0))
    size = _signal(e, shape[-1] if shape else 0)
    angles = 2 * np.pi / size * (np.outer(np.arange(size), np.arange(size // 2 + 1)) % size)
    table = np.stack([np.cos(angles), -np.sin(angles)], -1).reshape(size, -1)
    return [e.reshape(e.op("MatMul", x, e.constant(table, x)), *shape[:-1], size // 2 + 1, 2)]


def _irfft(e: Expansion) -> list[ir.Value]:
    """The inverse of Rfft as a product: [..., n / 2 + 1, 2] -> [..., n]."""
    x = e.input(0)
    shape = e.shape(e.input(0))
    if len(shape) < 2 or shape[-1] != 2:
        raise RefusedError(f"of a tensor of shape {shape}")
    size = _signal(e, 2 * (shape[-2] - 1))
    angles = 2 * np.pi / size * (np.outer(np.arange(size // 2 + 1), np.arange(size)) % size)
    weight = np.full((size // 2 + 1, 1), 2 / size)
    weight[[0, -1]] = 1 / size  # all others also count for their conjugates
    table = np.stack([weight * np.cos(angles), -weight * np.sin(angles)], 1).reshape(-1, size)
    return [e.op("MatMul", e.reshape(x, *shape[:-2], 2 * shape[-2]), e.constant(table, x))]


def _signal(e: Expansion, size: int) -> int:
    if e.integer("signal_ndim", 1) != 1 or e.integer("normalized", 0) or not e.integer("onesided", 1):
        raise RefusedError("other than of one dimension, one-sided and not normalized")
    if size < 2 or size % 2 or size > _LONGEST:
        raise RefusedError(f"of {size} samples (an even number of at most {_LONGEST} is)")
    return size


EXPANSIONS: dict[str, Expand] = {
    "ExpandDims": _expand_dims,
    "GatherND": _gather_nd,
    "GridSample": _grid_sample,
    "Irfft": _irfft,
    "Rfft": _rfft,
    "Trilu": _trilu,
}
"""Expansions by operator name."""
