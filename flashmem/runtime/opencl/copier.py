"""Copies of weights from host memory to the device: one queue, which all loader threads feed.

OpenCL defines what a memory object holds only if one queue modifies it at a time, and if commands on other queues that use it
wait for the events of those that modified it (OpenCL 3.0, appendix A, "Shared OpenCL objects"; docs/opencl-notes.md). So every
copy has an event, for the thread that made it and for the queue of the layers.

The calls go to the OpenCL library itself. pyopencl's events are waited for once more and released with the interpreter's lock
held: where a driver has a lock too, every other thread stands still while one copies. Nor are the calls blocking ones: Intel's
runtime returns from those before the copy is made, if nobody asks for its event (docs/opencl-notes.md).
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

from flashmem.runtime.opencl import undocumented
from flashmem.runtime.opencl.binding import checked
from flashmem.runtime.opencl.context import Bytes, Context, Memory

_SIZE, _POINTER = ctypes.c_size_t, ctypes.c_void_p
_NOT_BLOCKING, _NO_EVENTS = ctypes.c_uint(0), ctypes.c_uint(0)


class CopyEvent:
    """The event of one copy. It is released with the last reference to it."""

    __slots__ = ("_library", "int_ptr")

    def __init__(self, handle: int) -> None:
        """Take over `handle`, a cl_event."""
        self.int_ptr = handle
        self._library = undocumented.library()  # not looked up when the interpreter ends

    def wait(self) -> None:
        """Flush the queue, as clWaitForEvents does, and return when the copy is done; other threads run meanwhile.

        Raises:
            RunError: the copy failed.
        """
        checked("copy weights", self._library.clWaitForEvents(ctypes.c_uint(1), (_POINTER * 1)(self.int_ptr)))

    def __del__(self) -> None:
        self._library.clReleaseEvent(_POINTER(self.int_ptr))


class Copier:
    """A queue for copies. Any thread may enqueue one. It waits for it before it writes to the source again, and before another
    queue is made to wait for it.
    """

    def __init__(self, context: Context) -> None:
        self.queue = context.queue()
        self._handle = _POINTER(self.queue.handle.int_ptr)

    def write(self, buffer: Memory, data: Bytes, *, offset: int = 0) -> CopyEvent:
        """Begin to copy contiguous host memory into a buffer, `offset` bytes into it. Raises RunError."""
        enqueue = undocumented.library().clEnqueueWriteBuffer
        return self._begun(
            "write to a buffer",
            lambda event: enqueue(
                self._handle, _POINTER(buffer.int_ptr), _NOT_BLOCKING, _SIZE(offset), _SIZE(data.nbytes), _address(data),
                _NO_EVENTS, None, event,
            ),
        )  # fmt: skip

    def write_image(self, image: Memory, data: Bytes, *, first_row: int, width: int, rows: int, row_pitch: int) -> CopyEvent:
        """Begin to copy `rows` rows of `width` texels, `row_pitch` bytes apart in host memory, into an image.

        Raises RunError.
        """
        enqueue = undocumented.library().clEnqueueWriteImage
        return self._begun(
            "write to a texture",
            lambda event: enqueue(
                self._handle, _POINTER(image.int_ptr), _NOT_BLOCKING, (_SIZE * 3)(0, first_row, 0), (_SIZE * 3)(width, rows, 1),
                _SIZE(row_pitch), _SIZE(0), _address(data), _NO_EVENTS, None, event,
            ),
        )  # fmt: skip

    def _begun(self, what: str, enqueue: Callable[[Any], int]) -> CopyEvent:
        event = _POINTER()
        if enqueue(ctypes.byref(event)):
            gc.collect()  # memory objects that nobody holds any more
            checked(what, enqueue(ctypes.byref(event)))
        return CopyEvent(event.value or 0)


def _address(data: Bytes) -> ctypes.c_void_p:
    return _POINTER(data.__array_interface__["data"][0])
