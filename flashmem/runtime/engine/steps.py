"""Steps: the launches of a program with their kernels' arguments set, and the slices that each one needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from flashmem.program.launches import Arg, Launch
from flashmem.program.program import Program as BundleProgram
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.handles import Buffer, DeviceMemory, KernelObject
from flashmem.runtime.streaming.interleaved import COPY_GROUP, CopyStream, LayerMoves

_AS_THEY_ARE: Mapping[int, Launch | None] = MappingProxyType({})
_UNBOUND: Mapping[int, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Command:
    """One kernel launch, ready to be enqueued. It holds `arguments` because a kernel does not keep its memory alive.

    `slices`: the arguments that are slices, by index and name.
    """

    kernel: KernelObject
    global_size: tuple[int, ...]
    local_size: tuple[int, ...] | None
    arguments: tuple[Any, ...]
    slices: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """A launch of the program: wait for the slices `needs`, then enqueue `commands` (none: a later launch does its work)."""

    name: str
    commands: tuple[Command, ...]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resources:
    """Memory that kernel arguments refer to."""

    ledger: Ledger
    arena: Buffer
    constants: Buffer | None
    weights: Mapping[str, DeviceMemory | None]  # None: set before a launch (`Transfer.binds_late`)
    staged: Mapping[str, DeviceMemory]  # where streamed slices wait for the copy to their places
    states: Buffer | None = None


class KernelSource(Protocol):
    """Compiled kernels."""

    def kernel(self, name: str, arguments: Sequence[Any]) -> KernelObject:
        """A new kernel object with its arguments set. Raises RunError."""


def make_steps(
    program: BundleProgram,
    needs: Mapping[int, tuple[str, ...]],
    moves: Mapping[int, LayerMoves],
    resources: Resources,
    plain: KernelSource,
    lane: KernelSource | None,
    instead: Mapping[int, Launch | None] = _AS_THEY_ARE,
    bound: Mapping[int, Step] = _UNBOUND,
) -> list[Step]:
    """The steps of `program`. Launches in `moves` use kernels of `lane`, all others kernels of `plain`.

    `instead`: replacements of launches that copy nothing; None: no launch. `bound`: steps whose commands are reused.

    Raises:
        RunError: a kernel is missing, or has other arguments.
    """
    binder = _Binder(program, resources)
    steps = []
    for layer, cold in enumerate(program.launches, start=1):
        if layer in bound:
            steps.append(replace(bound[layer], needs=needs.get(layer, ())))
            continue
        launch = instead.get(layer, cold)
        if launch is None:
            steps.append(Step(cold.name, (), needs.get(layer, ())))
            continue
        arguments = [binder.bind(arg) for arg in launch.args]
        slices = tuple((index, str(arg.value)) for index, arg in enumerate(launch.args) if arg.kind == "slice")
        moving = moves.get(layer)
        commands = [_copy(lane, stream, resources) for stream in (moving.leading if moving else ())]
        if moving is None or moving.interleaved is None:
            commands.append(_command(plain, launch.kernel, launch.global_size, launch.local_size, arguments, slices))
        else:
            assert lane is not None
            arguments += _lane(moving.interleaved, resources)
            commands.append(_command(lane, launch.kernel, launch.global_size, launch.local_size, arguments, slices))
        commands += [_copy(lane, stream, resources) for stream in (moving.separate if moving else ())]
        steps.append(Step(launch.name, tuple(commands), needs.get(layer, ())))
    return steps


def _command(
    program: KernelSource,
    name: str,
    size: tuple[int, ...],
    group: tuple[int, ...] | None,
    arguments: Sequence[Any],
    slices: tuple[tuple[int, str], ...] = (),
) -> Command:
    return Command(program.kernel(name, arguments), size, group, tuple(arguments), slices)


def _copy(lane: KernelSource | None, stream: CopyStream, resources: Resources) -> Command:
    assert lane is not None
    return _command(lane, stream.copier, (stream.copy_items,), (COPY_GROUP,), _lane(stream, resources))


def _lane(stream: CopyStream, resources: Resources) -> list[Any]:
    return stream.arguments(lambda part: resources.staged[part.name], lambda part: resources.weights[part.name], np.int32)


class _Binder:
    """Turns a program's arguments into kernel arguments; tensors and constants become sub-buffers."""

    def __init__(self, program: BundleProgram, resources: Resources) -> None:
        self._tensors = {tensor.name: tensor for tensor in program.tensors}
        self._resources = resources

    def bind(self, arg: Arg) -> Any:
        if arg.kind == "int":
            return np.int32(arg.value)
        if arg.kind == "float":
            return np.float32(arg.value)
        resources = self._resources
        if arg.kind == "slice":
            return resources.weights[str(arg.value)]
        if arg.kind == "whole":
            return {"arena": resources.arena, "states": resources.states, "constants": resources.constants}[str(arg.value)]
        if arg.kind == "tensor":
            tensor = self._tensors[str(arg.value)]
            whole = resources.states if tensor.memory == "states" else resources.arena
            assert whole is not None
            return resources.ledger.part(tensor.memory, whole, tensor.offset, tensor.nbytes)
        assert resources.constants is not None
        return resources.ledger.part("constants", resources.constants, int(arg.value), arg.nbytes)
