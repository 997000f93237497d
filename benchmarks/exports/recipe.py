"""The form of a recipe, which describes one architecture, and the drawing of example inputs.

PyTorch and the libraries with the architectures (`requirements.txt`) are imported when a model is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import UserError

Tensors = Mapping[str, Any]
"""PyTorch tensors by the name of the input."""


@dataclass(frozen=True)
class Input:
    """An input. `draw(generator, size)` makes an example with a batch of one; `symbolic` has the axes that can be dynamic."""

    name: str
    draw: Callable[[np.random.Generator, int], NDArray[Any]]
    symbolic: Mapping[int, str] = field(default_factory=lambda: {0: "batch"})


@dataclass(frozen=True)
class Recipe:
    """One architecture.

    `default_size` is the model's own, in the unit of `size_means`. `paper_size` is a usual size whose multiply-adds are nearest
    to the paper's, where the model's own has fewer. `build(size)` constructs the network, `answer(network, inputs)` calls it
    and returns a tensor for each name in `outputs`. `tune(torch, network, inputs)` corrects the weights after the common
    initialisation (`benchmarks.exports.weights`). `dynamo_only` is the reason why the legacy exporter cannot write it.
    """

    name: str
    summary: str
    default_size: int
    build: Callable[[int], Any]
    inputs: tuple[Input, ...]
    answer: Callable[[Any, Tensors], tuple[Any, ...]]
    outputs: tuple[str, ...] = ("logits",)
    size_means: str = "pixels"
    paper_size: int | None = None
    tune: Callable[[Any, Any, Tensors], None] | None = None
    dynamo_only: str = ""
    tiny: bool = False

    def examples(self, generator: np.random.Generator, size: int | None = None) -> dict[str, NDArray[Any]]:
        """An example of every input, for `size` or the model's own."""
        return {each.name: each.draw(generator, size or self.default_size) for each in self.inputs}


def exporter_module(name: str) -> Any:
    """Import the module `name` of the requirements.

    Raises:
        UserError: it is not installed, or has a release that is not allowed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"exports need {name.partition('.')[0]}: pip install -r benchmarks/exports/requirements.txt ({error})"
        ) from error


def exporter_class(module: str, name: str) -> Any:
    """The class `name` in a module of the requirements.

    Raises:
        UserError: as for `exporter_module`; or the installed release has no such class.
    """
    found = getattr(exporter_module(module), name, None)
    if found is None:
        package = module.partition(".")[0]
        raise UserError(f"this {package} has no {name}: install a release that benchmarks/exports/requirements.txt names")
    return found


def image(name: str = "pixel_values") -> Input:
    """An input image of `size` by `size` pixels."""

    def draw(generator: np.random.Generator, size: int) -> NDArray[Any]:
        # Smooth colour fields with grain. Like a photograph, and unlike white noise, their local averages differ.
        at = (np.arange(size) + 0.5) * 4 / size - 0.5
        between = np.stack([np.interp(at, np.arange(4), row) for row in np.eye(4)])
        fields = np.einsum("bcij,iy,jx->bcyx", generator.standard_normal((1, 3, 4, 4)), between, between)
        pixels: NDArray[Any] = fields + 0.3 * generator.standard_normal(fields.shape)
        return pixels.astype(np.float32)

    return Input(name, draw)


def tokens(vocabulary: int, name: str = "input_ids") -> Input:
    """An input sequence of `size` token ids."""
    return Input(name, lambda generator, size: generator.integers(0, vocabulary, (1, size)), {0: "batch", 1: "sequence"})


def features(name: str, shape: Callable[[int], tuple[int, ...]]) -> Input:
    """An input of standard normal values, with a shape that depends on the size."""
    return Input(name, lambda generator, size: generator.standard_normal(shape(size), np.float32))
