"""Graph of a model: values, nodes and constants.

Node types and attributes are ONNX's. All shapes are static. Integers and booleans keep ONNX's element type; float16, bfloat16
and float64 are `float32` on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flashmem.base.types import DType, StatePrecision


class Constant(Protocol):
    """Constant data that stays on disk until it is read. Each `array()` maps or copies it again: hold the result briefly."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its element type in the file."""
        ...

    def array(self) -> NDArray[Any]:
        """Map or compute the data."""
        ...


@dataclass(frozen=True)
class ArrayConstant:
    """A small constant held in memory (folded shapes, scalars, biases computed by the compiler)."""

    data: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""
        return self.data.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its element type."""
        return self.data.dtype

    def array(self) -> NDArray[Any]:
        """The array in memory."""
        return self.data


@dataclass(frozen=True)
class FileConstant:
    """A constant in a file. Its array is a memory map, which is closed with the array."""

    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def array(self) -> NDArray[Any]:
        """Map the file's range into memory."""
        if 0 in self.shape:
            return np.zeros(self.shape, self.dtype)
        return np.asarray(np.memmap(self.path, self.dtype, "r", self.offset, self.shape))


@dataclass(frozen=True)
class NibbleConstant:
    """Integers of 4 bits in a file, two in a byte, the first in the low nibble. They are read as `dtype`, int8 or uint8."""

    packed: FileConstant
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def array(self) -> NDArray[Any]:
        """Read and unpack the data."""
        return unpack_nibbles(self.packed.array(), self.shape, self.dtype)


def unpack_nibbles(packed: NDArray[np.uint8], shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Unpack integers of 4 bits, low nibble first, to int8 (sign-extended) or uint8."""
    packed = packed.reshape(-1)
    both = np.empty(2 * packed.size, np.uint8)
    np.bitwise_and(packed, 15, out=both[::2])
    np.right_shift(packed, 4, out=both[1::2])
    both = both[: math.prod(shape)].reshape(shape)
    if dtype == np.uint8:
        return both
    both ^= 8
    signed = both.view(np.int8)
    signed -= 8
    return signed


def pack_nibbles(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Pack rows of integers of 4 bits, given as int8 or uint8, two in a byte, low nibble first; each row starts on a byte."""
    whole = np.pad(array.view(np.uint8), [(0, 0)] * (array.ndim - 1) + [(0, array.shape[-1] % 2)])
    packed: NDArray[np.uint8] = (whole[..., ::2] & np.uint8(15)) | (whole[..., 1::2] << np.uint8(4))
    return packed


@dataclass(frozen=True)
class Placeholder:
    """A weight whose shape alone is known: every element is `fill`, and only one is in memory."""

    shape: tuple[int, ...]
    fill: float
    dtype: np.dtype[Any]

    def array(self) -> NDArray[Any]:
        """The one element, broadcast to the whole array."""
        return np.broadcast_to(np.asarray(self.fill, self.dtype), self.shape)


@dataclass(eq=False)
class Value:
    """A tensor of the graph. `constant` is set for weights. Values are compared by identity, not by name."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    constant: Constant | None = None
    producer: Node | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(eq=False)
class Node:
    """An operator. `inputs` has None for an omitted optional input."""

    op: str
    name: str
    inputs: list[Value | None]
    outputs: list[Value]
    attributes: dict[str, Any] = field(default_factory=dict)

    def input(self, index: int) -> Value:
        """The input at `index`, which must exist."""
        value = self.inputs[index]
        assert value is not None, f"{self.op} {self.name} lacks input {index}"
        return value

    def optional(self, index: int) -> Value | None:
        """The input at `index`, or None if it is omitted."""
        return self.inputs[index] if index < len(self.inputs) else None


@dataclass(frozen=True)
class GraphPort:
    """An input or output of the model: ONNX name and dtype, and its value.

    An output of which a run returns only the first places along an axis has a `count`: the axis, and their number, an int32.
    """

    name: str
    dtype: str
    value: Value
    count: tuple[int, Value] | None = None


@dataclass
class Graph:
    """A model: nodes in topological order.

    Attributes:
        widened: its floating point types that the device computes as float32.
        states: an input and an output of each state, by name (`flashmem.compiler.frontend.states`).
        state_precision: the stored type of float32 states, whatever the precision of weights and activations.
    """

    name: str
    inputs: list[GraphPort]
    outputs: list[GraphPort]
    nodes: list[Node]
    opset: int = 23
    widened: tuple[str, ...] = ()
    states: tuple[tuple[str, str], ...] = ()
    state_precision: StatePrecision = "fp32"

    @property
    def states_in_half(self) -> bool:
        """Whether float32 states are stored in half. In int8, this holds for those that are no cache."""
        return self.state_precision != "fp32"

    def consumers(self) -> dict[Value, list[Node]]:
        """The nodes that read each value, in execution order, without duplicates."""
        readers: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs):
                if value is not None:
                    readers.setdefault(value, []).append(node)
        return readers

    def constants(self) -> Iterator[Value]:
        """Constant values in order of first use, without duplicates."""
        seen: dict[Value, None] = {}
        for node in self.nodes:
            for value in node.inputs:
                if value is not None and value.constant is not None and value not in seen:
                    seen[value] = None
                    yield value
