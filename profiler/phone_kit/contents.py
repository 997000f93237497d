"""The contents of a phone kit, unpacked: bundles and launches for each device, inputs and right answers of each model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import UserError
from flashmem.base.types import MemoryPath

VERSION = 1
"""The version of the layout, and of the record that a kit writes."""

ABOUT = "kit.json"
STREAMED = "streamed"
"""The model to stream; the others check answers."""

OTHER = "generic-gpu"
"""The device whose bundles a GPU without its own descriptor gets, as in all of flashmem."""


@dataclass(frozen=True)
class KitBundle:
    """A compiled model of the kit. `folder`: the bundle."""

    model: str
    memory_path: MemoryPath
    folder: Path
    precision: Literal["fp32", "fp16"]


@dataclass(frozen=True)
class Contents:
    """An unpacked kit in `folder`; `about` is its kit.json."""

    folder: Path
    about: Mapping[str, Any]

    @classmethod
    def open(cls, folder: Path) -> Contents:
        """The kit in `folder`.

        Raises:
            UserError: there is none of this version.
        """
        try:
            about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
            version = about["version"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder} has no phone kit ({error}); run the kit's own file") from error
        if version != VERSION:
            raise UserError(f"{folder} has a phone kit of version {version}, this flashmem reads {VERSION}; make the kit again")
        return cls(folder, about)

    def device_for(self, descriptor: str) -> str:
        """The device of the kit whose bundles a device with this descriptor gets; "" if there is none."""
        devices = self.about["devices"]
        return next((name for name in (descriptor, OTHER) if name in devices), "")

    def launches(self, device: str) -> Path:
        """The kit of launches (`profiler.kit.Kit`) for a device."""
        return self.folder / str(self.about["devices"][device]["launches"])

    def bundles(self, device: str) -> Iterator[KitBundle]:
        """The bundles for a device, those of its default memory path first."""
        for each in self.about["devices"][device]["bundles"]:
            yield KitBundle(each["model"], each["memory_path"], self.folder / each["folder"], each["precision"])

    def inputs(self, model: str) -> Path:
        """The inputs of a model, for `flashmem run --input`."""
        return self.folder / f"models/{model}-inputs.npz"

    def answers(self, model: str) -> dict[str, NDArray[Any]]:
        """The right outputs of a model by name: those of ONNX Runtime."""
        with np.load(self.folder / f"models/{model}-answers.npz") as file:
            return dict(file)
