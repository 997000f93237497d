"""Shapes of models' contractions as single operators, for `flashmem tune` and `benchmarks.kernels.operators`.

Each shape makes a graph of one operator and its workload. Shapes of models are extracted from the zoo's graphs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from flashmem.base.types import MemoryPath
from flashmem.compiler.configs.workload import Workload
from flashmem.compiler.ir.builder import constant
from flashmem.compiler.ir.graph import Graph, Node
from flashmem.tools.zoo.graphs import zoo_graph

from .sketch import Sketch


class Shape(ABC):
    """An operator with the sizes of its tensors."""

    _FLOPS: ClassVar[int] = 2
    """Floating-point operations for each of `Workload.macs`."""

    @abstractmethod
    def workload(self, path: MemoryPath, storage: str = "float32") -> Workload:
        """The workload for which the compiler selects a config, with weights on `path` in `storage`."""

    @abstractmethod
    def graph(self) -> Graph:
        """A graph of this operator alone."""

    @property
    @abstractmethod
    def elements(self) -> int:
        """Elements of operands and result, counted once."""

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return self._FLOPS * self.workload("buffer").macs


@dataclass(frozen=True)
class Matmul(Shape):
    """A product [rows, depth] x a weight [depth, columns]."""

    rows: int
    depth: int
    columns: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.depth}x{self.columns}"

    @property
    def elements(self) -> int:
        """Elements of both operands and the result."""
        return self.rows * self.depth + self.depth * self.columns + self.rows * self.columns

    def workload(self, path: MemoryPath, storage: str = "float32") -> Workload:
        """The workload for which the compiler selects a config."""
        return Workload("matmul", path, self.rows, self.depth, self.columns, storage=storage)

    def graph(self) -> Graph:
        """A graph of this operator alone."""
        g = Sketch()
        x = g.input(1, self.rows, self.depth)
        return g.finish(g.node("MatMul", [x, g.weight(self.depth, self.columns)], (1, self.rows, self.columns)))


@dataclass(frozen=True)
class QuantizedMatmul(Matmul):
    """The same with weights of 4 bits, of which 32 steps of depth share a scale and a minimum."""

    def graph(self) -> Graph:
        """A graph of this operator alone."""
        g = Sketch()
        x = g.input(1, self.rows, self.depth)
        return g.finish(g.node("MatMul", [x, g.nibbles(self.depth, self.columns, 32)], (1, self.rows, self.columns)))


@dataclass(frozen=True)
class Convolution(Shape):
    """A convolution of [channels, height, width] to `columns` channels by a `kernel` (down, across).

    If the kernel is odd, it is padded to keep the size.
    """

    channels: int
    height: int
    width: int
    columns: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)

    def __str__(self) -> str:
        size = f"{self.channels}x{self.height}x{self.width}"
        kernel = f"{self.kernel[0]}x{self.kernel[1]}"
        return f"{size}-{self.columns} {kernel}" + ("" if self.stride == (1, 1) else f" /{max(self.stride)}")

    @property
    def pads(self) -> tuple[int, int]:
        """Rows of padding above and below, columns left and right."""
        down, across = (size // 2 if size % 2 else 0 for size in self.kernel)
        return down, across

    @property
    def out(self) -> tuple[int, int]:
        """Height and width of the result."""
        sizes = zip((self.height, self.width), self.kernel, self.stride, self.pads, strict=True)
        down, across = ((size + 2 * pad - kernel) // stride + 1 for size, kernel, stride, pad in sizes)
        return down, across

    @property
    def elements(self) -> int:
        """Elements of both operands and the result."""
        image = self.channels * self.height * self.width
        return image + math.prod(self.kernel) * self.channels * self.columns + math.prod(self.out) * self.columns

    def workload(self, path: MemoryPath, storage: str = "float32") -> Workload:
        """The workload for which the compiler selects a config; a 1x1 convolution is a plain product."""
        taps = math.prod(self.kernel)
        stride = max(self.stride)
        family = "matmul" if taps == stride == 1 else "conv"
        depth = taps * self.channels
        return Workload(family, path, math.prod(self.out), depth, self.columns, storage=storage, taps=taps, stride=stride)

    def graph(self) -> Graph:
        """A graph of this operator alone; the compiler adds changes of layout around it."""
        g = Sketch()
        x = g.input(1, self.channels, self.height, self.width)
        weight = g.weight(self.columns, self.channels, *self.kernel)
        shape = (1, self.columns, *self.out)
        pads = [*self.pads, *self.pads]
        attributes = {"kernel_shape": list(self.kernel), "strides": list(self.stride), "pads": pads}
        return g.finish(g.node("Conv", [x, weight], shape, **attributes))


@dataclass(frozen=True)
class Batched(Shape):
    """`batches` products of activations [rows, depth] and [depth, columns]."""

    batches: int
    rows: int
    depth: int
    columns: int

    def __str__(self) -> str:
        return f"{self.batches} of {self.rows}x{self.depth}x{self.columns}"

    @property
    def elements(self) -> int:
        """Elements of both operands and the result."""
        return self.batches * (self.rows * self.depth + self.depth * self.columns + self.rows * self.columns)

    def workload(self, path: MemoryPath, storage: str = "float32") -> Workload:
        """The workload for which the compiler selects a config; activations are in buffers on either path."""
        return Workload("matmul_dynamic", "buffer", self.rows, self.depth, self.columns, self.batches, storage)

    def graph(self) -> Graph:
        """A graph of this operator alone."""
        g = Sketch()
        a = g.input(1, self.batches, self.rows, self.depth)
        b = g.input(1, self.batches, self.depth, self.columns)
        return g.finish(g.node("MatMul", [a, b], (1, self.batches, self.rows, self.columns)))


@dataclass(frozen=True)
class Attention(Shape):
    """softmax(Q x K transposed, scaled) x V, [heads, rows, width] each; K and V have `keys` rows (0: as many as Q).

    `causal`: a mask hides from each row of Q the rows of K behind it.
    """

    _FLOPS = 4  # two products

    heads: int
    rows: int
    width: int
    keys: int = 0
    causal: bool = False

    def __str__(self) -> str:
        of = f" of {self.keys} keys" if self.keys else ""
        return f"{self.heads}x{self.rows}x{self.width}{of}{' causal' if self.causal else ''}"

    @property
    def elements(self) -> int:
        """Elements of Q, K, V and the result."""
        return 2 * self.heads * self.width * (self.rows + (self.keys or self.rows))

    def workload(self, path: MemoryPath, storage: str = "float32") -> Workload:
        """The workload for which the compiler selects a config; activations are in buffers on either path."""
        return Workload("attention", "buffer", self.rows, self.width, self.keys or self.rows, self.heads, storage)

    def graph(self) -> Graph:
        """A graph in the form of exported models: scores, scaled, softmax, product."""
        g = Sketch()
        keys = self.keys or self.rows
        q, k, v = (g.input(1, self.heads, n, self.width) for n in (self.rows, keys, keys))
        turned = g.node("Transpose", [k], (1, self.heads, self.width, keys), perm=[0, 1, 3, 2])
        scores = g.node("MatMul", [q, turned], (1, self.heads, self.rows, keys))
        scaled = g.node("Mul", [scores, g.weight()], scores.shape)
        if self.causal:
            seen = constant("seen", np.tri(self.rows, keys, dtype=bool).reshape(1, 1, self.rows, keys))
            scaled = g.node("Where", [seen, scaled, constant("lowest", np.array(np.finfo(np.float32).min))], scores.shape)
        weights = g.node("Softmax", [scaled], scores.shape, axis=-1)
        return g.finish(g.node("MatMul", [weights, v], q.shape))


@dataclass(frozen=True)
class RowSoftmax(Shape):
    """Softmax of each of `rows` rows; it represents all kernels that compute whole rows."""

    _FLOPS = 5  # a maximum, a difference, an exponential, a sum and a quotient

    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.rows} rows of {self.columns}"

    @property
    def elements(self) -> int:
        """Elements of the operand and the result."""
        return 2 * self.rows * self.columns

    def workload(self, path: MemoryPath, storage: str = "float32") -> Workload:
        """The workload for which the compiler selects a config; activations are in buffers on either path."""
        return Workload("reduce_rows", "buffer", self.rows, self.columns, 1, storage=storage)

    def graph(self) -> Graph:
        """A graph of this operator alone."""
        g = Sketch()
        x = g.input(1, self.rows, self.columns)
        return g.finish(g.node("Softmax", [x], x.shape, axis=-1))


def zoo_shapes(name: str) -> Counter[Shape]:
    """Products with weights and convolutions of the zoo's architecture `name`, each with its number of occurrences."""
    return Counter(shape for node in zoo_graph(name).nodes for shape in _shape_of(node))


def _shape_of(node: Node) -> Iterable[Shape]:
    if node.op in ("MatMul", "Gemm") and node.input(1).constant is not None:
        out = node.outputs[0].shape
        yield Matmul(math.prod(out[:-1]), node.input(0).shape[-1], out[-1])
    elif node.op == "Conv" and int(node.attributes.get("group", 1)) == 1:
        _, channels, *size = node.input(0).shape
        columns, _, *kernel = node.input(1).shape
        strides = [*node.attributes.get("strides", [1] * len(size))]
        (height, width), (down, across), (below, beside) = ([1] * (2 - len(v)) + [*v] for v in (size, kernel, strides))
        yield Convolution(channels, height, width, columns, (down, across), (below, beside))


_UNET_LEVELS = ((4096, 320), (1024, 640), (256, 1280), (64, 1280))
_UNET_CONVOLUTIONS = (
    (320, 64, 320), (640, 64, 320), (960, 64, 320), (320, 32, 640), (640, 32, 640), (1280, 32, 640), (1920, 32, 640),
    (640, 16, 1280), (1280, 16, 1280), (2560, 16, 1280), (1280, 8, 1280), (2560, 8, 1280),
)  # fmt: skip


def unet_shapes() -> list[Shape]:
    """Shapes of Stable Diffusion 1.5's UNet, 64 x 64 latents: products of its transformers (77 words), 3x3 convolutions."""
    found: list[Shape] = []
    for rows, width in _UNET_LEVELS:
        found += [Matmul(rows, width, width), Matmul(rows, width, 8 * width), Matmul(rows, 4 * width, width)]
    found += [Matmul(77, 768, width) for _, width in _UNET_LEVELS[:3]]
    return found + [Convolution(channels, side, side, columns, (3, 3)) for channels, side, columns in _UNET_CONVOLUTIONS]
