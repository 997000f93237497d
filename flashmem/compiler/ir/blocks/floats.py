"""Floats of 16 bits, as a kind of block of one weight: they stay as they are in a file, and kernels widen what they load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from flashmem.compiler.ir.blocks.format import Bytes, Floats


@dataclass(frozen=True)
class FloatFormat:
    """A kind of floats. `name`: ggml's. `storage`: the type of packed weights; of bfloat16, NumPy has the bits as uint16."""

    name: str
    storage: Literal["float16", "bfloat16"]
    weights: int = 1
    nbytes: int = 2

    @property
    def bits(self) -> float:
        """Bits of a weight."""
        return 8 * self.nbytes

    def row_bytes(self, depth: int) -> int:
        """Bytes of a row of `depth` weights."""
        return depth * self.nbytes

    def elements(self, data: Bytes) -> NDArray[Any]:
        """The weights as they are stored, from uint8 [rows, bytes of a row]."""
        return np.ascontiguousarray(data).view("<f2" if self.storage == "float16" else "<u2")

    def floats(self, data: Bytes) -> Floats:
        """The weights in float32."""
        elements = self.elements(data)
        if self.storage == "float16":
            return elements.astype(np.float32)
        return (elements.astype(np.uint32) << np.uint32(16)).view(np.float32)


F16 = FloatFormat("F16", "float16")
BF16 = FloatFormat("BF16", "bfloat16")
