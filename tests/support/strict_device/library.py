"""Replacement of the OpenCL library behind ctypes: handles and events are numbers."""
# ruff: noqa: N802 - the names are OpenCL's

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.strict_device import transfers
from tests.support.strict_device.calls import StrictOpenCL
from tests.support.strict_device.dot_products import KHRONOS
from tests.support.strict_device.objects import StrictBuffer, StrictEvent
from tests.support.strict_device.programs import launch
from tests.support.strict_device.vendors import Vendors

_IMAGE_PITCH_ALIGNMENT, _IMAGE_BASE_ALIGNMENT, _SVM_CAPABILITIES = 0x104A, 0x104B, 0x1053
_DOT_PRODUCTS, _DOT_ACCELERATION = 0x1073, 0x1075
_INVALID_VALUE = -30
_CREATE_TYPE_REGION = 0x1220
_EVENT_COMMAND_EXECUTION_STATUS = 0x11D3
_PROFILING_COMMAND_START, _PROFILING_COMMAND_END = 0x1282, 0x1283


class StrictLibrary:
    """The library's functions, called as by ctypes. They raise if a call breaks a rule."""

    def __init__(self, opencl: StrictOpenCL) -> None:
        self._world = opencl.world
        self._lock = threading.Lock()
        self._functions: dict[str, _Function] = {}
        self._events: dict[int, tuple[StrictEvent, int]] = {}  # by handle: the number of the program's references
        self._buffers: dict[int, StrictBuffer] = {}  # created here: nobody else references them
        self._vendors = Vendors(opencl.world, self._gave)

    def __getattr__(self, name: str) -> _Function:
        method = getattr(type(self), f"_{name}", None)
        if method is None:
            raise AttributeError(f"the strict device does not know {name}: teach it the rules of that call")
        return self._functions.setdefault(name, _Function(method.__get__(self), partial(self._vendors.address, name)))

    def _clGetExtensionFunctionAddressForPlatform(self, _: Any, name: Any) -> int:
        return self._vendors.address(name.decode())

    def _clGetDeviceInfo(self, device: Any, parameter: Any, size: Any, value: Any, _: Any) -> int:
        """The alignments of images over buffers; dot products; no shared virtual memory: no rule could check its addresses."""
        profile = self._world.profile
        if _number(parameter) in (_DOT_PRODUCTS, _DOT_ACCELERATION) and KHRONOS not in profile.extensions:
            return _INVALID_VALUE
        if _number(parameter) == _DOT_PRODUCTS:
            value._obj.value = 3
            return 0
        if _number(parameter) == _DOT_ACCELERATION:
            assert _number(size) == 6 * 4
            for index, fast in enumerate(profile.fast_dot_products):
                value._obj[index] = fast
            return 0
        known = {_IMAGE_PITCH_ALIGNMENT: profile.image_pitch, _IMAGE_BASE_ALIGNMENT: profile.image_base, _SVM_CAPABILITIES: 0}
        value._obj.value = known[_number(parameter)]
        return 0

    def _clGetPlatformIDs(self, _: Any, platforms: Any, count: Any) -> int:
        assert platforms is None
        count._obj.value = 1
        return 0

    def _clCreateContext(self, properties: Any, count: Any, devices: Any, notify: Any, _: Any, error: Any) -> int:
        assert properties is None and notify is None and _number(count) == 1
        assert devices[0] == self._world.device.int_ptr
        error._obj.value = 0
        return int(self._world.context.int_ptr)

    # -- commands

    def _clEnqueueNDRangeKernel(
        self, queue: Any, kernel: Any, _: Any, offset: Any, sizes: Any, groups: Any, count: Any, waits: Any, event: Any
    ) -> int:
        assert offset is None
        awaited = self._awaited(count, waits)
        launched = launch(self._handle(queue), self._handle(kernel), tuple(sizes), tuple(groups) if groups else None, awaited)
        return self._gave(event, launched)

    def _clEnqueueWriteBuffer(
        self, queue: Any, buffer: Any, blocking: Any, offset: Any, size: Any, data: Any, count: Any, waits: Any, event: Any
    ) -> int:
        written = transfers.write_buffer(
            self._handle(queue),
            self._handle(buffer),
            _host(data, _number(size)),
            _number(offset),
            self._awaited(count, waits),
            blocking=bool(_number(blocking)),
            raw=True,
        )
        return self._gave(event, written)

    def _clEnqueueReadBuffer(
        self, queue: Any, buffer: Any, blocking: Any, offset: Any, size: Any, data: Any, count: Any, waits: Any, event: Any
    ) -> int:
        read = transfers.read_buffer(
            self._handle(queue),
            self._handle(buffer),
            _host(data, _number(size)),
            _number(offset),
            self._awaited(count, waits),
            blocking=bool(_number(blocking)),
        )
        return self._gave(event, read)

    def _clEnqueueWriteImage(
        self,
        queue: Any,
        image: Any,
        blocking: Any,
        origin: Any,
        region: Any,
        row_pitch: Any,
        slice_pitch: Any,
        data: Any,
        count: Any,
        waits: Any,
        event: Any,
    ) -> int:
        assert not _number(slice_pitch)
        target, (width, rows, _) = self._handle(image), region
        pitch = _number(row_pitch) or width * target.texel
        written = transfers.write_image(
            self._handle(queue),
            target,
            tuple(origin),
            tuple(region),
            _host(data, pitch * (rows - 1) + width * target.texel),
            pitch,
            self._awaited(count, waits),
            blocking=bool(_number(blocking)),
            raw=True,
        )
        return self._gave(event, written)

    def _clEnqueueMarkerWithWaitList(self, queue: Any, count: Any, waits: Any, event: Any) -> int:
        return self._gave(event, transfers.marker(self._handle(queue), self._awaited(count, waits)))

    def _clEnqueueBarrierWithWaitList(self, queue: Any, count: Any, waits: Any, event: Any) -> int:
        return self._gave(event, transfers.barrier(self._handle(queue), self._awaited(count, waits)))

    def _clFlush(self, queue: Any) -> int:
        self._handle(queue).flush()
        return 0

    def _clFinish(self, queue: Any) -> int:
        self._handle(queue).finish()
        return 0

    # -- events

    def _clWaitForEvents(self, count: Any, events: Any) -> int:
        for each in self._awaited(count, events):
            each.wait()
        return 0

    def _clGetEventInfo(self, event: Any, parameter: Any, size: Any, value: Any, _: Any) -> int:
        assert _number(parameter) == _EVENT_COMMAND_EXECUTION_STATUS
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = self._event(_number(event)).command_execution_status
        return 0

    def _clGetEventProfilingInfo(self, event: Any, parameter: Any, size: Any, value: Any, _: Any) -> int:
        times = self._event(_number(event)).profile
        time = {_PROFILING_COMMAND_START: lambda: times.start, _PROFILING_COMMAND_END: lambda: times.end}[_number(parameter)]()
        assert _number(size) == ctypes.sizeof(ctypes.c_ulonglong)
        ctypes.cast(value, ctypes.POINTER(ctypes.c_ulonglong))[0] = time
        return 0

    def _clRetainEvent(self, event: Any) -> int:
        return self._count_event(_number(event), 1)

    def _clReleaseEvent(self, event: Any) -> int:
        return self._count_event(_number(event), -1)

    def _count_event(self, handle: int, change: int) -> int:
        with self._lock:
            if handle in self._events:
                event, count = self._events[handle]
                if count + change:
                    self._events[handle] = event, count + change
                else:
                    del self._events[handle]
                return 0
        self._world.rules.broke("released", f"an event that is nobody's any more is retained or released: {handle:#x}")

    def _event(self, handle: int) -> StrictEvent:
        found = self._world.events.get(handle)
        if found is None:
            self._world.rules.broke("released", f"a call with an event that is nobody's any more: {handle:#x}")
        return found

    def _awaited(self, count: Any, events: Any) -> list[StrictEvent]:
        number = _number(count)
        if not number and not events:
            return []
        if not number or not events:
            self._world.rules.broke("arguments", "a wait list without events, or events and no number of them")
        handles = ctypes.cast(events, ctypes.POINTER(ctypes.c_void_p))
        return [self._event(handles[index] or 0) for index in range(number)]

    def _gave(self, where: Any, event: StrictEvent) -> int:
        """Return an event through the pointer `where`."""
        if where:
            with self._lock:
                self._events[event.int_ptr] = event, 1
            ctypes.cast(where, ctypes.POINTER(ctypes.c_void_p))[0] = event.int_ptr
        return 0

    # -- memory objects

    def _clCreateSubBuffer(self, buffer: Any, flags: Any, kind: Any, region: Any, error: Any) -> int:
        assert _number(kind) == _CREATE_TYPE_REGION
        origin, size = ctypes.cast(region, ctypes.POINTER(ctypes.c_size_t))[:2]
        part = self._handle(buffer).get_sub_region(origin, size, _number(flags))
        with self._lock:
            self._buffers[part.int_ptr] = part
        if error:
            ctypes.cast(error, ctypes.POINTER(ctypes.c_int))[0] = 0
        return int(part.int_ptr)

    def _clReleaseMemObject(self, memory: Any) -> int:
        released = self._handle(memory)
        released.release()
        with self._lock:
            self._buffers.pop(_number(memory), None)
        return 0

    def _handle(self, pointer: Any) -> Any:
        found = self._world.handles.get(_number(pointer))
        if found is None:
            self._world.rules.broke("released", f"a call with a handle that is nobody's any more: {_number(pointer):#x}")
        return found


class _Function:
    """A ctypes function: its types may be set, and are ignored. `address`: of a C function that does the same."""

    def __init__(self, method: Callable[..., int], address: Callable[[], int]) -> None:
        self._method, self._address = method, address
        self.restype: Any = ctypes.c_int
        self.argtypes: Any = None

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._address())

    def __call__(self, *arguments: Any) -> int:
        return self._method(*arguments)


def _host(address: Any, nbytes: int) -> NDArray[np.uint8]:
    return np.frombuffer((ctypes.c_ubyte * nbytes).from_address(_number(address)), np.uint8)


def _number(value: Any) -> int:
    value = getattr(value, "_as_parameter_", value)  # as ctypes does
    return int(getattr(value, "value", value) or 0)
