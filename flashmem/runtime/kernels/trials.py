"""Trials of the launches of a program: what each argument is, and how large."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flashmem.base.types import ITEMSIZE
from flashmem.program.launches import Arg
from flashmem.program.program import Program
from flashmem.runtime.checking.trial import Trial, TrialArgument
from flashmem.runtime.kernels.chains import joined_launches
from flashmem.runtime.kernels.required import KernelLaunch, RequiredKernel


def distinct_trials(kernel: RequiredKernel, program: Program, texts: Mapping[str, str]) -> list[Trial]:
    """The trials of a kernel: one for each launch whose numbers or sizes differ. `texts`: those of a chain's parts, by name."""
    parts = tuple(
        Trial(launch.kernel, texts[launch.kernel], (launch.global_size, launch.local_size), _in_whole(launch.args, program))
        for launch in joined_launches(kernel.name, program)
    )
    found: dict[str, Trial] = {}
    for use in kernel.launches:
        trial = Trial(kernel.name, kernel.text, use.size, tuple(trial_arguments(use, program)), parts)
        found.setdefault(trial.key, trial)
    return list(found.values())


def _in_whole(args: Sequence[Arg], program: Program) -> tuple[TrialArgument, ...]:
    """The arguments of a chain's part: each at its place in a whole memory."""
    tensors = {tensor.name: tensor for tensor in program.tensors}
    found: list[TrialArgument] = []
    for arg, alone in zip(args, trial_arguments(KernelLaunch(((1,), (1,)), tuple(args)), program), strict=True):
        if arg.kind == "tensor":
            tensor = tensors[str(arg.value)]
            memory = "states" if tensor.memory == "states" else "arena"
            found.append(replace(alone, place=f"whole {memory}", offset=tensor.offset))
        elif arg.kind == "constant":
            found.append(replace(alone, place="whole constants", offset=int(arg.value)))
        else:
            found.append(alone)
    return tuple(found)


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
