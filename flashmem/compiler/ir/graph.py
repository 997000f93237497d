"""The graph: values, nodes and constants, after import.

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

from flashmem.base.types import DType


class Constant(Protocol):
    """Constant data that stays on disk until read. `array()` maps or copies it anew: hold the result briefly."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type it is stored in."""
        ...

    def array(self) -> NDArray[Any]:
        """The data, mapped or computed anew."""
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
        """The element type it is stored in."""
        return self.data.dtype

    def array(self) -> NDArray[Any]:
        """The data itself."""
        return self.data


@dataclass(frozen=True)
class FileConstant:
    """A constant in a file, read through a mapping that lives no longer than the array."""

    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def array(self) -> NDArray[Any]:
        """A fresh mapping of the data."""
        if 0 in self.shape:
            return np.zeros(self.shape, self.dtype)
        return np.asarray(np.memmap(self.path, self.dtype, "r", self.offset, self.shape))


@dataclass(frozen=True)
class NibbleConstant:
    """Integers of 4 bits in a file, two a byte, the first in the low nibble. They are read as `dtype`, int8 or uint8."""

    packed: FileConstant
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def array(self) -> NDArray[Any]:
        """The data, unpacked anew."""
        return unpack_nibbles(self.packed.array(), self.shape, self.dtype)


def unpack_nibbles(packed: NDArray[np.uint8], shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Integers of 4 bits, low nibble first, as int8 (with their sign) or uint8."""
    both = np.stack((packed & 15, packed >> 4), axis=-1).reshape(-1)[: math.prod(shape)].reshape(shape)
    if dtype == np.uint8:
        return both
    signed: NDArray[np.int8] = (both ^ 8).view(np.int8) - np.int8(8)
    return signed


def pack_nibbles(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Rows of integers of 4 bits, given as int8 or uint8, two a byte, low nibble first; each row starts on a byte."""
    whole = np.pad(array.view(np.uint8), [(0, 0)] * (array.ndim - 1) + [(0, array.shape[-1] % 2)])
    packed: NDArray[np.uint8] = (whole[..., ::2] & np.uint8(15)) | (whole[..., 1::2] << np.uint8(4))
    return packed


@dataclass(frozen=True)
class Placeholder:
    """A weight of which only the shape is known: every element is `fill`, without memory for more than one."""

    shape: tuple[int, ...]
    fill: float
    dtype: np.dtype[Any]

    def array(self) -> NDArray[Any]:
        """The one element, seen as the whole array."""
        return np.broadcast_to(np.asarray(self.fill, self.dtype), self.shape)


@dataclass(eq=False)
class Value:
    """One tensor of the graph. `constant` is set for weights; identity, not name, is what makes two values the same."""

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
    """One operator. `inputs` holds None where ONNX leaves an optional input out."""

    op: str
    name: str
    inputs: list[Value | None]
    outputs: list[Value]
    attributes: dict[str, Any] = field(default_factory=dict)

    def input(self, index: int) -> Value:
        """The input at `index`, which must be there."""
        value = self.inputs[index]
        assert value is not None, f"{self.op} {self.name} lacks input {index}"
        return value

    def optional(self, index: int) -> Value | None:
        """The input at `index`, or None where ONNX leaves it out."""
        return self.inputs[index] if index < len(self.inputs) else None


@dataclass(frozen=True)
class GraphPort:
    """An input or output of the model: the ONNX name and dtype beside the value."""

    name: str
    dtype: str
    value: Value


@dataclass
class Graph:
    """A model: nodes in topological order. `widened`: the floating point types in it that the device computes as float32."""

    name: str
    inputs: list[GraphPort]
    outputs: list[GraphPort]
    nodes: list[Node]
    opset: int = 23
    widened: tuple[str, ...] = ()

    def consumers(self) -> dict[Value, list[Node]]:
        """The nodes that read each value, in execution order; a node that reads it twice is listed once."""
        readers: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs):
                if value is not None:
                    readers.setdefault(value, []).append(node)
        return readers

    def constants(self) -> Iterator[Value]:
        """Each constant value once, in order of first use."""
        seen: dict[Value, None] = {}
        for node in self.nodes:
            for value in node.inputs:
                if value is not None and value.constant is not None and value not in seen:
                    seen[value] = None
                    yield value
