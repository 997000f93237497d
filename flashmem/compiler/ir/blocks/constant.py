"""A matrix of weights in ggml's blocks, or in floats of 16 bits, which stays as it is in its file until it is packed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.compiler.ir.blocks.floats import FloatFormat
from flashmem.compiler.ir.blocks.format import BlockFormat
from flashmem.compiler.ir.graph import Constant
from flashmem.compiler.ir.quantised import part_of


@dataclass(frozen=True)
class BlockConstant:
    """A matrix [rows, depth] of float32 in blocks along its rows: `data` is uint8 [rows, bytes of a row]."""

    data: Constant
    format: BlockFormat | FloatFormat

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and depth."""
        rows, nbytes = self.data.shape
        return rows, nbytes // self.format.nbytes * self.format.weights

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return math.prod(self.data.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the elements."""
        return np.dtype(np.float32)

    def array(self) -> NDArray[np.float32]:
        """Compute the elements."""
        return self.format.floats(self.data.array())

    def sliced(self, axis: int, first: int, end: int) -> BlockConstant | None:
        """Elements `first` to `end` along `axis`; None if they begin or end inside a block."""
        if axis == 0:
            return replace(self, data=part_of(self.data, 0, first, end))
        (begin, inside), (stop, rest) = divmod(first, self.format.weights), divmod(end, self.format.weights)
        if inside or rest:
            return None
        return replace(self, data=part_of(self.data, 1, begin * self.format.nbytes, stop * self.format.nbytes))


@dataclass(frozen=True)
class TableRows:
    """The rows of a matrix in blocks as a table has them, uint8 [rows, bytes of a row]: `BlockFormat.rows`."""

    source: BlockConstant

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows, and bytes of a row."""
        return self.source.data.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint8."""
        return np.dtype(np.uint8)

    @property
    def format(self) -> BlockFormat:
        """The kind of blocks."""
        assert isinstance(self.source.format, BlockFormat)
        return self.source.format

    def array(self) -> NDArray[np.uint8]:
        """All rows."""
        return self.format.rows(self.source.data.array())
