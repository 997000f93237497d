"""Replacements of pyopencl's devices, queues, memory objects, maps and events: the real object and the rules' state."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyopencl as cl
from numpy.typing import NDArray

from tests.support.strict_device.commands import COPIES, Access, BrokenRuleError, Command, Mapping, Memory
from tests.support.strict_device.overlap import Overlap
from tests.support.strict_device.profiles import Profile
from tests.support.strict_device.rules import Rules

UNDEFINED = 0xFF
"""The content of memory that nobody has written: NaN as a float or a half, -1 as an integer."""

_contexts: dict[int, Any] = {}


class World:
    """One strict device: its profile, the underlying real device, and the rules' state. Objects and events by their handles."""

    def __init__(self, profile: Profile, real: Any, *, by_event: bool = False) -> None:
        self.profile, self.real, self.rules, self.overlap = profile, real, Rules(by_event=by_event), Overlap()
        if real.int_ptr not in _contexts:  # one for all strict devices, so that they share programs
            _contexts[real.int_ptr] = cl.Context([real])
        self.context = _contexts[real.int_ptr]
        self.own_queue = cl.CommandQueue(self.context, real)
        self.handles: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.events: weakref.WeakValueDictionary[int, StrictEvent] = weakref.WeakValueDictionary()
        self.versions: dict[int, int] = {}  # of the allocations' content
        self.pinned: list[range] = []  # pages of the host that imports hold
        self.most_pinned = 0  # bytes
        self.kept: dict[int, Any] = {}  # memory objects that the program knows by their handle only
        self.platform = StrictPlatform(self)
        self.device = StrictDevice(self)

    def wrote(self, memory: Memory) -> None:
        """Record a change of its content."""
        self.versions[memory.allocation] = self.versions.get(memory.allocation, 0) + 1

    def enqueued(self, queue: StrictQueue, command: Command, real: Any) -> StrictEvent:
        """The event of a newly enqueued command."""
        if command.kind in COPIES:
            self.overlap.enqueued(command)
        return StrictEvent(queue, command, real)

    def known(self, command: Command) -> None:
        """Record that the host has waited for a command. Copies stay in flight a little longer, to overlap those of other
        threads.
        """
        if copies := self.rules.copies_before(command):
            self.overlap.wait(copies)
        self.rules.known(command)

    def pin(self, pages: range) -> None:
        """Record that the device holds pages of the host."""
        self.pinned.append(pages)
        self.most_pinned = max(self.most_pinned, mmap.PAGESIZE * len({page for each in self.pinned for page in each}))

    def limit(self, what: str, wanted: int, most: int) -> None:
        """Raise BrokenRuleError if the device's driver offers less."""
        if wanted > most:
            self.rules.broke("limit", f"{what}: {wanted}, and {self.profile.name} has {most}")


class StrictPlatform:
    """A platform with the one device."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.int_ptr = world.real.platform.int_ptr
        self.name, self.vendor, self.version = world.profile.platform, world.profile.vendor, world.profile.version

    def get_devices(self, *_: object) -> list[StrictDevice]:
        """The device."""
        return [self._world.device]


class StrictDevice:
    """The profile's properties, by pyopencl's names."""

    def __init__(self, world: World) -> None:
        profile = world.profile
        self.world, self.platform = world, world.platform
        self.int_ptr = world.real.int_ptr
        self.name, self.vendor, self.version, self.driver_version = (
            profile.device,
            profile.vendor,
            profile.version,
            profile.driver,
        )
        self.type, self.available, self.image_support = cl.device_type.GPU, True, True
        self.extensions = " ".join(sorted(profile.extensions))
        self.host_unified_memory = profile.unified_memory
        self.image2d_max_width, self.image2d_max_height = profile.image_width, profile.image_height
        self.mem_base_addr_align = 8 * profile.base_align
        self.max_mem_alloc_size, self.global_mem_size = profile.max_alloc, profile.global_memory
        self.max_compute_units, self.local_mem_size = profile.compute_units, profile.local_memory
        self.single_fp_config = cl.device_fp_config.ROUND_TO_NEAREST | (cl.device_fp_config.FMA if profile.fuses else 0)
        self.max_work_group_size, self.max_work_item_sizes = profile.max_group, list(profile.max_group_sizes)


class StrictContext:
    """A context; all contexts of a real device share an underlying one."""

    def __init__(self, device: StrictDevice) -> None:
        self.device, self.world = device, device.world
        self.int_ptr = self.world.context.int_ptr


class StrictQueue:
    """An in-order queue."""

    def __init__(self, context: StrictContext, device: StrictDevice, properties: int = 0) -> None:
        self.world, rules = context.world, context.world.rules
        if int(properties) & int(cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE):
            raise NotImplementedError("the strict device has queues that are in order")
        self.profiling = bool(int(properties) & int(cl.command_queue_properties.PROFILING_ENABLE))
        self.real = cl.CommandQueue(self.world.context, device.world.real, int(properties))
        self.number = rules.queue()
        self.lock = threading.RLock()  # commands are enqueued in the order in which the rules see them
        self.int_ptr = self.real.int_ptr
        self.world.handles[self.int_ptr] = self

    def flush(self) -> None:
        """Submit the enqueued commands."""
        self.world.rules.flush(self.number)
        self.real.flush()

    def finish(self) -> None:
        """Wait for the enqueued commands."""
        last = self.world.rules.last(self.number)
        self.real.finish()
        if last is not None:
            self.world.known(last)


class StrictEvent:
    """The event of a command, as the program uses it."""

    def __init__(self, queue: StrictQueue, command: Command, real: Any) -> None:
        self.command, self.real, self.world, self._queue = command, real, queue.world, queue
        self.int_ptr: int = real.int_ptr
        self.world.events[self.int_ptr] = self

    def wait(self) -> None:
        """Wait for the command: the host then knows that it is complete, and sees its result."""
        self.real.wait()
        self.world.known(self.command)

    @property
    def command_execution_status(self) -> int:
        """The status of the command. Reading that it is complete is no synchronization point (clGetEventInfo)."""
        return int(self.real.command_execution_status)

    @property
    def profile(self) -> Any:
        """Its times: available after completion, for queues with profiling (clGetEventProfilingInfo)."""
        rules = self.world.rules
        if not self._queue.profiling:
            rules.broke("event", f"times are asked of {self.command.what}, whose queue takes none")
        if not rules.is_known(self.command):
            rules.broke("event", f"times are asked of {self.command.what}, which nobody has waited for")
        return self.real.profile


class StrictMemory:
    """A buffer or an image."""

    def __init__(self, world: World, memory: Memory, real: Any) -> None:
        self.world, self.memory, self.real = world, memory, real
        self.int_ptr = real.int_ptr
        world.handles[self.int_ptr] = self

    def release(self) -> None:
        """Release it."""
        self.world.rules.check_alive(self.memory, "releasing it again")
        self.world.rules.release(self.memory)
        self.real.release()

    def __del__(self) -> None:
        if hasattr(self, "real"):
            with suppress(BrokenRuleError):  # the rules have recorded it; the caller could not handle it here
                self.world.rules.release(self.memory)

    def access(self, *, writes: bool, offset: int = 0, nbytes: int | None = None) -> Access:
        """An access to `nbytes` from byte `offset` on, or to all."""
        start = self.memory.start + offset
        return Access(self.memory, start, self.memory.end if nbytes is None else start + nbytes, writes)


class StrictBuffer(StrictMemory):
    """A buffer or a sub-buffer."""

    def get_sub_region(self, origin: int, size: int, flags: int = 0) -> StrictBuffer:
        """A sub-buffer (clCreateSubBuffer)."""
        world, align = self.world, self.world.profile.base_align
        what = f"a part of {self.memory.what} at {origin}"
        if self.memory.parent is not None:
            world.rules.broke("arguments", f"{what} is made of a part")
        if origin % align:
            world.rules.broke("aligned", f"{what}, and parts begin on multiples of {align} bytes")
        memory = world.rules.part(self.memory, what, origin, size, kernels_write=self.memory.kernels_write)
        return StrictBuffer(world, memory, self.real.get_sub_region(origin, size, flags))


def make_buffer(context: StrictContext, flags: int, size: int = 0, hostbuf: Any = None) -> StrictBuffer:
    """clCreateBuffer."""
    world, bits = context.world, int(flags)
    uses = bool(bits & int(cl.mem_flags.USE_HOST_PTR))
    if uses and bits & int(cl.mem_flags.ALLOC_HOST_PTR | cl.mem_flags.COPY_HOST_PTR):
        world.rules.broke("arguments", "a buffer both uses memory of the host's and has its own")
    if (hostbuf is not None) != bool(bits & int(cl.mem_flags.USE_HOST_PTR | cl.mem_flags.COPY_HOST_PTR)):
        world.rules.broke("arguments", "a buffer has memory of the host's without the flag for it, or the flag without memory")
    nbytes = size or (hostbuf.nbytes if hostbuf is not None else 0)
    if nbytes < 1:
        world.rules.broke("arguments", "a buffer without bytes")
    world.limit("bytes of a buffer", nbytes, world.profile.max_alloc)
    real = cl.Buffer(world.context, bits, size=size, hostbuf=hostbuf)
    if hostbuf is None:
        cl.enqueue_fill_buffer(world.own_queue, real, np.uint8(UNDEFINED), 0, nbytes).wait()
    memory = world.rules.allocate(f"a buffer of {nbytes} bytes", nbytes, kernels_write=not bits & int(cl.mem_flags.READ_ONLY))
    return StrictBuffer(world, memory, real)


@dataclass
class ImageShape:
    """pyopencl's ImageDescriptor."""

    image_type: Any = None
    shape: tuple[int, ...] = ()
    array_size: int = 0
    pitches: tuple[int, int] = (0, 0)
    num_mip_levels: int = 0
    num_samples: int = 0
    buffer: StrictBuffer | None = None


class StrictImage(StrictMemory):
    """A two-dimensional image. Over a buffer it is a copy, updated before kernels read it if the buffer has changed."""

    width = height = texel = 0
    row_pitch = 0
    view_of: StrictBuffer | None = None
    seen = -1  # version of the copied buffer content

    def refresh(self, queue: Any) -> None:
        """Update the copy, after the commands enqueued on a real queue."""
        version = self.world.versions.get(self.memory.allocation, 0)
        if self.view_of is None or self.seen == version:
            return
        rows = np.empty(self.row_pitch * self.height, np.uint8)
        cl.enqueue_copy(queue, rows, self.view_of.real)
        cl._cl._enqueue_write_image(queue, self.real, (0, 0), (self.width, self.height), rows, self.row_pitch, is_blocking=True)
        self.seen = version


def make_image(context: StrictContext, flags: int, image_format: Any, desc: ImageShape) -> StrictImage:
    """clCreateImage, of two dimensions."""
    world, profile, bits = context.world, context.world.profile, int(flags)
    width, height = desc.shape[:2]
    texel = image_format.itemsize
    world.limit("texels across an image", width, profile.image_width)
    world.limit("texels down an image", height, profile.image_height)
    writes = not bits & int(cl.mem_flags.READ_ONLY)
    if desc.buffer is None:
        world.limit("bytes of an image", width * height * texel, profile.max_alloc)
        what = f"an image of {width} x {height}"
        memory = world.rules.allocate(what, width * height * texel, kernels_write=writes, is_image=True)
    else:
        memory = _view(world, desc, width, height, texel, writes=writes)
    real = cl.create_image(world.context, cl.mem_flags.READ_WRITE, image_format, shape=(width, height))
    image = StrictImage(world, memory, real)
    image.width, image.height, image.texel = width, height, texel
    image.view_of, image.row_pitch = desc.buffer, desc.pitches[0]
    integers = image_format.channel_data_type in (cl.channel_type.UNSIGNED_INT8, cl.channel_type.UNSIGNED_INT16)
    undefined = np.full(4, 255, np.uint32) if integers else np.full(4, np.nan, np.float32)
    cl.enqueue_fill_image(world.own_queue, real, undefined, (0, 0, 0), (width, height, 1)).wait()
    return image


def _view(world: World, desc: ImageShape, width: int, height: int, texel: int, *, writes: bool) -> Memory:
    """An image over a buffer (cl_khr_image2d_from_buffer; 5.3.1)."""
    profile, rules, buffer, pitch = world.profile, world.rules, desc.buffer, desc.pitches[0]
    assert buffer is not None
    if "cl_khr_image2d_from_buffer" not in profile.extensions:
        rules.broke("extension", f"an image over a buffer, which {profile.name} does not have")
    if pitch % (profile.image_pitch * texel) or pitch < width * texel:
        unit = profile.image_pitch * texel
        rules.broke("aligned", f"rows of an image over a buffer are {pitch} bytes apart, and have to be multiples of {unit}")
    if buffer.memory.start % (profile.image_base * texel):
        unit = profile.image_base * texel
        rules.broke("aligned", f"an image begins at byte {buffer.memory.start} of a buffer, and has to at multiples of {unit}")
    what = f"an image of {width} x {height} over {buffer.memory.what}"
    writes = writes and buffer.memory.kernels_write
    return rules.part(buffer.memory, what, 0, pitch * height, kernels_write=writes, is_image=True)


class StrictMap:
    """Mapped bytes of a buffer: a copy that is written to the device at the unmap, and unusable afterwards."""

    def __init__(self, buffer: StrictBuffer, mapping: Mapping, offset: int, shadow: NDArray[np.uint8], *, writes: bool) -> None:
        self._buffer, self._mapping, self._offset, self._shadow, self._writes = buffer, mapping, offset, shadow, writes
        self.__array_interface__ = shadow.__array_interface__

    def release(self, queue: StrictQueue, wait_for: Iterable[StrictEvent] | None = None) -> StrictEvent:
        """Unmap."""
        world, waits = self._buffer.world, tuple(wait_for or ())
        with queue.lock:
            command = world.rules.unmap(queue.number, self._mapping, [each.command for each in waits])
            reals = [each.real for each in waits] or None
            if self._writes:
                real = cl._cl._enqueue_write_buffer(
                    queue.real, self._buffer.real, self._shadow, self._offset, wait_for=reals, is_blocking=True
                )
                world.wrote(self._buffer.memory)
            else:
                real = cl.enqueue_marker(queue.real, wait_for=reals)
        self._shadow.setflags(write=True)
        self._shadow[:] = UNDEFINED
        return world.enqueued(queue, command, real)


def map_buffer(
    queue: StrictQueue, buffer: StrictBuffer, flags: int, offset: int, shape: tuple[int, ...], dtype: Any
) -> NDArray[Any]:
    """clEnqueueMapBuffer, blocking."""
    world, bits = queue.world, int(flags)
    invalidates = bool(bits & int(cl.map_flags.WRITE_INVALIDATE_REGION))
    if invalidates and bits & int(cl.map_flags.READ | cl.map_flags.WRITE):
        world.rules.broke("arguments", "a map that keeps what it has and does not")
    writes = invalidates or bool(bits & int(cl.map_flags.WRITE))
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    shadow = np.full(nbytes, UNDEFINED, np.uint8)
    with queue.lock:
        command, mapping = world.rules.map(queue.number, buffer.access(writes=writes, offset=offset, nbytes=nbytes))
        if invalidates:
            queue.real.finish()
        else:
            cl._cl._enqueue_read_buffer(queue.real, buffer.real, shadow, offset, is_blocking=True)
    world.known(command)
    shadow.setflags(write=writes)
    view = np.asarray(StrictMap(buffer, mapping, offset, shadow, writes=writes))
    return view.view(dtype).reshape(shape) if view.dtype != dtype or view.shape != shape else view
