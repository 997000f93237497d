"""Trials of the launches of a program: what each argument is, and how large."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flashmem.base.types import ITEMSIZE
from flashmem.program.program import Program
from flashmem.runtime.checking.trial import Trial, TrialArgument
from flashmem.runtime.kernels.required import KernelLaunch, RequiredKernel


def distinct_trials(kernel: RequiredKernel, program: Program) -> list[Trial]:
    """The trials of a kernel: one for each launch whose numbers or sizes differ.

    Chains, whose arguments are whole memories, have none: nothing checks them yet, but the kernels that they join.
    """
    found: dict[str, Trial] = {}
    for use in kernel.launches:
        if any(arg.kind == "whole" for arg in use.args):
            continue
        trial = Trial(kernel.name, kernel.text, use.size, tuple(trial_arguments(use, program)))
        found.setdefault(trial.key, trial)
    return list(found.values())


def trial_arguments(use: KernelLaunch, program: Program) -> Sequence[TrialArgument]:
    """The arguments of a launch; the kernel accesses no memory beyond these sizes."""
    tensors = {tensor.name: tensor for tensor in program.tensors}
    wholes = {"arena": program.arena_bytes, "states": program.states_bytes, "constants": program.constants_bytes}
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
        elif arg.kind == "whole":
            nbytes = wholes[str(arg.value)]
            found.append(TrialArgument("buffer", nbytes=nbytes, writable=nbytes, place=place))
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
