"""The tensors of safetensors files: 8 bytes with the length of a JSON header, the header, and the bytes of all tensors.

The format is documented by Hugging Face (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flashmem.base.errors import MissingFileError, UserError
from flashmem.compiler.frontend.decoder.weights import Bytes, FileTensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_LENGTH_BYTES = 8
_MOST_HEADER = 100_000_000
"""The most bytes of a header, as the library safetensors has it."""


class Shards:
    """The tensors of a folder, by their names there. `files`: those that were read.

    Raises:
        MissingFileError: there are no weights, or a file is missing that the index names.
        UserError: a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.files: list[Path] = []
        self.tensors: dict[str, FileTensor] = {}
        self._mapped: list[Any] = []
        names = [SINGLE] if (folder / SINGLE).is_file() else self._indexed(folder)
        for name in names:
            path = folder / name
            if not path.is_file():
                raise MissingFileError(f"{path} is missing, which {folder / INDEX} names; download it too")
            for tensor in self._read(path):
                if tensor.name in self.tensors:
                    raise UserError(f"{folder} has two tensors of the name {tensor.name}; download it again")
                self.tensors[tensor.name] = tensor

    def read_little(self) -> None:
        """Read only the pages that are used from now on, and not those behind them, where the system can be asked for that."""
        for mapped in self._mapped:
            if hasattr(mmap, "MADV_RANDOM"):
                mapped.madvise(mmap.MADV_RANDOM)

    def _indexed(self, folder: Path) -> list[str]:
        """The names of the files in the index."""
        path = folder / INDEX
        if not path.is_file():
            raise MissingFileError(f"{folder} has neither {SINGLE} nor {INDEX}; download the whole model")
        self.files.append(path)
        try:
            names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damage(path, error) from error
        if wrong := [name for name in names if Path(name).name != name]:
            raise UserError(f"{path} names the file {wrong[0]!r}, outside the model's folder: only files in it are read")
        return names

    def _read(self, path: Path) -> Iterator[FileTensor]:
        self.files.append(path)
        try:
            data = np.memmap(path, np.uint8, "r")
            self._mapped.append(data._mmap)  # type: ignore[attr-defined]
            plain = np.asarray(data)
            start = _LENGTH_BYTES + int(plain[:_LENGTH_BYTES].view("<u8")[0])
            if start > min(len(plain), _MOST_HEADER):
                raise ValueError(f"its header would end at byte {start}")
            header = json.loads(plain[_LENGTH_BYTES:start].tobytes())
            for name, about in header.items():
                if name != "__metadata__":
                    yield _tensor(name, about, plain[start:])
        except OSError:
            raise
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise _damage(path, error) from error


def _tensor(name: str, about: dict[str, Any], data: Bytes) -> FileTensor:
    """A tensor by its entry in the header."""
    shape = tuple(int(size) for size in about["shape"])
    begin, end = about["data_offsets"]
    width = int("".join(each for each in str(about["dtype"]).partition("_")[0] if each.isdigit()) or 8)
    if not 0 <= begin <= end <= len(data) or 8 * (end - begin) != width * math.prod(shape) or min(shape, default=1) < 1:
        raise ValueError(f"the tensor {name} has bytes {begin} to {end} of {len(data)}")
    return FileTensor(name, str(about["dtype"]), shape, data[begin:end].reshape(shape[0] if shape else 1, -1))


def _damage(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is damaged ({type(error).__name__}: {error}); download it again")
