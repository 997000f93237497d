"""Kernel launches through ctypes, and recordings of many launches that a driver replays in one call.

A recording holds the constant data of a run: kernels with their arguments, and sizes. Two extensions create them:
cl_khr_command_buffer (0.9 and 1.0, with the same calls), and Qualcomm's cl_qcom_recordable_queues, written from its published
header (cl_ext_qcom.h) and never run on a device.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from flashmem.base.errors import RunError
from flashmem.runtime.opencl import undocumented
from flashmem.runtime.opencl.binding import checked
from flashmem.runtime.opencl.handles import Handle, KernelObject

COMMAND_BUFFERS = "cl_khr_command_buffer"
RECORDABLE_QUEUES = "cl_qcom_recordable_queues"

_POINTER = ctypes.c_void_p
_NUMBER = ctypes.c_uint
_CODE = ctypes.c_int
_SIZE = ctypes.c_size_t
_NO_EVENTS = ctypes.c_uint(0)
_QUEUE_RECORDABLE = 1 << 30  # CL_QUEUE_RECORDABLE_QCOM
_RECORDABLE_QUEUE_MAX_SIZE = 0x41DE  # CL_DEVICE_..._MAX_SIZE


@functools.lru_cache(4096)
def _sizes(numbers: tuple[int, ...]) -> Any:
    """The numbers as a C array, shared by launches of equal sizes."""
    return (ctypes.c_size_t * len(numbers))(*numbers)


class PreparedLaunch:
    """One launch of a kernel on a queue: its sizes, and its arguments for the C call, converted once."""

    __slots__ = ("arguments", "global_size", "kernel", "local_size")

    def __init__(
        self, queue: Handle, kernel: KernelObject, global_size: tuple[int, ...], local_size: tuple[int, ...] | None
    ) -> None:
        self.kernel = kernel
        self.global_size = global_size
        self.local_size = local_size
        self.arguments = (
            ctypes.c_void_p(queue.int_ptr), ctypes.c_void_p(kernel.int_ptr), ctypes.c_uint(len(global_size)), None,
            _sizes(global_size), _sizes(local_size) if local_size else None, _NO_EVENTS, None, None,
        )  # fmt: skip


def enqueue_function(alone: bool) -> Callable[..., int]:
    """The function clEnqueueNDRangeKernel. With `alone`, its call keeps the interpreter lock, which is faster.

    It must release the lock if a launch may wait for what another thread has yet to do: a driver may make the call wait too.
    """
    enqueue: Callable[..., int] = undocumented.library(locked=alone).clEnqueueNDRangeKernel
    return enqueue


Find = Callable[[str], int | None]
"""The address of an OpenCL function by its name; None or 0 if the function does not exist."""


def functions_of(platform: Handle) -> Find:
    """A lookup of functions, in the loader first, then in a platform's extensions."""
    library = undocumented.library()
    extension = library.clGetExtensionFunctionAddressForPlatform
    extension.restype = ctypes.c_void_p

    def find(name: str) -> int | None:
        symbol = getattr(library, name, None)
        address: int | None = ctypes.cast(symbol, _POINTER).value if symbol else None
        return address or extension(_POINTER(platform.int_ptr), name.encode())

    return find


def not_recorded(error: RunError) -> str:
    """The warning for a driver that has an extension for recording but refuses to record."""
    return f"{error}, so kernels are launched one by one instead of being recorded; answers are the same"


class Recording:
    """Launches recorded by a driver, released with the last reference."""

    def __init__(self, launches: Sequence[PreparedLaunch], play: Callable[[Any], int], release: Callable[[], int]) -> None:
        self._launches = launches  # keeps their kernels alive
        self._play = play
        weakref.finalize(self, release)

    def play(self) -> int:
        """Enqueue all launches in order; the cl_event of the last one, which the caller owns.

        The previous replay must have completed. Raises RunError.
        """
        event = _POINTER()
        checked("enqueue recorded launches", self._play(ctypes.byref(event)))
        return int(event.value or 0)


class Recorder(Protocol):
    """Records launches of one queue, at most `most` in one recording."""

    most: int

    def record(self, launches: Sequence[PreparedLaunch]) -> Recording:
        """Record `launches`. Raises RunError if the driver refuses."""


class CommandBuffers:
    """A recorder that uses cl_khr_command_buffer. The queue is in order, and so are its recordings."""

    most = sys.maxsize

    def __init__(self, find: Find, queue: int) -> None:
        """Raises RunError: the driver lacks a function."""
        self._queues = (_POINTER * 1)(queue)
        self._create = c_function(find, "clCreateCommandBufferKHR", _POINTER, _NUMBER, *[_POINTER] * 3)
        self._add = c_function(
            find, "clCommandNDRangeKernelKHR", _CODE, *[_POINTER] * 4, _NUMBER, *[_POINTER] * 3, _NUMBER, *[_POINTER] * 3
        )
        self._finalize = c_function(find, "clFinalizeCommandBufferKHR", _CODE, _POINTER)
        self._enqueue = c_function(find, "clEnqueueCommandBufferKHR", _CODE, _NUMBER, *[_POINTER] * 2, _NUMBER, *[_POINTER] * 2)
        self._release = c_function(find, "clReleaseCommandBufferKHR", _CODE, _POINTER)

    def record(self, launches: Sequence[PreparedLaunch]) -> Recording:
        """See `Recorder`."""
        error = _CODE()
        enqueue = self._enqueue
        buffer = self._create(1, self._queues, None, ctypes.byref(error))
        checked("make a command buffer", error.value)
        recording = Recording(
            launches,
            lambda event: enqueue(0, None, buffer, 0, None, event),
            functools.partial(self._release, buffer),
        )
        for launch in launches:
            _, kernel, dimensions, offset, whole, group, *_ = launch.arguments
            code = self._add(buffer, None, None, kernel, dimensions, offset, whole, group, 0, None, None, None)
            checked("record a launch", code)
        checked("end a command buffer", self._finalize(buffer))
        return recording


class RecordableQueues:
    """A recorder that uses cl_qcom_recordable_queues: a special queue records commands instead of running them. Untested."""

    def __init__(self, find: Find, queue: int, context: int, device: int) -> None:
        """Raises RunError: the driver lacks a function, or refuses such a queue."""
        self._queue = queue
        self._new = c_function(find, "clNewRecordingQCOM", _POINTER, *[_POINTER] * 2)
        self._end = c_function(find, "clEndRecordingQCOM", _CODE, _POINTER)
        self._release = c_function(find, "clReleaseRecordingQCOM", _CODE, _POINTER)
        updates = [_SIZE, _POINTER] * 4  # of arguments, offsets, global and local sizes: no updates
        self._play = c_function(find, "clEnqueueRecordingQCOM", _CODE, *[_POINTER] * 2, *updates, _NUMBER, *[_POINTER] * 2)
        self._enqueue = c_function(
            find, "clEnqueueNDRangeKernel", _CODE, *[_POINTER] * 2, _NUMBER, *[_POINTER] * 3, _NUMBER, *[_POINTER] * 2
        )
        information = c_function(find, "clGetDeviceInfo", _CODE, _POINTER, _NUMBER, _SIZE, *[_POINTER] * 2)
        make = c_function(find, "clCreateCommandQueue", _POINTER, *[_POINTER] * 2, ctypes.c_ulonglong, _POINTER)
        let_go = c_function(find, "clReleaseCommandQueue", _CODE, _POINTER)
        most = ctypes.c_uint()
        error = _CODE()
        code = information(device, _RECORDABLE_QUEUE_MAX_SIZE, ctypes.sizeof(most), ctypes.byref(most), None)
        checked("ask how much can be recorded", code)
        self.most = most.value
        self._recording_queue = make(context, device, _QUEUE_RECORDABLE, ctypes.byref(error))
        checked("create a recordable queue", error.value)
        weakref.finalize(self, let_go, self._recording_queue)

    def record(self, launches: Sequence[PreparedLaunch]) -> Recording:
        """See `Recorder`."""
        error = _CODE()
        play = self._play
        queue = self._queue
        handle = self._new(self._recording_queue, ctypes.byref(error))
        checked("begin a recording", error.value)
        recording = Recording(
            launches,
            lambda event: play(queue, handle, *(0, None) * 4, 0, None, event),
            functools.partial(self._release, handle),
        )
        codes = [self._enqueue(self._recording_queue, *launch.arguments[1:]) for launch in launches]
        ended = self._end(handle)
        for code in codes:
            checked("record a launch", code)
        checked("end a recording", ended)
        return recording


def c_function(find: Find, name: str, result: Any, *parameters: Any) -> Callable[..., Any]:
    """The C function `name`, with the types of its result and its parameters. Raises RunError: the driver lacks it."""
    address = find(name)
    if not address:
        raise RunError(f"the driver lacks {name}")
    return ctypes.CFUNCTYPE(result, *parameters)(address)
