"""One launch, interpreted: a kernel's text and its arguments in, what chosen work-groups write out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flashmem.interpreter.compiled import TextCompiler, _Called
from flashmem.interpreter.errors import UnknownTextError
from flashmem.interpreter.machine import LaunchState, Value
from flashmem.interpreter.memory import Image, KernelMemory, Pointer
from flashmem.interpreter.preprocessor import preprocess
from flashmem.interpreter.syntax import Parameter, parse
from flashmem.interpreter.values import DTYPES, Array, Number

GAP = 64
"""Bytes between copies of a buffer, so that no index of one reaches the next."""


@dataclass(frozen=True)
class Written:
    """What work-groups wrote to one argument.

    For each copy of the memory: its elements in the parameter's type, which of them were written, and their error bounds (None
    if all are exact).
    """

    parameter: Parameter
    elements: Array  # [copies, elements]
    where: Array
    errors: Array | None

    def of(self, copy: int) -> tuple[Array, Array]:
        """The elements of one copy, or of all if they share the memory, and which of them were written."""
        row = min(copy, len(self.elements) - 1)
        return self.elements[row], self.where[row]


@dataclass(frozen=True)
class InterpretedKernel:
    """A kernel of a text, ready for launches."""

    name: str
    parameters: tuple[Parameter, ...]
    _compiler: TextCompiler
    _called: _Called

    def run(
        self,
        size: Sequence[int],
        group: Sequence[int],
        groups: Sequence[tuple[int, ...]],
        arguments: Sequence[Array | int | float],
        copies: int,
    ) -> list[Written]:
        """Execute the work-groups `groups` of a launch once with each copy of its memory.

        `arguments`: for a pointer bytes, of shape [copies, bytes], or [1, bytes] if all copies share them; for a texture its
        texels [rows, columns, 4]; or a number. Bytes of written parameters are not changed: they are copied first.

        Raises:
            UnknownTextError: the text uses what the interpreter does not know.
            OutsideError: a work-item leaves the memory of an argument.
        """
        machine = LaunchState(size, group, groups, copies, self._compiler.slots)
        held: dict[int, KernelMemory | Image] = {}
        changed = {id(given) for parameter, given in zip(self.parameters, arguments, strict=True) if not parameter.constant}
        with np.errstate(all="ignore"):
            for execute in self._compiler.begin:
                execute(machine)
            for parameter, (slot, _), given in zip(self.parameters, self._called.parameters, arguments, strict=True):
                machine.variables[slot] = _argument(machine, parameter, given, copies, id(given) in changed, held)
            self._called.body(machine)
        return [
            _written(parameter, held[id(given)], copies)
            for parameter, given in zip(self.parameters, arguments, strict=True)
            if parameter.is_memory and not parameter.constant
        ]


def _argument(
    machine: LaunchState,
    parameter: Parameter,
    given: Array | int | float,
    copies: int,
    changes: bool,
    held: dict[int, KernelMemory | Image],
) -> Value:
    """The value of a parameter. Arguments that are one array are one memory."""
    if parameter.type.name == "image2d_t":
        assert isinstance(given, np.ndarray)
        if id(given) not in held:
            written = np.zeros(given.shape[:2], bool) if changes else None
            held[id(given)] = Image(parameter.name, given.copy() if changes else given, written)
        return held[id(given)]
    if not parameter.type.is_pointer:
        return Number(np.array([given]).astype(DTYPES[parameter.type.name]))
    assert isinstance(given, np.ndarray)
    if id(given) not in held:
        nbytes = given.shape[1]
        unit = DTYPES[parameter.type.name].itemsize
        if len(given) == 1 and not changes:
            data = np.pad(given.reshape(-1), (0, -nbytes % 16)) if nbytes % 16 else given.reshape(-1)
            held[id(given)] = KernelMemory(parameter.name, data, nbytes, np.zeros(1, np.int64), unit)
        else:
            stride = -(-(nbytes + GAP) // GAP) * GAP
            data = np.zeros(copies * stride, np.uint8)
            data.reshape(copies, stride)[:, :nbytes] = given
            held[id(given)] = KernelMemory(parameter.name, data, nbytes, machine.copy * stride, unit, watched=changes)
    memory = held[id(given)]
    assert isinstance(memory, KernelMemory)
    return Pointer(memory, np.zeros(1, np.int64), parameter.type.target)


@functools.lru_cache(maxsize=64)
def interpret_kernel(text: str, name: str, defined: tuple[tuple[str, str], ...] = ()) -> InterpretedKernel:
    """The kernel `name` of `text`, with these macros defined.

    Raises:
        UnknownTextError: the text has no such kernel, or uses what the interpreter does not know.
    """
    unit = parse(preprocess(text, dict(defined)))
    if name not in unit.functions:
        raise UnknownTextError(f"no kernel {name}")
    compiler = TextCompiler(unit)
    called = compiler.kernel(name)
    return InterpretedKernel(name, unit.functions[name].parameters, compiler, called)


def _written(parameter: Parameter, memory: KernelMemory | Image, copies: int) -> Written:
    """The written elements, without the gaps between copies."""
    if isinstance(memory, Image):
        assert memory.written is not None
        texels = memory.texels.reshape(1, -1)
        return Written(parameter, texels, np.repeat(memory.written.reshape(1, -1), 4, axis=1), None)
    dtype = DTYPES[parameter.type.name]
    count = memory.nbytes // dtype.itemsize

    def cut(array: Array) -> Array:
        return array.reshape(copies, -1)[:, :count]

    assert memory.written is not None
    errors = None if memory.errors is None else cut(memory.errors)
    return Written(parameter, cut(memory.view(dtype)), cut(memory.written), errors)
