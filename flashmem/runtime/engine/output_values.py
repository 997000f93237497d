"""Outputs of a run that its caller did not ask for as numpy arrays: in host memory, or still on the device."""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.program.tensors import ONNX_NAMES, Port, Tensor, numpy_dtype
from flashmem.runtime.engine.device_state import DeviceInUse
from flashmem.runtime.opencl.context import Queue
from flashmem.runtime.opencl.handles import Buffer

Array = NDArray[Any]

CPU = (1, 0)
"""DLPack's type and number of the CPU."""

_OPENCL = 4
"""DLPack's type of OpenCL devices."""


class OutputValue:
    """A tensor in host memory or on a device, with the methods of ONNX Runtime's `OrtValue`; `shape` and `dtype` are numpy's.

    It is an input for any run. A run of the session that made it, with an input of the same type on the device, copies it there
    without passing through the host. numpy, PyTorch and CuPy read one in host memory without a copy (`__dlpack__`).

    `host` is its array, if it is in host memory. Memory on the device is counted in the session's budget until the value is
    garbage-collected.
    """

    def __init__(self, host: Array | None, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.host = host
        self.dtype = dtype
        self.shape = shape
        self.memory: Buffer | None = None  # on the device
        self.stored = dtype  # the type there
        self.queue: Queue | None = None  # commands that use `memory`
        self._where = "cpu"

    @classmethod
    def in_host_memory(cls, array: Array) -> OutputValue:
        """A value over the memory of `array`."""
        return cls(array, array.dtype, array.shape)

    @classmethod
    def on_device(cls, device: DeviceInUse, port: Port, tensor: Tensor) -> OutputValue:
        """Memory on `device` for the output `port`, which `tensor` holds there. Raises RunError beyond the budget."""
        made = cls(None, numpy_dtype(port.dtype), port.shape)
        ledger = device.ledger()
        made.memory = ledger.buffer("outputs", tensor.nbytes, f"the output {port.name!r} that stays on the device")
        made.stored = np.dtype(tensor.dtype)
        made.queue = device.queue
        made._where = device.device.name
        weakref.finalize(made, ledger.close).atexit = False
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, as they are stored where it is."""
        return math.prod(self.shape) * self.stored.itemsize

    def numpy(self) -> Array:
        """The array itself in host memory, or a copy of what is on the device. Raises RunError if the device fails."""
        if self.host is not None:
            return self.host
        assert self.queue is not None
        data = np.empty(self.shape, self.stored)
        if data.nbytes:
            assert self.memory is not None
            self.queue.read(data, self.memory)
        with np.errstate(over="ignore"):  # a value too large for float16 becomes infinite
            return data.astype(self.dtype, copy=False)

    def data_type(self) -> str:
        """The type as in `tensor(float)`."""
        return f"tensor({ONNX_NAMES.get(self.dtype.name, self.dtype.name)})"

    def device_name(self) -> str:
        """ "cpu" in host memory, else the name of the device."""
        return self._where

    def is_tensor(self) -> bool:
        """True: flashmem has no sequences or maps."""
        return True

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.numpy(), dtype, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU if self.host is not None else (_OPENCL, 0)

    def __dlpack__(self, **options: Any) -> Any:
        """A DLPack capsule of memory of the host; `options` are those of the array API.

        Raises:
            BufferError: the value is on the device, and the caller asks for no copy on the CPU (`dl_device`).
        """
        if self.host is None and (options.get("dl_device") != CPU or options.get("copy") is False):
            raise BufferError(f"the output is on {self._where}, whose memory no other library reads; call numpy() first")
        return self.numpy().__dlpack__(**options)

    def __repr__(self) -> str:
        return f"<OutputValue {self.data_type()} {self.shape} on {self._where}>"
