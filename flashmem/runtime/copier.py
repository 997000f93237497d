"""Copies from host memory to the device, as loader threads make them: each is waited for, and nothing else meanwhile.

The calls go to the OpenCL library itself. pyopencl's events are waited for once more and released with the interpreter's lock
held: where a driver has a lock too, every other thread stands still while one copies. Nor are the calls blocking ones: Intel's
runtime returns from those before the copy is made, if nobody asks for its event (docs/opencl-notes.md).
"""

from __future__ import annotations

import ctypes

from flashmem.runtime import binding
from flashmem.runtime.opencl import Bytes, Context, Memory

_SIZE, _POINTER = ctypes.c_size_t, ctypes.c_void_p
_NOT_BLOCKING, _NO_EVENTS = ctypes.c_uint(0), ctypes.c_uint(0)


class Copier:
    """Copies on a queue of its own, one after the other: one for each thread."""

    def __init__(self, context: Context) -> None:
        self.queue = context.queue()
        self._handle = _POINTER(self.queue.handle.int_ptr)

    def write(self, buffer: Memory, data: Bytes, *, offset: int = 0) -> None:
        """Copy contiguous host memory into a buffer, `offset` bytes into it. Raises RunError."""
        failed = binding.library().clEnqueueWriteBuffer(
            self._handle, _POINTER(buffer.int_ptr), _NOT_BLOCKING, _SIZE(offset), _SIZE(data.nbytes), _address(data),
            _NO_EVENTS, None, None,
        )  # fmt: skip
        if failed:  # pyopencl frees what nobody holds any more and tries again, or says what is wrong
            self.queue.write(buffer, data, offset=offset)
        else:
            self._finish()

    def write_image(self, image: Memory, data: Bytes, *, first_row: int, width: int, rows: int, row_pitch: int) -> None:
        """Copy `rows` rows of `width` texels, `row_pitch` bytes apart in host memory, into an image. Raises RunError."""
        failed = binding.library().clEnqueueWriteImage(
            self._handle, _POINTER(image.int_ptr), _NOT_BLOCKING, (_SIZE * 3)(0, first_row, 0), (_SIZE * 3)(width, rows, 1),
            _SIZE(row_pitch), _SIZE(0), _address(data), _NO_EVENTS, None, None,
        )  # fmt: skip
        if failed:
            self.queue.write_image(image, data, first_row=first_row, width=width, rows=rows, row_pitch=row_pitch)
        else:
            self._finish()

    def _finish(self) -> None:
        if binding.library().clFinish(self._handle):
            self.queue.finish()  # says what is wrong


def _address(data: Bytes) -> ctypes.c_void_p:
    return _POINTER(data.__array_interface__["data"][0])
