"""Replacement of pyopencl for the strict device."""
# ruff: noqa: N802 - the names are OpenCL's

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyopencl as cl
from numpy.typing import NDArray

from tests.support.strict_device import objects, transfers
from tests.support.strict_device.objects import ImageShape, StrictContext, StrictEvent, StrictQueue, World
from tests.support.strict_device.profiles import Profile
from tests.support.strict_device.programs import StrictKernel, StrictProgram, launch
from tests.support.strict_device.rules import Rules
from tests.support.strict_device.transfers import Waits

_WORDS = (
    "CompilerWarning", "Error", "ImageFormat", "LogicError", "MemoryError", "RuntimeError", "VERSION_TEXT", "channel_order",
    "channel_type", "command_execution_status", "command_queue_properties", "device_fp_config", "device_type", "map_flags",
    "mem_flags", "mem_object_type", "program_info", "status_code",
)  # fmt: skip
"""Names of pyopencl that call no OpenCL function."""


class _Buffers:
    """pyopencl's class of buffers."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, context: StrictContext, flags: int, size: int = 0, hostbuf: Any = None) -> objects.StrictBuffer:
        """A new buffer."""
        return objects.make_buffer(context, flags, size, hostbuf)

    def from_int_ptr(self, handle: int, *, retain: bool) -> Any:
        """The buffer with a handle, which the caller owns."""
        assert not retain
        return self._world.kept.pop(handle)


class _Contexts:
    """pyopencl's class of contexts."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, devices: Sequence[objects.StrictDevice]) -> StrictContext:
        """A new context of one device."""
        (device,) = devices
        return StrictContext(device)

    def from_int_ptr(self, handle: int, *, retain: bool) -> StrictContext:
        """The context with a handle, which the caller owns."""
        assert not retain and handle == self._world.context.int_ptr
        return StrictContext(self._world.device)


class StrictOpenCL:
    """The module pyopencl, with one strict device. It refuses names that are not defined here, because it cannot check them."""

    def __init__(self, profile: Profile, real: Any, *, by_event: bool = False) -> None:
        """`real`: the underlying pyopencl device, a CPU with images. `by_event`: see `Rules`."""
        self.world = World(profile, real, by_event=by_event)
        self.ImageDescriptor, self.Kernel, self.CommandQueue = ImageShape, StrictKernel, StrictQueue
        self.Buffer, self.Context = _Buffers(self.world), _Contexts(self.world)
        self.Event = SimpleNamespace(from_int_ptr=self._event)
        self._cl = SimpleNamespace(
            __file__=cl._cl.__file__,
            _enqueue_write_buffer=self._write_buffer,
            _enqueue_read_buffer=self._read_buffer,
            _enqueue_write_image=self._write_image,
        )

    @property
    def rules(self) -> Rules:
        """The recorded state."""
        return self.world.rules

    def __getattr__(self, name: str) -> Any:
        if name in _WORDS:
            return getattr(cl, name)
        raise AttributeError(f"the strict device does not know pyopencl.{name}: teach it the rules of that call")

    def get_platforms(self) -> list[objects.StrictPlatform]:
        """The platform."""
        return [self.world.platform]

    def Image(self, context: StrictContext, flags: int, image_format: Any, desc: ImageShape) -> objects.StrictImage:
        """An image."""
        return objects.make_image(context, flags, image_format, desc)

    def Program(self, context: StrictContext, source: Any, binaries: Sequence[bytes] | None = None) -> StrictProgram:
        """A program, from source or from devices and binaries."""
        return StrictProgram(context, "" if binaries is not None else source, binaries)

    def enqueue_nd_range_kernel(
        self,
        queue: StrictQueue,
        kernel: StrictKernel,
        global_size: Sequence[int],
        local_size: Sequence[int] | None,
        wait_for: Waits = None,
    ) -> StrictEvent:
        """A launch."""
        return launch(queue, kernel, tuple(global_size), tuple(local_size) if local_size else None, wait_for)

    def enqueue_marker(self, queue: StrictQueue, wait_for: Waits = None) -> StrictEvent:
        """A marker."""
        return transfers.marker(queue, wait_for)

    def enqueue_barrier(self, queue: StrictQueue, wait_for: Waits = None) -> StrictEvent:
        """A barrier."""
        return transfers.barrier(queue, wait_for)

    def wait_for_events(self, events: Sequence[StrictEvent]) -> None:
        """Wait for all of them."""
        for each in events:
            each.wait()

    def enqueue_map_buffer(
        self, queue: StrictQueue, buffer: Any, flags: int, offset: int, shape: Sequence[int], dtype: Any
    ) -> tuple[NDArray[Any], None]:
        """A blocking map."""
        return objects.map_buffer(queue, buffer, flags, offset, tuple(shape), np.dtype(dtype)), None

    def _event(self, handle: int, *, retain: bool) -> StrictEvent:
        assert not retain
        return self.world.events[handle]

    def _write_buffer(
        self, queue: StrictQueue, buffer: Any, data: Any, offset: int = 0, wait_for: Waits = None, *, is_blocking: bool
    ) -> StrictEvent:
        return transfers.write_buffer(queue, buffer, data, offset, wait_for, blocking=is_blocking)

    def _read_buffer(
        self, queue: StrictQueue, buffer: Any, data: Any, offset: int = 0, wait_for: Waits = None, *, is_blocking: bool
    ) -> StrictEvent:
        return transfers.read_buffer(queue, buffer, data, offset, wait_for, blocking=is_blocking)

    def _write_image(
        self,
        queue: StrictQueue,
        image: Any,
        origin: Any,
        region: Any,
        data: Any,
        row_pitch: int = 0,
        slice_pitch: int = 0,
        wait_for: Waits = None,
        *,
        is_blocking: bool,
    ) -> StrictEvent:
        assert not slice_pitch
        return transfers.write_image(queue, image, origin, region, data, row_pitch, wait_for, blocking=is_blocking)
