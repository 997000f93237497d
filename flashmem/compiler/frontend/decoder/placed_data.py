"""The data file of an ONNX model that is laid out first and written afterwards, some rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from flashmem.compiler.frontend.decoder.weights import BlockedMatrix, FileTensor, Floats

_PAGE = 4096
_PIECE = 1 << 20
"""Elements of a matrix that are converted at a time."""

Read = Callable[[FileTensor, slice], BlockedMatrix | Floats]
"""Makes weights of some rows of a tensor."""

_Pieces = Callable[[], Iterator[NDArray[Any]]]


class PlacedData:
    """Tensors of a data file: each has its place at once, and its bytes when `write` is called.

    `nbytes`: of the file so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes = 0
        self._content: list[tuple[int, _Pieces]] = []

    def array(self, name: str, array: NDArray[Any]) -> TensorProto:
        """A tensor with the elements of `array`."""
        made = self._place(name, array.shape, array.dtype)
        self._content.append((_offset(made), lambda: iter([array])))
        return made

    def matrix(self, name: str, tensors: Sequence[FileTensor], read: Read) -> tuple[BlockedMatrix | Floats, TensorProto]:
        """Matrices of one format and depth, one below the other, as `read` makes them.

        Returns an example of them with few rows, and the tensor of its array: blocks or floats.
        """
        height = sum(each.shape[0] for each in tensors)
        example = read(tensors[0], slice(0, 1))
        array = _array(example)
        made = self._place(name, (height, array.shape[1]), array.dtype)

        def pieces() -> Iterator[NDArray[Any]]:
            for tensor in tensors:
                height, depth = tensor.shape
                step = max(1, _PIECE // depth)
                for first in range(0, height, step):
                    yield _array(read(tensor, slice(first, min(first + step, height))))

        self._content.append((_offset(made), pieces))
        return example, made

    def write(self) -> None:
        """Write the file. Pieces of zeros become holes, which take no disk space.

        Raises:
            OSError: the disk is full or fails.
        """
        with self.path.open("wb") as file:
            file.truncate(self.nbytes)
            for place, pieces in self._content:
                for array in pieces():
                    if array.view(np.uint8).any():
                        file.seek(place)
                        file.write(np.ascontiguousarray(array).data)
                    place += array.nbytes

    def _place(self, name: str, shape: Sequence[int], dtype: np.dtype[Any]) -> TensorProto:
        self.nbytes += -self.nbytes % _PAGE
        made = onnx.TensorProto(
            name=name,
            dims=shape,
            data_type=helper.np_dtype_to_tensor_dtype(dtype),
            data_location=TensorProto.EXTERNAL,
        )
        length = math.prod(shape) * dtype.itemsize
        for key, value in (("location", self.path.name), ("offset", self.nbytes), ("length", length)):
            made.external_data.add(key=key, value=str(value))
        self.nbytes += length
        return made


def _array(matrix: BlockedMatrix | Floats) -> NDArray[Any]:
    """The array of a matrix in a file."""
    return matrix.blocks if isinstance(matrix, BlockedMatrix) else matrix


def _offset(tensor: TensorProto) -> int:
    return next(int(entry.value) for entry in tensor.external_data if entry.key == "offset")
