"""Copies of weights from host to device memory, on one queue for all threads.

OpenCL defines the content of a memory object only under two conditions. One queue at a time modifies it, and commands on other
queues wait for the events of those modifications (OpenCL 3.0, appendix A, "Shared OpenCL objects";
docs/research/opencl-notes.md). So every copy has an event, for its thread and for the queue of the launches.

The calls go to the OpenCL library through ctypes. The reason is that pyopencl waits for its events a second time, and releases
them with the interpreter lock held. If the driver has a lock too, all other threads stop during a copy. The calls are not
blocking ones: Intel's runtime returns from a blocking copy too early if its event is not requested
(docs/research/opencl-notes.md).

A device with memory of its own copies later, by itself. There the calls keep the interpreter lock, but for waits: a call takes
7 us, and to get the lock back from other threads takes 40 to 250.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from flashmem.program.tensors import Slice
from flashmem.runtime.opencl import undocumented
from flashmem.runtime.opencl.binding import checked
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.opencl.handles import DeviceMemory, Event

_SIZE = ctypes.c_size_t
_POINTER = ctypes.c_void_p
_NUMBER = ctypes.c_uint
_ONE = _POINTER * 1
_WAITS = (_NUMBER, _POINTER, _POINTER)  # the number of events to wait for, the events, and a reference to the command's own
_STATUS = ctypes.c_uint(0x11D3)  # CL_EVENT_COMMAND_EXECUTION_STATUS
_START = ctypes.c_uint(0x1282)  # CL_PROFILING_COMMAND_START
_END = ctypes.c_uint(0x1283)  # CL_PROFILING_COMMAND_END


class CopyEvent:
    """The event of one copy, released with its last reference."""

    __slots__ = ("__weakref__", "_library", "int_ptr")

    def __init__(self, handle: int, library: Any) -> None:
        """Take ownership of `handle`, a cl_event; `library` releases it."""
        self.int_ptr = handle
        self._library = library
        release = _Release(self, library.clReleaseEvent)
        release._as_parameter_ = _POINTER(handle)
        _RELEASES.add(release)
        if len(_RELEASES) > 2 * _left:
            _forget_releases()

    def wait(self, *, ended: bool = False) -> None:
        """Flush the queue, as clWaitForEvents does, and wait for the copy. Other threads run meanwhile, unless it has `ended`.

        Raises:
            RunError: the copy failed.
        """
        wait_for_copies([self], self._library if ended else None)

    @property
    def ended(self) -> bool:
        """Whether the copy has completed or failed. Only after `wait` may the host write to its source again."""
        status = ctypes.c_int()
        size = _SIZE(ctypes.sizeof(ctypes.c_int))
        code = self._library.clGetEventInfo(_POINTER(self.int_ptr), _STATUS, size, ctypes.byref(status), None)
        checked("ask how far a copy is", code)
        return status.value <= 0  # CL_COMPLETE, or an error

    def seconds(self) -> tuple[float, float]:
        """Start and end of the completed copy, in seconds of the device's clock; its queue profiles."""
        return self._time(_START), self._time(_END)

    def _time(self, what: ctypes.c_uint) -> float:
        time = ctypes.c_ulonglong()
        size = _SIZE(ctypes.sizeof(ctypes.c_ulonglong))
        code = self._library.clGetEventProfilingInfo(_POINTER(self.int_ptr), what, size, ctypes.byref(time), None)
        checked("read a command's times", code)
        return time.value * 1e-9


class _Release(weakref.ref[CopyEvent]):
    """Calls clReleaseEvent, with the handle as its argument, when a `CopyEvent` is gone.

    No function of Python runs then, as `__del__` would be: a Ctrl-C that arrives in one is lost, and the event with it.
    """

    __slots__ = ("_as_parameter_",)
    _as_parameter_: ctypes.c_void_p


_RELEASES: set[_Release] = set()
"""Of all events that are left, and of some that are gone."""

_left = 1024
"""Of these, the ones whose event was left at the last look, or a few more."""


def _forget_releases() -> None:
    global _left
    _RELEASES.difference_update([each for each in list(_RELEASES) if each() is None])
    _left = max(1024, len(_RELEASES))


def wait_for_copies(copies: Sequence[CopyEvent], library: Any = None) -> None:
    """Wait for several copies, in one call of `library`; by default, other threads run meanwhile.

    Raises:
        RunError: one failed.
    """
    if copies:
        events = (_POINTER * len(copies))(*(copy.int_ptr for copy in copies))
        checked("copy weights", (library or undocumented.library()).clWaitForEvents(_NUMBER(len(copies)), events))


class PreparedCopy:
    """A copy from pinned or mapped host memory that is started again and again."""

    __slots__ = ("_arguments", "_enqueue", "_library", "_what")

    def __init__(self, what: str, enqueue: Callable[..., int], arguments: tuple[Any, ...], library: Any) -> None:
        """`enqueue` takes `arguments`, then the address of the host memory, then what to wait for and the event."""
        self._what = what
        self._enqueue = enqueue
        self._arguments = arguments
        self._library = library

    def __call__(self, address: int, behind: Event | None = None) -> CopyEvent:
        """Start it from host memory at `address`, once the event `behind` is complete. Raises RunError."""
        event = _POINTER()
        arguments = self._arguments
        enqueue = self._enqueue
        waits = (0, None) if behind is None else (1, _ONE(behind.int_ptr))
        if enqueue(*arguments, address, *waits, ctypes.byref(event)):
            gc.collect()  # frees unreferenced memory objects
            checked(self._what, enqueue(*arguments, address, *waits, ctypes.byref(event)))
        return CopyEvent(event.value or 0, self._library)


class Copier:
    """A queue for copies that any thread may use.

    A thread must wait for its copy before it writes to the source again, and wait or flush before another queue waits for the
    event.
    """

    def __init__(self, context: Context, *, ahead: bool = False) -> None:
        """`ahead`: the device copies later, by itself; the copies have times."""
        self.queue = context.queue(profiling=ahead)
        self._handle: int = self.queue.handle.int_ptr
        self._library = library = undocumented.library(locked=ahead)
        self._write = library.clEnqueueWriteBuffer
        self._write.argtypes = (_POINTER, _POINTER, _NUMBER, _SIZE, _SIZE, _POINTER, *_WAITS)
        self._write_image = library.clEnqueueWriteImage
        self._write_image.argtypes = (_POINTER, _POINTER, _NUMBER, _POINTER, _POINTER, _SIZE, _SIZE, _POINTER, *_WAITS)
        self._flush = library.clFlush
        self._flush.argtypes = (_POINTER,)

    def prepare(self, buffer: DeviceMemory, offset: int, nbytes: int) -> PreparedCopy:
        """A copy of `nbytes` bytes to byte `offset` of a buffer."""
        arguments = self._handle, buffer.int_ptr, 0, offset, nbytes
        return PreparedCopy("write to a buffer", self._write, arguments, self._library)

    def prepare_slice(self, memory: DeviceMemory, part: Slice, first: int, nbytes: int) -> PreparedCopy:
        """Prepare a copy of `nbytes` bytes of the slice from byte `first` on to the slice's place; of an image, whole rows."""
        if not part.is_image:
            return self.prepare(memory, first, nbytes)
        pitch = part.row_pitch
        return self.prepare_image(memory, first_row=first // pitch, width=part.width, rows=nbytes // pitch, row_pitch=pitch)

    def prepare_image(self, image: DeviceMemory, *, first_row: int, width: int, rows: int, row_pitch: int) -> PreparedCopy:
        """A copy of `rows` rows of `width` texels, `row_pitch` bytes apart, to an image."""
        origin = (_SIZE * 3)(0, first_row, 0)
        region = (_SIZE * 3)(width, rows, 1)
        arguments = self._handle, image.int_ptr, 0, origin, region, row_pitch, 0
        return PreparedCopy("write to a texture", self._write_image, arguments, self._library)

    def flush(self) -> None:
        """Let another queue wait for the events of all copies so far, which no thread waits for first. Raises RunError."""
        checked("flush copies", self._flush(self._handle))

    def finish(self) -> None:
        """Wait for all copies, also those whose events are lost. Raises RunError."""
        self.queue.finish()
