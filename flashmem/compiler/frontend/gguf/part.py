"""One GGUF file: its fields and tensors, read by the package `gguf`, which maps it. ggml's documentation describes both."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from flashmem.base.errors import UserError

_LENGTH = struct.Struct("<Q")
_LENGTH_BYTES = 8  # before each text or array
_MOST_ELEMENTS = 1 << 23
"""The most elements of all arrays among the fields. The package makes an object of each. Large vocabularies have a million."""


class GGUFPart:
    """The fields, by their names, and the tensors of a GGUF file, which is a whole model or a part of one.

    Raises:
        UserError: the file is damaged, or none.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFEndian

        try:
            reader = _reader(path)
        except OSError:
            raise
        except Exception as error:  # for a damaged file, the package and numpy raise any kind of error
            raise no_file(path, error) from error
        if reader.endianess != GGUFEndian.LITTLE:
            raise UserError(f"{path} is for big-endian computers; convert it with gguf-py's gguf_convert_endian.py")
        self.path = path
        self.fields: dict[str, Any] = reader.fields
        self.tensors: list[Any] = reader.tensors
        self._mapping = reader.mapping

    def number(self, name: str) -> int:
        """The value of a field, 0 if it is missing. Raises UserError if it is no number."""
        value = self.fields[name].contents() if name in self.fields else 0
        if not isinstance(value, int):
            raise UserError(f"{self.path} has the field {name}, which is no number; download or convert it again")
        return value

    def read_little(self) -> None:
        """Read only the pages that are used from now on, and not those behind them, where the system can be asked for that."""
        if hasattr(mmap, "MADV_RANDOM"):
            self._mapping.madvise(mmap.MADV_RANDOM)


def no_file(path: Path, error: Exception) -> UserError:
    """What to say of a file that cannot be read because of `error`."""
    return UserError(f"{path} is no GGUF file, or a part of one ({' '.join(str(error).split())})")


def _reader(path: Path) -> Any:
    """The package's reader of a file."""
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        """Reads through a plain array: a `numpy.memmap` takes twice as long for each of 150,000 fields.

        It refuses arrays with more elements than the rest of the file can hold: the package would read empty ones for ever.
        """

        elements = 0

        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = np.asarray(mapped)
            self.mapping = mapped.base

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == GGUFValueType.ARRAY:
                kind, count = (int(self._get(orig_offs + at, whole)[0]) for at, whole in ((0, np.uint32), (4, np.uint64)))
                scalars: Any = self.gguf_scalar_to_np
                least = np.dtype(scalars[kind]).itemsize if kind in scalars else _LENGTH_BYTES  # of an element
                self.elements += count
                if count * least > len(self.data) - orig_offs or self.elements > _MOST_ELEMENTS:
                    raise ValueError(f"it has an array of {count} elements")
                if self.byte_order == "I" and (kind in scalars or kind == GGUFValueType.STRING):
                    return self._array(orig_offs, kind, count)
            return super()._get_field_parts(orig_offs, raw_type)

        def _array(self, orig_offs: int, kind: int, count: int) -> Any:
            """The parts of an array of numbers or texts; the package makes arrays of each element and its length."""
            offset = orig_offs + 12
            types = [GGUFValueType.ARRAY, GGUFValueType(kind)][: 1 + (count > 0)]
            head = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
            if kind != GGUFValueType.STRING:
                numbers = self._get(offset, self.gguf_scalar_to_np[GGUFValueType(kind)], count)
                return 12 + numbers.nbytes, [*head, numbers], [2] if count else [], types
            texts = []
            for _ in range(count):
                (length,) = _LENGTH.unpack_from(self.data, offset)
                offset += _LENGTH_BYTES + length
                if offset > len(self.data):
                    raise ValueError(f"it has a text of {length} bytes")
                texts.append(self.data[offset - length : offset])
            return offset - orig_offs, [*head, *texts], [*range(2, 2 + count)], types

    return Reader(path)
