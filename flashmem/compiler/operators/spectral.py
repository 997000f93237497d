"""Fourier transforms, as products with constant matrices: complex numbers are pairs in the last dimension.

After the rewrites `Frames` cuts a signal [batch, length, components] into frames that may overlap, [batch, frames, frame
length, components].
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from flashmem.compiler.ir.builder import DerivedConstant, Rewriter
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.operators.registry import FLOAT, INDEX, Operator, all_of, constant_inputs, register
from flashmem.compiler.operators.rewriting import bad_axis, constant_integers, from_front, reshaped, transpose

LARGEST_MATRIX = 1 << 26
"""The most elements of a transform's matrix: 256 MB, a complex transform of length 4096."""


def _matrix(
    count: int, length: int, components: int, bins: int, *, inverse: bool = False, window: NDArray[np.floating] | None = None
) -> NDArray[np.float32]:
    """The transform's matrix [count * components, bins * 2]: `count` numbers, padded to `length`, to `bins` results."""
    turns = np.outer(np.arange(count), np.arange(bins)) % length
    angles = 2 * np.pi / length * turns
    real = np.cos(angles)
    imaginary = np.sin(angles) if inverse else -np.sin(angles)
    rows = [np.stack([real, imaginary], -1), np.stack([-imaginary, real], -1)][:components]
    matrix = np.stack(rows, 1)  # [count, components, bins, 2]
    if inverse:
        matrix /= length
    if window is not None:
        matrix *= window[:, None, None, None]
    return matrix.reshape(count * components, bins * 2).astype(np.float32)


def _real_inverse(count: int, length: int, components: int) -> NDArray[np.float32]:
    """The matrix [count * components, length] from the first `count` numbers of a transform to its real signal of `length`."""
    angles = 2 * np.pi / length * (np.outer(np.arange(count), np.arange(length)) % length)
    share = np.where((np.arange(count) == 0) | (2 * np.arange(count) == length), 1.0, 2.0) / length
    matrix = np.stack([np.cos(angles), -np.sin(angles)][:components], 1) * share[:, None, None]
    return matrix.reshape(count * components, length).astype(np.float32)


def _weight(name: str, shape: tuple[int, int], compute: Callable[[], NDArray[np.float32]]) -> Value:
    """A constant matrix that is computed when it is packed."""
    return Value(name, shape, "float32", DerivedConstant(shape, np.dtype(np.float32), compute))


def _axis(node: Node, opset: int) -> int:
    """The transformed axis: an input since operator set 20, an attribute before."""
    given = constant_integers(node, 2, "axis")
    return from_front(given[0] if given else (-2 if opset >= 20 else 1), len(node.input(0).shape))


def _lengths(node: Node, axis: int) -> tuple[int, int]:
    """The length of the transform, and the number of its results."""
    onesided = bool(node.attributes.get("onesided", 0))
    inverse = bool(node.attributes.get("inverse", 0))
    size = node.input(0).shape[axis]
    given = constant_integers(node, 1, "dft_length")
    length = given[0] if given else 2 * (size - 1) if inverse and onesided else size
    return length, length // 2 + 1 if onesided and not inverse else length


def _rewrite_dft(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite DFT: move the transformed axis next to the components, then one product over both."""
    x = node.input(0)
    output = node.outputs[0]
    rank = len(x.shape)
    axis = _axis(node, opset)
    order = (*(a for a in range(rank - 1) if a != axis), axis, rank - 1)
    components = x.shape[-1]
    made = output.shape[-1]
    length, bins = _lengths(node, axis)
    inverse = bool(node.attributes.get("inverse", 0))
    if order != tuple(range(rank)):
        x = transpose(rewriter, x, order, Value(f"{node.name}.last", tuple(x.shape[a] for a in order), x.dtype))
    lead = x.shape[:-2]
    count = min(x.shape[-2], length if made == 2 else length // 2 + 1)
    if count < x.shape[-2]:  # a longer signal is cut
        first = {"starts": (0,) * rank, "steps": (1,) * rank}
        x = rewriter.emit("Slice", [x], (*lead, count, components), x.dtype, f"{node.name}.cut", **first)
    rows = reshaped(rewriter, x, (math.prod(lead), count * components))
    shape = (count * components, bins * made)
    if made == 1:
        weight = _weight(f"{node.name}.matrix", shape, lambda: _real_inverse(count, length, components))
    else:
        weight = _weight(f"{node.name}.matrix", shape, lambda: _matrix(count, length, components, bins, inverse=inverse))
    product = rewriter.emit("MatMul", [rows, weight], (rows.shape[0], shape[1]), x.dtype, node.name, transposed=0)
    result = reshaped(rewriter, product, (*lead, bins, made))
    back = tuple(order.index(a) for a in range(rank))
    transpose(rewriter, result, back, output)


def _check_dft(node: Node) -> str | None:
    shape = node.input(0).shape
    made = node.outputs[0].shape
    rank = len(shape)
    if rank < 2 or shape[-1] not in (1, 2):
        return f"DFT of shape {shape}, whose last dimension should hold real numbers (1) or complex ones (2)"
    given = constant_integers(node, 2, "axis")
    if given and (reason := bad_axis(node, given, rank)) is not None:
        return reason
    # Operator sets differ in the default axis; the output's shape determines it.
    axes = [from_front(given[0], rank)] if given else sorted({1, rank - 2})
    if rank - 1 in axes:
        return "DFT along the axis of the real and imaginary parts"
    real = node.attributes.get("onesided", 0) and node.attributes.get("inverse", 0)
    for axis in axes:
        length, bins = _lengths(node, axis)
        if length < 1:
            return f"DFT of length {length}"
        if shape[axis] * shape[-1] * bins * 2 > LARGEST_MATRIX:
            return f"DFT of length {length}, whose matrix has more than {LARGEST_MATRIX} elements, is not implemented"
        if made == (*shape[:axis], bins, *shape[axis + 1 : -1], 1 if real else 2):
            return None
    return f"DFT of shape {shape} gives {made}"


def _rewrite_stft(rewriter: Rewriter, node: Node, opset: int) -> None:
    """Rewrite STFT: frames, times the window if it is computed at run time, then one product."""
    signal = node.input(0)
    window = node.optional(2)
    output = node.outputs[0]
    step, length = _stft_numbers(node)
    if len(signal.shape) == 2:
        signal = reshaped(rewriter, signal, (*signal.shape, 1))
    batch, components, (frames, bins) = signal.shape[0], signal.shape[2], output.shape[1:3]
    cut = (batch, frames, length, components)
    value = rewriter.emit("Frames", [signal], cut, signal.dtype, f"{node.name}.frames", step=step)
    if window is not None and window.constant is None:
        factor = reshaped(rewriter, window, (length, 1))
        value = rewriter.emit("Mul", [value, factor], cut, signal.dtype, f"{node.name}.window")
        window = None
    source = None if window is None else window.constant

    def compute() -> NDArray[np.float32]:
        weights = None if source is None else np.asarray(source.array(), np.float64)
        return _matrix(length, length, components, bins, window=weights)

    weight = _weight(f"{node.name}.matrix", (length * components, bins * 2), compute)
    rows = reshaped(rewriter, value, (batch * frames, length * components))
    product = rewriter.emit("MatMul", [rows, weight], (batch * frames, bins * 2), signal.dtype, node.name, transposed=0)
    rewriter.add("Reshape", [product], output)


def _stft_numbers(node: Node) -> tuple[int, int]:
    """The step between frames, and their length; 0 if it is unknown."""
    step = constant_integers(node, 1, "frame_step")
    given = constant_integers(node, 3, "frame_length")
    window = node.optional(2)
    return (step or [0])[0], given[0] if given else 0 if window is None else window.size


def _check_stft(node: Node) -> str | None:
    shape = node.input(0).shape
    window = node.optional(2)
    step, length = _stft_numbers(node)
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[2] not in (1, 2)):
        return f"STFT of shape {shape}"
    if step < 1 or not 1 <= length <= shape[1]:
        return f"STFT of {shape[1]} elements in frames of {length} with a step of {step}"
    if window is not None and window.shape != (length,):
        return f"STFT in frames of {length} with a window of shape {window.shape} is not implemented"
    bins = length // 2 + 1 if node.attributes.get("onesided", 1) else length
    components = shape[2] if len(shape) == 3 else 1
    if length * components * bins * 2 > LARGEST_MATRIX:
        return f"STFT in frames of {length}, whose matrix has more than {LARGEST_MATRIX} elements, is not implemented"
    made = (shape[0], (shape[1] - length) // step + 1, bins, 2)
    return None if node.outputs[0].shape == made else f"STFT gives {made}, not {node.outputs[0].shape} as the model says"


register(
    __name__,
    Operator(
        "DFT", (FLOAT, INDEX, INDEX), check=all_of(constant_inputs(1, 2), _check_dft), rewrite=_rewrite_dft,
        operator_class="reusable",
    ),
    Operator("Frames", (FLOAT,), kernel="frames", onnx=False),
    Operator(
        "STFT", (FLOAT, INDEX, FLOAT, INDEX), check=all_of(constant_inputs(1, 3), _check_stft), rewrite=_rewrite_stft,
        operator_class="reusable",
    ),
)  # fmt: skip
