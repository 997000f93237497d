"""Trials: the distinct launches of a program, with the size and use of each argument, for `check.check_kernel`."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashmem.base.types import ITEMSIZE
from flashmem.program.program import Program
from flashmem.runtime.kernels.required import KernelLaunch, RequiredKernel, Size


@dataclass(frozen=True)
class TrialArgument:
    """One argument of a launch.

    `kind` is "buffer", "image", "int" or "float". `value` of a number; `shape` of a texture: width, height and channel type;
    `nbytes` of a buffer, of which a kernel may write the first `writable`. Arguments of the same `place` are the same memory.
    """

    kind: str
    value: float = 0
    nbytes: int = 0
    writable: int = 0
    shape: tuple[int, int, str] = (0, 0, "")
    place: str = ""


@dataclass(frozen=True)
class Trial:
    """One launch of one kernel, without the weights and activations of a model."""

    name: str
    text: str
    size: Size
    arguments: tuple[TrialArgument, ...]

    @property
    def key(self) -> str:
        """A hash of all that decides the result: the same launch of another model has it too."""
        places: dict[str, int] = {}
        known = [{**asdict(each), "place": places.setdefault(each.place, len(places))} for each in self.arguments]
        return hashlib.sha256(json.dumps([self.text, self.size, known]).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The trial as JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Trial:
        """The trial that `to_json` wrote."""
        whole, group = data["size"]
        arguments = tuple(TrialArgument(**{**each, "shape": tuple(each["shape"])}) for each in data["arguments"])
        return cls(data["name"], data["text"], (tuple(whole), None if group is None else tuple(group)), arguments)


def distinct_trials(kernels: Iterable[RequiredKernel], program: Program) -> list[Trial]:
    """The trials of kernels: one for each launch whose text, numbers or sizes differ.

    Chains, whose arguments are whole memories, are left out: nothing checks them yet, but the kernels that they join.
    """
    found: dict[str, Trial] = {}
    for kernel in kernels:
        for use in kernel.launches:
            if any(arg.kind == "whole" for arg in use.args):
                continue
            trial = Trial(kernel.name, kernel.text, use.size, tuple(_arguments(use, program)))
            found.setdefault(trial.key, trial)
    return list(found.values())


def _arguments(use: KernelLaunch, program: Program) -> Sequence[TrialArgument]:
    tensors = {tensor.name: tensor for tensor in program.tensors}
    slices = program.readable()
    found: list[TrialArgument] = []
    for number, arg in enumerate(use.args):
        place = f"{arg.kind} {arg.value}"
        if arg.kind == "slice":
            found.append(_memory(slices[str(arg.value)], place))
        elif arg.kind == "tensor":
            tensor = tensors[str(arg.value)]
            elements = ITEMSIZE[tensor.dtype] * math.prod(tensor.shape)
            found.append(TrialArgument("buffer", nbytes=tensor.nbytes, writable=elements, place=place))
        elif arg.kind == "constant":
            found.append(TrialArgument("buffer", nbytes=arg.nbytes, place=place))
        else:
            assert not isinstance(arg.value, str)
            found.append(TrialArgument(arg.kind, value=arg.value, place=f"number {number}"))
    if use.stream is not None:
        found += use.stream.arguments(
            lambda part: TrialArgument("buffer", nbytes=part.file_bytes, place=f"staging {part.name}"),
            lambda part: _memory(part, f"slice {part.name}"),
            lambda number: TrialArgument("int", value=number),
        )
    return found


def _memory(part: Any, place: str) -> TrialArgument:
    if part.is_image:
        return TrialArgument("image", shape=(part.width, part.height, part.channel), place=place)
    return TrialArgument("buffer", nbytes=part.file_bytes, writable=part.file_bytes, place=place)
