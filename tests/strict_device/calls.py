"""What a program calls in place of pyopencl, and of the functions of the OpenCL library."""
# ruff: noqa: N802 - the names are OpenCL's

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyopencl as cl
from numpy.typing import NDArray

from strict_device import objects
from strict_device.objects import ImageShape, StrictContext, StrictEvent, StrictQueue, World
from strict_device.profiles import Profile
from strict_device.programs import StrictKernel, StrictProgram, launch
from strict_device.rules import Rules

_WORDS = (
    "CompilerWarning", "Error", "ImageFormat", "LogicError", "MemoryError", "RuntimeError", "VERSION_TEXT", "channel_order",
    "channel_type", "command_execution_status", "command_queue_properties", "device_type", "map_flags", "mem_flags",
    "mem_object_type", "program_info", "status_code",
)  # fmt: skip
"""What of pyopencl calls nothing."""

_IMAGE_PITCH_ALIGNMENT, _IMAGE_BASE_ALIGNMENT = 0x104A, 0x104B


class StrictOpenCL:
    """The module pyopencl, with one strict device. Names that are not here are not checked, and so are refused."""

    def __init__(self, profile: Profile, real: Any) -> None:
        """`real`: the pyopencl device underneath, a CPU with images."""
        self.world = World(profile, real)
        self.ImageDescriptor, self.Kernel, self.Context, self.CommandQueue = (
            ImageShape,
            StrictKernel,
            StrictContext,
            StrictQueue,
        )
        self._cl = SimpleNamespace(
            __file__=cl._cl.__file__,
            _enqueue_write_buffer=self._write_buffer,
            _enqueue_read_buffer=self._read_buffer,
            _enqueue_write_image=self._write_image,
        )

    @property
    def rules(self) -> Rules:
        """What has happened."""
        return self.world.rules

    def __getattr__(self, name: str) -> Any:
        if name in _WORDS:
            return getattr(cl, name)
        raise AttributeError(f"the strict device does not know pyopencl.{name}: teach it the rules of that call")

    def get_platforms(self) -> list[objects.StrictPlatform]:
        """The platform."""
        return [self.world.platform]

    def Buffer(self, context: StrictContext, flags: int, size: int = 0, hostbuf: Any = None) -> objects.StrictBuffer:
        """A buffer."""
        return objects.make_buffer(context, flags, size, hostbuf)

    def Image(self, context: StrictContext, flags: int, image_format: Any, desc: ImageShape) -> objects.StrictImage:
        """An image."""
        return objects.make_image(context, flags, image_format, desc)

    def Program(self, context: StrictContext, source: Any, binaries: Sequence[bytes] | None = None) -> StrictProgram:
        """A program, from source or from devices and binaries."""
        return StrictProgram(context, "" if binaries is not None else source, binaries)

    def enqueue_nd_range_kernel(
        self, queue: StrictQueue, kernel: StrictKernel, global_size: Sequence[int], local_size: Sequence[int] | None
    ) -> StrictEvent:
        """A launch."""
        return launch(queue, kernel, tuple(global_size), tuple(local_size) if local_size else None)

    def enqueue_marker(self, queue: StrictQueue) -> StrictEvent:
        """A marker."""
        return objects.marker(queue)

    def enqueue_map_buffer(
        self, queue: StrictQueue, buffer: Any, flags: int, offset: int, shape: Sequence[int], dtype: Any
    ) -> tuple[NDArray[Any], None]:
        """A map, waited for."""
        return objects.map_buffer(queue, buffer, flags, offset, tuple(shape), np.dtype(dtype)), None

    def _write_buffer(self, queue: StrictQueue, buffer: Any, data: Any, offset: int = 0, *, is_blocking: bool) -> StrictEvent:
        return objects.write_buffer(queue, buffer, data, offset, blocking=is_blocking)

    def _read_buffer(self, queue: StrictQueue, buffer: Any, data: Any, offset: int = 0, *, is_blocking: bool) -> StrictEvent:
        return objects.read_buffer(queue, buffer, data, offset, blocking=is_blocking)

    def _write_image(
        self, queue: StrictQueue, image: Any, origin: Any, region: Any, data: Any, row_pitch: int = 0, *, is_blocking: bool
    ) -> StrictEvent:
        return objects.write_image(queue, image, origin, region, data, row_pitch, blocking=is_blocking)


class StrictLibrary:
    """The library's functions, called as by ctypes. They raise where they break a rule."""

    def __init__(self, opencl: StrictOpenCL) -> None:
        self._world = opencl.world
        self._reading: dict[int, list[Any]] = {}  # by queue: host memory that writes in flight read

    def clGetDeviceInfo(self, device: Any, parameter: Any, size: Any, value: Any, _: Any) -> int:
        """The alignments of images over buffers."""
        profile = self._world.profile
        known = {_IMAGE_PITCH_ALIGNMENT: profile.image_pitch, _IMAGE_BASE_ALIGNMENT: profile.image_base}
        value._obj.value = known[_number(parameter)]
        return 0

    def clEnqueueNDRangeKernel(
        self, queue: Any, kernel: Any, _: Any, offset: Any, global_size: Any, local_size: Any, waits: Any, *more: Any
    ) -> int:
        """A launch without an event."""
        assert offset is None and not _number(waits) and not any(more)
        launch(self._handle(queue), self._handle(kernel), tuple(global_size), tuple(local_size) if local_size else None)
        return 0

    def clEnqueueWriteBuffer(
        self, queue: Any, buffer: Any, blocking: Any, offset: Any, size: Any, data: Any, waits: Any, *more: Any
    ) -> int:
        """A write without an event."""
        assert not _number(waits) and not any(more)
        host = self._host(queue, data, _number(size))
        objects.write_buffer(self._handle(queue), self._handle(buffer), host, _number(offset), blocking=bool(_number(blocking)))
        return 0

    def clEnqueueWriteImage(
        self,
        queue: Any,
        image: Any,
        blocking: Any,
        origin: Any,
        region: Any,
        row_pitch: Any,
        slice_pitch: Any,
        data: Any,
        waits: Any,
        *more: Any,
    ) -> int:
        """A write without an event."""
        assert not _number(waits) and not any(more) and not _number(slice_pitch)
        target, (width, rows, _) = self._handle(image), region
        pitch = _number(row_pitch) or width * target.texel
        host = self._host(queue, data, pitch * (rows - 1) + width * target.texel)
        objects.write_image(
            self._handle(queue), target, tuple(origin), tuple(region), host, pitch, blocking=bool(_number(blocking))
        )
        return 0

    def clFinish(self, queue: Any) -> int:
        """Wait for what is enqueued."""
        self._handle(queue).finish()
        self._reading.pop(_number(queue), None)
        return 0

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the strict device does not know {name}: teach it the rules of that call")

    def _handle(self, pointer: Any) -> Any:
        found = self._world.handles.get(_number(pointer))
        if found is None:
            self._world.rules.broke("released", f"a call with a handle that is nobody's any more: {_number(pointer):#x}")
        return found

    def _host(self, queue: Any, address: Any, nbytes: int) -> NDArray[np.uint8]:
        memory = np.frombuffer((ctypes.c_ubyte * nbytes).from_address(_number(address)), np.uint8)
        self._reading.setdefault(_number(queue), []).append(memory)
        return memory


def _number(value: Any) -> int:
    return int(getattr(value, "value", value) or 0)
