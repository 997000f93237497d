"""A file, or a folder, with a decoder: hyperparameters by name and tensors by role, both under the names of GGUF files.

These names are llama.cpp's (https://github.com/ggml-org/llama.cpp, `gguf-py/gguf/constants.py`).
"""

from __future__ import annotations

import hashlib
import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flashmem.base.errors import UserError
from flashmem.base.units import format_size
from flashmem.compiler.frontend.decoder.weights import FileTensor

_KEY_BYTES = 1 << 12  # of the data of a tensor, at its beginning, middle and end


class DecoderFile(ABC):
    """A decoder as it is stored. Every method raises UserError for what is missing or unknown.

    Attributes:
        path: what the user named.
        kind: the architecture, by llama.cpp's name.
        tensors: by role.
        files: all files that it was read from.
        interleaved: whether queries and keys are stored so that neighbouring elements of a head rotate.
    """

    path: Path
    kind: str
    tensors: Mapping[str, FileTensor]
    files: tuple[Path, ...]
    interleaved: bool

    @abstractmethod
    def value(self, name: str, default: Any = None) -> Any:
        """A hyperparameter, by its name without that of the architecture; None: there is no default."""

    @abstractmethod
    def check_is_model(self) -> None:
        """Raise UserError if this is another file beside a model."""

    @abstractmethod
    def check_settings(self) -> None:
        """Raise UserError for a setting that was not read and may change the answers."""

    @abstractmethod
    def language(self) -> dict[str, Any]:
        """The tokenizer, the tokens that begin and end a text, and the chat template in pieces (`flashmem.bundle.language`)."""

    @abstractmethod
    def damage(self, error: Exception) -> UserError:
        """What to say if `error` came from reading this."""

    @abstractmethod
    def read_little(self) -> None:
        """Read only the pages that are used from now on, and not those behind them, where the system can be asked for that."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that role."""
        return name in self.tensors

    def tensor(self, name: str) -> FileTensor:
        """The tensor of that role."""
        if name not in self.tensors:
            raise UserError(f"{self.path} lacks the tensor {name}; download or convert it again")
        return self.tensors[name]

    def check_tensors(self, used: Collection[str]) -> None:
        """Raise UserError for a tensor that is not `used`."""
        unused = [tensor.name for name, tensor in self.tensors.items() if name not in used]
        if unused:
            raise UserError(
                f"{self.path} has the tensor {unused[0]}, which has no part in a model of the kind {self.kind} as this version "
                "knows it, so the answers would be wrong without it; use another model"
            )

    def check_room(self, folder: Path, nbytes: int) -> None:
        """Raise UserError if the disk of `folder` has no room for `nbytes` bytes and, beside them, a bundle of this file."""
        needed = nbytes + sum(tensor.data.nbytes for tensor in self.tensors.values())
        if (free := shutil.disk_usage(folder).free) < needed:
            raise UserError(
                f"compiling {self.path} needs {format_size(needed)} in {folder.parent}, where {format_size(free)} are free; "
                "free some space, or name an output on another disk"
            )

    def key(self) -> str:
        """A hash of the tensors: their roles, shapes and formats, and a part of the data of each."""
        found = hashlib.sha256()
        for name, tensor in self.tensors.items():
            found.update(repr((name, tensor.kind, tensor.shape[::-1])).encode())
            data = tensor.data.reshape(-1).view(np.uint8)
            for at in (0, len(data) // 2, max(0, len(data) - _KEY_BYTES)):
                found.update(data[at : at + _KEY_BYTES].tobytes())
        return found.hexdigest()


def refused_setting(path: Path, what: str, value: Any, instead: str) -> UserError:
    """What to say of a setting that was not read and may change the answers. `what`: what it is in the file at `path`."""
    text = repr(value)
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return UserError(
        f"{path} has the {what} with the value {shown}, which this version does not support and which may change the answers; "
        f"{instead}"
    )
