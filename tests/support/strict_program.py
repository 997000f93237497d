"""A small program on the strict device, through pyopencl and through the library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.strict_device import PROFILES, StrictLibrary, StrictOpenCL
from tests.support.strict_device.door import base_device

BYTES = 1 << 14
PART = BYTES // 4
FLOATS = PART // 4

SOURCE = """
__kernel void copy(__global const float* x, __global float* y) { y[get_global_id(0)] = x[get_global_id(0)]; }
__kernel void draw(__global const float* x, __write_only image2d_t y)
{ write_imagef(y, (int2)(get_global_id(0), 0), vload4(get_global_id(0), x)); }
__kernel void look(__read_only image2d_t x, __global float* y)
{ vstore4(read_imagef(x, CLK_NORMALIZED_COORDS_FALSE, (int2)(get_global_id(0), 0)), get_global_id(0), y); }
__kernel void both(__read_only image2d_t x, __write_only image2d_t y)
{ write_imagef(y, (int2)(0, 0), read_imagef(x, CLK_NORMALIZED_COORDS_FALSE, (int2)(0, 0))); }
__kernel void shared(__global float* y, __constant float* z)
{ __local float all[1024]; all[get_local_id(0)] = z[0]; barrier(CLK_LOCAL_MEM_FENCE); y[get_global_id(0)] = all[0]; }
__kernel __attribute__((reqd_work_group_size(8, 1, 1))) void eight(__global float* y) { y[get_global_id(0)] = 8; }
__kernel void wide(__global const float* x, __global float* y)
{
    float16 sums[2];
    { const float4 first = vload4(0, x); sums[0] = (float16)(first.s0); }
    { const float8 next = vload8(0, x), last = vload8(1, x); sums[1] = (float16)(next.s0 + last.s0); }
    y[get_global_id(0)] = sums[0].s0 + sums[1].s0;
}
"""


class Small:
    """A program on the strict device `profile`, by pyopencl's interface."""

    def __init__(self, cl: Any, profiling: bool = False) -> None:
        self.cl = cl
        self.device = cl.get_platforms()[0].get_devices()[0]
        self.context = cl.Context([self.device])
        properties = cl.command_queue_properties.PROFILING_ENABLE if profiling else 0
        self.queue = cl.CommandQueue(self.context, self.device, properties)
        self.other = cl.CommandQueue(self.context, self.device, 0)
        self.kept: list[Any] = []  # a kernel does not keep its arguments alive
        self.buffer = self.new(BYTES)
        self.zeros = np.zeros(FLOATS, np.float32)

    def new(self, nbytes: int) -> Any:
        flags = self.cl.mem_flags
        return self.keep(self.cl.Buffer(self.context, flags.READ_WRITE | flags.ALLOC_HOST_PTR, size=nbytes))

    def keep(self, memory: Any) -> Any:
        self.kept.append(memory)
        return memory

    def part(self, number: int) -> Any:
        return self.keep(self.buffer.get_sub_region(number * PART, PART))

    def kernel(self, name: str, *arguments: Any) -> Any:
        kernel = self.cl.Kernel(self.cl.Program(self.context, SOURCE).build([]), name)
        for number, argument in enumerate(arguments):
            kernel.set_arg(number, argument)
        return kernel

    def launch(
        self, kernel: Any, queue: Any = None, items: int = FLOATS, group: int | None = None, waits: Sequence[Any] = ()
    ) -> Any:
        local = (group,) if group else None
        return self.cl.enqueue_nd_range_kernel(queue or self.queue, kernel, (items,), local, wait_for=waits)

    def copy(self, source: Any, target: Any, queue: Any = None, waits: Sequence[Any] = ()) -> Any:
        """Launch a kernel that reads one buffer and writes another."""
        return self.launch(self.kernel("copy", source, target), queue, waits=waits)

    def write(
        self,
        buffer: Any,
        data: Any = None,
        queue: Any = None,
        *,
        offset: int = 0,
        waits: Sequence[Any] = (),
        blocking: bool = True,
    ) -> Any:
        data = self.zeros if data is None else data
        return self.cl._cl._enqueue_write_buffer(
            queue or self.queue, buffer, data, offset, wait_for=waits, is_blocking=blocking
        )

    def write_rows(self, image: Any, row: int, queue: Any = None, rows: int = 1) -> Any:
        """Write rows of an image whose texels are four floats, without a wait."""
        data = np.zeros((rows, image.width * 4), np.float32)
        self.kept.append(data)
        return self.cl._cl._enqueue_write_image(
            queue or self.queue, image, (0, row), (image.width, rows), data, is_blocking=False
        )

    def read(self, buffer: Any, queue: Any = None, floats: int = FLOATS) -> NDArray[np.float32]:
        got = np.zeros(floats, np.float32)
        self.cl._cl._enqueue_read_buffer(queue or self.queue, buffer, got, 0, is_blocking=True)
        return got

    def map(self, buffer: Any, *, read: bool = False, queue: Any = None) -> Any:
        flags = self.cl.map_flags.READ if read else self.cl.map_flags.WRITE_INVALIDATE_REGION
        return self.cl.enqueue_map_buffer(queue or self.other, buffer, flags, 0, (PART,), np.uint8)[0]

    def unmap(self, view: Any) -> Any:
        return view.base.release(self.other)

    def image(self, width: int = FLOATS // 4, height: int = 1, *, over: Any = None, pitch: int = 0, flags: Any = None) -> Any:
        shape = self.cl.ImageDescriptor()
        shape.image_type = self.cl.mem_object_type.IMAGE2D
        shape.shape, shape.pitches, shape.buffer = (width, height, 0), (pitch, 0), over
        texels = self.cl.ImageFormat(self.cl.channel_order.RGBA, self.cl.channel_type.FLOAT)
        flags = self.cl.mem_flags.READ_WRITE if flags is None else flags
        return self.keep(self.cl.Image(self.context, flags, texels, desc=shape))


class Raw:
    """The same program's calls by ctypes: handles are numbers, and events are returned through pointers."""

    def __init__(self, program: Small) -> None:
        self.library = StrictLibrary(program.cl)
        self.zeros = program.zeros

    def write(self, buffer: Any, queue: Any, data: Any = None, waits: Sequence[Any] = (), *, offset: int = 0) -> Any:
        """Write without waiting; returns the event."""
        data, event = self.zeros if data is None else data, ctypes.c_void_p()
        code = self.library.clEnqueueWriteBuffer(
            ctypes.c_void_p(queue.int_ptr), ctypes.c_void_p(buffer.int_ptr), ctypes.c_uint(0), ctypes.c_size_t(offset),
            ctypes.c_size_t(data.nbytes), ctypes.c_void_p(data.ctypes.data), *_list(waits), ctypes.byref(event),
        )  # fmt: skip
        assert code == 0
        return event

    def launch(self, kernel: Any, queue: Any, waits: Sequence[Any] = ()) -> Any:
        """Launch a kernel; returns the event."""
        event, sizes = ctypes.c_void_p(), (ctypes.c_size_t * 1)(FLOATS)
        code = self.library.clEnqueueNDRangeKernel(
            ctypes.c_void_p(queue.int_ptr), ctypes.c_void_p(kernel.int_ptr), ctypes.c_uint(1), None, sizes, None,
            *_list(waits), ctypes.byref(event),
        )  # fmt: skip
        assert code == 0
        return event

    def marker(self, queue: Any, waits: Sequence[Any] = ()) -> Any:
        """Enqueue a marker; returns the event."""
        event = ctypes.c_void_p()
        self.library.clEnqueueMarkerWithWaitList(ctypes.c_void_p(queue.int_ptr), *_list(waits), ctypes.byref(event))
        return event

    def barrier(self, queue: Any, waits: Sequence[Any] = ()) -> None:
        """Enqueue a barrier."""
        self.library.clEnqueueBarrierWithWaitList(ctypes.c_void_p(queue.int_ptr), *_list(waits), None)

    def wait(self, *events: Any) -> None:
        """Wait for these events."""
        assert self.library.clWaitForEvents(*_list(events)) == 0

    def flush(self, queue: Any) -> None:
        """Flush a queue."""
        assert self.library.clFlush(ctypes.c_void_p(queue.int_ptr)) == 0

    def finish(self, queue: Any) -> None:
        """Finish a queue."""
        assert self.library.clFinish(ctypes.c_void_p(queue.int_ptr)) == 0

    def part(self, buffer: Any, origin: int, nbytes: int) -> Any:
        """A new sub-buffer, as an object with its handle."""
        region, error = (ctypes.c_size_t * 2)(origin, nbytes), ctypes.c_int(-1)
        handle = self.library.clCreateSubBuffer(
            ctypes.c_void_p(buffer.int_ptr), ctypes.c_ulonglong(0), ctypes.c_uint(0x1220), region, ctypes.byref(error)
        )
        assert error.value == 0
        return SimpleNamespace(int_ptr=handle)


def _list(events: Sequence[Any]) -> tuple[Any, Any]:
    """A wait list as C arguments."""
    count = len(events)
    return ctypes.c_uint(count), (ctypes.c_void_p * count)(*(each.value for each in events)) if count else None


def profile(name: str, **limits: Any) -> Any:
    return replace(next(each for each in PROFILES if each.name == name), **limits)


def limited(**limits: Any) -> Small:
    return Small(StrictOpenCL(profile("adreno7xx", **limits), base_device()))
