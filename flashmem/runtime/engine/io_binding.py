"""Inputs and outputs bound to memory before a run, as with ONNX Runtime's `io_binding`."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from flashmem.runtime.engine.given_arrays import described
from flashmem.runtime.engine.output_values import OutputValue

Array = NDArray[Any]

CPU_NAME = "cpu"


class IOBinding:
    """Inputs and outputs of a session's next runs, from `Session.io_binding`. Pass it to `Session.run_with_iobinding`.

    An output that is bound to the device stays there. Bound as an input of a later run, it is copied on the device: it does not
    pass through the host. On a device that computes in host memory (a CPU), that is where the output is.

    `device_type` is "cpu" for host memory, and any of `device_types` for the memory of the session's device.
    """

    device_types = ("opencl", "gpu", "cuda")
    """Names of the session's device. The last two are those of programs written for ONNX Runtime."""

    def __init__(self) -> None:
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, Array | None] = {}  # in host memory, by name: the array to fill, or None for a new one
        self.kept: list[str] = []  # outputs that stay on the device
        self.values: dict[str, OutputValue] = {}  # of the last run
        self._order: list[str] = []

    def bind_cpu_input(self, name: str, array: Any) -> None:
        """Bind an input to an array, or to anything else that `Session.run` accepts. It is read when a run begins."""
        self.inputs[_text(name)] = array

    def bind_ortvalue_input(self, name: str, value: OutputValue) -> None:
        """Bind an input to an output of an earlier run, wherever that is."""
        self.inputs[_text(name)] = value

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: DTypeLike, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Bind an input to host memory of elements in the order of C, from the address `buffer_ptr` on, which the caller keeps.

        Raises:
            ValueError: memory of a device, which has no address: use `bind_ortvalue_input`.
        """
        self._check_device(device_type)
        if device_type != CPU_NAME:
            raise ValueError(f"input {name!r} is bound to an address on {device_type!r}; call bind_ortvalue_input")
        self.inputs[_text(name)] = _at(buffer_ptr, element_type, shape)

    def bind_output(
        self,
        name: str,
        device_type: str = CPU_NAME,
        device_id: int = 0,
        element_type: DTypeLike | None = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Bind an output: to a new array, to the device, or to host memory from the address `buffer_ptr` on.

        The last one needs `element_type` and `shape`, which must be the output's.

        Raises:
            ValueError: an unknown device, an address on the device, or an address without type and shape.
        """
        self._check_device(device_type)
        target = None
        if buffer_ptr is not None:
            if device_type != CPU_NAME:
                raise ValueError(f"output {name!r} is bound to an address on {device_type!r}; leave buffer_ptr out")
            if element_type is None or shape is None:
                raise ValueError(f"output {name!r} is bound to an address; give its element_type and its shape too")
            target = _at(buffer_ptr, element_type, shape)
        self._forget(_text(name))
        self._order.append(name)
        if device_type == CPU_NAME:
            self.outputs[name] = target
        else:
            self.kept.append(name)

    def _check_device(self, device_type: str) -> None:
        known = (CPU_NAME, *self.device_types)
        if device_type not in known:
            raise ValueError(f"the device type {device_type!r} is unknown; name one of: {', '.join(known)}")

    def _forget(self, name: str) -> None:
        self.outputs.pop(name, None)
        self.kept = [each for each in self.kept if each != name]
        self._order = [each for each in self._order if each != name]

    def clear_binding_inputs(self) -> None:
        """Forget all inputs."""
        self.inputs = {}

    def clear_binding_outputs(self) -> None:
        """Forget all outputs, and the values of the last run."""
        self.outputs = {}
        self.kept = []
        self._order = []
        self.values = {}

    def get_outputs(self) -> list[OutputValue]:
        """The outputs of the last run, in the order of their binding."""
        return [self.values[name] for name in self._order if name in self.values]

    def copy_outputs_to_cpu(self) -> list[Array]:
        """The outputs of the last run as arrays, in the order of their binding. Raises RunError if the device fails."""
        return [value.numpy() for value in self.get_outputs()]

    def run(self, run: Callable[[Sequence[str], Sequence[str]], tuple[Sequence[Array], Sequence[OutputValue]]]) -> None:
        """Make a run. `run` is called with the outputs for host memory and those for the device, and returns both.

        Raises:
            ValueError: no output is bound, or one is bound to memory of another type or shape.
        """
        if not self._order:
            raise ValueError("no output is bound; call bind_output for at least one")
        names = list(self.outputs)
        arrays, values = run(names, self.kept)
        made = {name: OutputValue.in_host_memory(self._filled(name, array)) for name, array in zip(names, arrays, strict=True)}
        self.values = made | dict(zip(self.kept, values, strict=True))

    def _filled(self, name: str, array: Array) -> Array:
        target = self.outputs[name]
        if target is None:
            return array
        if (target.dtype, target.shape) != (array.dtype, array.shape):
            raise ValueError(
                f"output {name!r} is bound to memory for {target.dtype} {target.shape}; it is {array.dtype} {array.shape}"
            )
        np.copyto(target, array)
        return target


def _text(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError(f"an input or output is called by {described(name)}; call it by its name as text")
    return name


def _at(address: int, element_type: DTypeLike, shape: Sequence[int]) -> Array:
    """The array in host memory from `address` on."""
    dtype = np.dtype(element_type)
    sizes = tuple(int(size) for size in shape)
    nbytes = math.prod(sizes) * dtype.itemsize
    if not nbytes:
        return np.empty(sizes, dtype)
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    array: Array = np.frombuffer(memory, dtype).reshape(sizes)
    return array
