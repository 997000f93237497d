"""States of a model on a device: memory that keeps its content from one run to the next."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.program.program import Program
from flashmem.program.tensors import Port, State, numpy_dtype
from flashmem.runtime.engine.given_arrays import Input
from flashmem.runtime.engine.ports import check_inputs, from_device, on_host, to_device
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Queue
from flashmem.runtime.opencl.handles import Buffer

Array = NDArray[Any]

_PIECE = 1 << 14
"""Elements that are converted or cleared at once, so that no second array of a state exists."""


class States:
    """The states of a model. All shape variants of a bundle share them."""

    def __init__(self, program: Program, ledger: Ledger, queue: Queue) -> None:
        """Allocate the states, all zeros. Raises RunError if the device or the budget refuses."""
        self._queue = queue
        self._states = {state.name: state for state in program.states}
        self._tensors = {tensor.name: tensor for tensor in program.tensors if tensor.memory == "states"}
        self.memory: Buffer | None = None
        self._parts: dict[str, Buffer] = {}
        self._torn: set[str] = set()  # from a run that was stopped between two launches
        if program.states_bytes:
            self.memory = ledger.buffer("states", program.states_bytes, "the states")
            for state in program.states:
                tensor = self._tensors[state.tensor]
                self._parts[state.name] = ledger.part("states", self.memory, tensor.offset, tensor.nbytes)
            self.reset()

    def reset(self) -> None:
        """Fill all states with zeros. Raises RunError if the device fails."""
        self._torn.clear()
        for state in self._states.values():
            tensor = self._tensors[state.tensor]
            size = math.prod(tensor.shape)
            zeros = np.zeros(min(_PIECE, size), tensor.dtype)
            for first in range(0, size, _PIECE):
                self._write(state, first, zeros[: size - first])

    def read(self, names: Sequence[str] = ()) -> dict[str, Array]:
        """The states of these names (all, if there are none), the names of their inputs, in the types of the model.

        Raises:
            ValueError: an unknown name, or torn states.
            RunError: the device fails.
        """
        self._check_names(names)
        self.check_whole(names or self._states)
        return {name: self._read(self._states[name]) for name in names or self._states}

    def write(self, arrays: Mapping[str, Input]) -> None:
        """Replace states, given by the names of their inputs.

        Raises:
            ValueError: an unknown name, or an array of another shape or type; no state has changed.
            RunError: the device fails.
        """
        self._check_names(arrays)
        states = [self._states[name] for name in arrays]
        check_inputs([Port(each.name, each.shape, each.dtype, each.tensor) for each in states], arrays)
        for state in states:
            tensor = self._tensors[state.tensor]
            given = on_host(arrays[state.name]).reshape(-1)
            for first in range(0, given.size, _PIECE):
                self._write(state, first, to_device(tensor, given[first : first + _PIECE]))
            self._torn.discard(state.name)

    def tear(self) -> None:
        """Record that a run was stopped, which may have left its values in some states and earlier ones in others."""
        self._torn |= self._states.keys()

    def check_whole(self, names: Iterable[str]) -> None:
        """Raise ValueError if one of these states is torn."""
        torn = self._torn.intersection(names)
        if torn:
            raise ValueError(
                f"the state {min(torn)!r} is partly that of a run that was stopped; call reset, or set_states with all states"
            )

    def _check_names(self, names: Iterable[str]) -> None:
        unknown = [name for name in names if name not in self._states]
        if unknown:
            raise ValueError(f"the model has no state {unknown[0]!r}; it has: {', '.join(self._states) or 'none'}")

    def _write(self, state: State, first: int, data: Array) -> None:
        self._queue.write(self._parts[state.name], np.ascontiguousarray(data), offset=first * data.itemsize)

    def _read(self, state: State) -> Array:
        tensor = self._tensors[state.tensor]
        result = np.empty(math.prod(tensor.shape), numpy_dtype(state.dtype))
        piece = np.empty(min(_PIECE, result.size), tensor.dtype)
        for first in range(0, result.size, _PIECE):
            part = piece[: result.size - first]
            self._queue.read(part, self._parts[state.name], offset=first * part.itemsize)
            result[first : first + part.size] = from_device(state, part)
        return result.reshape(state.shape)

    def forget(self) -> None:
        """Drop all references to device memory. The ledger still counts it."""
        self._parts.clear()
        self.memory = None
