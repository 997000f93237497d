"""Copies of weights from host to device memory, on one queue that all loader threads share.

OpenCL defines the content of a memory object only under two conditions. One queue at a time modifies it, and commands on other
queues wait for the events of those modifications (OpenCL 3.0, appendix A, "Shared OpenCL objects";
docs/research/opencl-notes.md). So every copy has an event, for its thread and for the queue of the launches.

The calls go to the OpenCL library through ctypes. The reason is that pyopencl waits for its events a second time, and releases
them with the interpreter lock held. If the driver has a lock too, all other threads stop during a copy. The calls are not
blocking ones: Intel's runtime returns from a blocking copy too early if its event is not requested
(docs/research/opencl-notes.md).

A device with memory of its own copies later, by itself. There the calls keep the interpreter lock, but for waits: a call takes
7 us, and to get the lock back from other loader threads takes 40 to 250.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

from flashmem.runtime.opencl import undocumented
from flashmem.runtime.opencl.binding import checked
from flashmem.runtime.opencl.context import Bytes, Context, Event, Memory
from flashmem.runtime.opencl.shared_memory import NO_EVENTS, SharedMemory, WaitList, address_of, enqueue_copy

_SIZE, _POINTER = ctypes.c_size_t, ctypes.c_void_p
_NOT_BLOCKING = ctypes.c_uint(0)
_START, _END = ctypes.c_uint(0x1282), ctypes.c_uint(0x1283)  # CL_PROFILING_COMMAND_START, CL_PROFILING_COMMAND_END


class CopyEvent:
    """The event of one copy, released with its last reference."""

    __slots__ = ("_library", "int_ptr")

    def __init__(self, handle: int, library: Any) -> None:
        """Take ownership of `handle`, a cl_event; `library` releases it."""
        self.int_ptr = handle
        self._library = library  # a lookup can fail while the interpreter shuts down

    def wait(self) -> None:
        """Flush the queue, as clWaitForEvents does, and wait for the copy; other threads run meanwhile.

        Raises:
            RunError: the copy failed.
        """
        checked("copy weights", undocumented.library().clWaitForEvents(ctypes.c_uint(1), (_POINTER * 1)(self.int_ptr)))

    def seconds(self) -> tuple[float, float]:
        """Start and end of the completed copy, in seconds of the device's clock; its queue profiles."""
        return self._time(_START), self._time(_END)

    def _time(self, what: ctypes.c_uint) -> float:
        time, size = ctypes.c_ulonglong(), _SIZE(ctypes.sizeof(ctypes.c_ulonglong))
        code = self._library.clGetEventProfilingInfo(_POINTER(self.int_ptr), what, size, ctypes.byref(time), None)
        checked("read a command's times", code)
        return time.value * 1e-9

    def __del__(self) -> None:
        self._library.clReleaseEvent(_POINTER(self.int_ptr))


class Copier:
    """A queue for copies that any thread may use.

    A thread must wait for its copy before it writes to the source again, and wait or flush before another queue waits for the
    event.
    """

    def __init__(self, context: Context, *, ahead: bool = False) -> None:
        """`ahead`: the device copies later, by itself; the copies have times."""
        self.queue = context.queue(profiling=ahead)
        self._handle = _POINTER(self.queue.handle.int_ptr)
        self._library = undocumented.library(locked=ahead)

    def write(self, buffer: Memory, data: Bytes, *, offset: int = 0, behind: Event | None = None) -> CopyEvent:
        """Start a copy of contiguous host memory to byte `offset` of a buffer, once the event `behind` is complete.

        Raises RunError.
        """
        events = _wait_list(behind)
        if isinstance(buffer, SharedMemory):
            queue, target = self.queue.handle.int_ptr, buffer.int_ptr + offset
            return self._begun(
                "write to a buffer",
                lambda event: enqueue_copy(
                    queue, target, address_of(data), data.nbytes, event, events=events, library=self._library
                ),
            )
        enqueue = self._library.clEnqueueWriteBuffer
        return self._begun(
            "write to a buffer",
            lambda event: enqueue(
                self._handle, _POINTER(buffer.int_ptr), _NOT_BLOCKING, _SIZE(offset), _SIZE(data.nbytes), _address(data),
                *events, event,
            ),
        )  # fmt: skip

    def write_image(
        self,
        image: Memory,
        data: Bytes,
        *,
        first_row: int,
        width: int,
        rows: int,
        row_pitch: int,
        behind: Event | None = None,
    ) -> CopyEvent:
        """Start a copy of `rows` rows of `width` texels from host memory, `row_pitch` bytes apart, to an image; as `write`.

        Raises RunError.
        """
        events = _wait_list(behind)
        enqueue = self._library.clEnqueueWriteImage
        return self._begun(
            "write to a texture",
            lambda event: enqueue(
                self._handle, _POINTER(image.int_ptr), _NOT_BLOCKING, (_SIZE * 3)(0, first_row, 0), (_SIZE * 3)(width, rows, 1),
                _SIZE(row_pitch), _SIZE(0), _address(data), *events, event,
            ),
        )  # fmt: skip

    def _begun(self, what: str, enqueue: Callable[[Any], int]) -> CopyEvent:
        event = _POINTER()
        if enqueue(ctypes.byref(event)):
            gc.collect()  # frees unreferenced memory objects
            checked(what, enqueue(ctypes.byref(event)))
        return CopyEvent(event.value or 0, self._library)

    def flush(self) -> None:
        """Let another queue wait for the events of all copies so far, which no thread waits for first. Raises RunError."""
        checked("flush copies", self._library.clFlush(self._handle))


def _wait_list(event: Event | None) -> WaitList:
    return NO_EVENTS if event is None else (ctypes.c_uint(1), (_POINTER * 1)(event.int_ptr))


def _address(data: Bytes) -> ctypes.c_void_p:
    return _POINTER(data.__array_interface__["data"][0])
