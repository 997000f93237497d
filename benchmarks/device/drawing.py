"""A graph under construction: nodes of ONNX, data, and what is known about each value."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from benchmarks.device.arithmetic import Arithmetic, Known

SENSITIVE = 0.05
"""The largest bound of an output's errors, in standard deviations of its elements. A larger one could hide a wrong element."""


class UndefinedError(Exception):
    """The drawn graph would show nothing: numbers too large, or errors that hide a wrong element."""


@dataclass(frozen=True)
class Tensor:
    """A value of the graph; `constant` if it is an initializer."""

    name: str
    known: Known
    constant: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.known.shape


@dataclass
class Drawing:
    """One graph. Names begin with `prefix`, so that graphs can be joined in one model."""

    rng: random.Random
    arithmetic: Arithmetic
    prefix: str
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    feeds: dict[str, NDArray[Any]] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    named: int = 0

    def chance(self, probability: float) -> bool:
        """True with a probability."""
        return self.rng.random() < probability

    def leaf(
        self, shape: Sequence[int], *, constant: bool | None = None, around: float | None = None, size: float = 1.0
    ) -> Tensor:
        """Data of a random distribution: rarely that of a standard normal one. `around`: its offset, else drawn."""
        draws = np.random.default_rng(self.rng.getrandbits(64))
        offset = self.rng.choice((0.0, 0.0, 0.25, -0.5, 1.0)) if around is None else around
        kinds: Sequence[Callable[[], NDArray[Any]]] = (
            lambda: draws.standard_normal(shape) * size + offset * size,
            lambda: draws.uniform(-1, 1, shape) * size * 1.7 + offset * size,
            lambda: np.exp(draws.standard_normal(shape) * 0.7) * size * draws.choice((-1, 1), shape),
            lambda: draws.integers(-4, 5, shape) * size / 2,
            lambda: draws.standard_normal(shape) * size * np.exp(draws.standard_normal(tuple(shape[-1:]))),
        )
        array = self.rng.choice(kinds)().astype(np.float32)
        constant = self.chance(0.4) if constant is None else constant
        name = self._name()
        if constant:
            self.constants.append(numpy_helper.from_array(array, name))
        else:
            self.feeds[name] = array
        return self._kept(Tensor(name, self.arithmetic.leaf(array), constant))

    def integers(self, values: Sequence[int]) -> str:
        """The name of a constant vector of integers."""
        name = self._name()
        self.constants.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def node(self, op: str, inputs: Sequence[Tensor | str], known: Known, **attributes: Any) -> Tensor:
        """A node with one output, about which this is known.

        Raises:
            UndefinedError: it is too large for the precision, or has no elements.
        """
        return self.split(op, inputs, [known], **attributes)[0]

    def split(self, op: str, inputs: Sequence[Tensor | str], known: Sequence[Known], **attributes: Any) -> list[Tensor]:
        """A node with several outputs."""
        for each in known:
            if not each.exact.size or np.abs(each.exact).max() > self.arithmetic.most:
                raise UndefinedError
        names = [each if isinstance(each, str) else each.name for each in inputs]
        made = [Tensor(self._name(), each) for each in known]
        self.nodes.append(helper.make_node(op, names, [each.name for each in made], **attributes))
        return [self._kept(each) for each in made]

    def _kept(self, tensor: Tensor) -> Tensor:
        self.tensors.append(tensor)
        return tensor

    def finish(self, last: Tensor) -> None:
        """Make `last` an output, and sometimes a value in the middle.

        Raises:
            UndefinedError: an output shows nothing.
        """
        computed = {name for node in self.nodes for name in node.output}
        chosen = [each for each in self.tensors if each.name in computed and each.name != last.name]
        self.outputs = [last, *(self.rng.sample(chosen, 1) if chosen and self.chance(0.25) else [])]
        for each in self.outputs:
            if each.name not in computed or each.known.error.max() > SENSITIVE * max(each.known.exact.std(), 1e-6):
                raise UndefinedError

    def _name(self) -> str:
        self.named += 1
        return f"{self.prefix}{self.named}"


def joined(drawings: Sequence[Drawing]) -> onnx.ModelProto:
    """One model of several graphs, whose outputs follow each other."""
    inputs, outputs = [], []
    for each in drawings:
        inputs += [
            helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, array.shape) for name, array in each.feeds.items()
        ]
        outputs += [helper.make_tensor_value_info(out.name, onnx.TensorProto.FLOAT, out.shape) for out in each.outputs]
    nodes = [node for each in drawings for node in each.nodes]
    graph = helper.make_graph(nodes, "layouts", inputs, outputs, [tensor for each in drawings for tensor in each.constants])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def difference(output: Tensor, answer: NDArray[Any]) -> str | None:
    """How `answer` differs from an output by more than the bound of its errors; None if it does not."""
    if answer.shape != output.shape:
        return f"{output.name} has the shape {answer.shape} instead of {output.shape}"
    apart = np.abs(answer.astype(np.float64) - output.known.exact)
    wrong = ~(apart <= output.known.error)  # also where it is not a number
    if not wrong.any():
        return None
    where = tuple(int(axis[0]) for axis in np.nonzero(wrong))
    return (
        f"{output.name}{list(output.shape)}: {int(wrong.sum())} of {wrong.size} wrong, at {where} {answer[where]:g} instead of "
        f"{output.known.exact[where]:g} +- {output.known.error[where]:.2g}"
    )
