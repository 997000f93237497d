"""OpenCL objects: queues, memory objects and programs.

Only this module, `discovery.py`, `launching.py`, `copier.py`, `importing.py` and `shared_memory.py` call OpenCL, through
`binding.py` and `undocumented.py`, so that tests can check every call (tests/support/strict_device). `Context` creates memory
objects; other modules request them from the ledger (`flashmem.runtime.memory.ledger`), which counts their bytes.
"""

from __future__ import annotations

import ctypes
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.apart import Apart
from flashmem.base.errors import FlashmemWarning, RunError
from flashmem.base.types import Channel
from flashmem.program.kernel_text import shuffles, uses_dot_products
from flashmem.runtime.opencl import binding, shared_memory, undocumented
from flashmem.runtime.opencl.binding import QUIET as _QUIET
from flashmem.runtime.opencl.binding import cl as cl
from flashmem.runtime.opencl.binding import explained as _explained
from flashmem.runtime.opencl.binding import run_error as _run_error
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.devices import passed_probes
from flashmem.runtime.opencl.discovery import started_before_fork
from flashmem.runtime.opencl.dot_products import KHRONOS, KHRONOS_MIXED
from flashmem.runtime.opencl.handles import (
    Buffer,
    DeviceHandle,
    DeviceMemory,
    Event,
    Handle,
    KernelObject,
    LaunchEvent,
    ProgramHandle,
    QueueHandle,
    Texture,
)
from flashmem.runtime.opencl.launching import (
    COMMAND_BUFFERS,
    RECORDABLE_QUEUES,
    CommandBuffers,
    PreparedLaunch,
    RecordableQueues,
    Recorder,
    Recording,
    enqueue_function,
    functions_of,
    not_recorded,
)
from flashmem.runtime.opencl.pocl import check_room
from flashmem.runtime.opencl.shared_memory import SharedMemory

Bytes = NDArray[np.uint8]

_NO_WARNINGS = "-w"  # PoCL prints the number of compiler warnings on stderr


class Queue:
    """An in-order command queue."""

    def __init__(self, context: Handle, device: DeviceHandle, *, profiling: bool) -> None:
        properties = cl.command_queue_properties.PROFILING_ENABLE if profiling else 0
        self.handle: QueueHandle = cl.CommandQueue(context, device, properties)
        self._own: int = self.handle.int_ptr
        self._calls = enqueue_function(alone=False), enqueue_function(alone=True)
        self._barrier = undocumented.library(locked=True).clEnqueueBarrierWithWaitList
        self._barrier.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p)

    def prepare(self, kernel: KernelObject, global_size: tuple[int, ...], local_size: tuple[int, ...] | None) -> PreparedLaunch:
        """Prepare a launch of `kernel`, whose arguments are set, for repeated use on this queue."""
        return PreparedLaunch(self.handle, kernel, global_size, local_size)

    def launch(self, launch: PreparedLaunch, *, alone: bool = False) -> LaunchEvent:
        """Enqueue one launch; its event. `alone`: see `launch_all`."""
        event = ctypes.c_void_p()
        if not self._calls[alone](*launch.arguments[:-1], ctypes.byref(event)):
            return _event(event.value)
        try:  # pyopencl frees unreferenced objects and tries again, or raises the error
            made: LaunchEvent = cl.enqueue_nd_range_kernel(self.handle, launch.kernel, launch.global_size, launch.local_size)
            return made
        except cl.Error as error:
            raise _run_error(f"launch {launch.kernel.function_name}", error) from error

    def launch_all(self, launches: Iterable[PreparedLaunch], *, alone: bool = True) -> None:
        """Enqueue launches without events, which cost a driver more than the launch.

        `alone`: no launch waits for what another thread of this session has yet to do.
        """
        enqueue = self._calls[alone]
        for launch in launches:
            if enqueue(*launch.arguments):
                self.launch(launch)  # pyopencl frees unreferenced objects and tries again, or raises the error

    def launch_with_event(self, launches: Sequence[PreparedLaunch], *, alone: bool = True) -> LaunchEvent:
        """Enqueue launches, and submit them; an event that completes with them. `alone`: see `launch_all`."""
        if len(launches) > 1:
            self.launch_all(launches[:-1], alone=alone)
        event = self.launch(launches[-1], alone=alone) if launches else self.marker()
        self.flush()
        return event

    def play(self, recording: Recording) -> LaunchEvent:
        """Enqueue recorded launches of this queue, and submit them; the event of the last one. Raises RunError."""
        event = _event(recording.play())
        self.flush()
        return event

    def flush(self) -> None:
        """Submit the enqueued commands to the device without waiting."""
        try:
            self.handle.flush()
        except cl.Error as error:
            raise _run_error("flush", error) from error

    def follow(self, events: Sequence[Event]) -> None:
        """Make later commands wait for `events` of flushed commands on other queues.

        A command needs this if it reads what another queue wrote (OpenCL 3.0, appendix A), even if the host has seen the write
        complete.
        """
        handles = (ctypes.c_void_p * len(events))(*(event.int_ptr for event in events))
        binding.checked("wait for another queue", self._barrier(self._own, len(events), handles, None))

    def marker(self) -> LaunchEvent:
        """An event that completes after all commands enqueued so far."""
        with _explained("enqueue a marker"):
            event: LaunchEvent = cl.enqueue_marker(self.handle)
            return event

    def clock_apart(self) -> float:
        """What the host's clock (`time.perf_counter`) is ahead of the device's, in seconds; the queue profiles."""
        marker = self.marker()
        wait(marker)
        return perf_counter() - event_seconds(marker)[1]

    def write(self, buffer: Buffer, data: NDArray[Any], *, offset: int = 0) -> None:
        """Copy contiguous host memory to byte `offset` of a buffer, and wait."""
        if isinstance(buffer, SharedMemory):
            wait(self._copy_bytes(buffer.int_ptr + offset, shared_memory.address_of(data), data.nbytes, "write to a buffer"))
            return
        with _explained("write to a buffer"):
            undocumented.enqueue_write_buffer(self.handle, buffer, data, offset).wait()

    def write_later(self, buffer: Buffer, data: NDArray[Any]) -> Event:
        """Enqueue a copy of contiguous host memory, which must not change meanwhile, to a buffer; its event."""
        if isinstance(buffer, SharedMemory):
            return self._copy_bytes(buffer.int_ptr, shared_memory.address_of(data), data.nbytes, "write to a buffer")
        with _explained("write to a buffer"):
            event: Event = undocumented.enqueue_write_buffer(self.handle, buffer, data, 0)
            return event

    def read(self, data: NDArray[Any], buffer: Buffer, *, offset: int = 0) -> None:
        """Copy a buffer from byte `offset` on to a contiguous host array, and wait."""
        if isinstance(buffer, SharedMemory):
            wait(self._copy_bytes(shared_memory.address_of(data), buffer.int_ptr + offset, data.nbytes, "read a buffer"))
            return
        with _explained("read a buffer"):
            undocumented.enqueue_read_buffer(self.handle, buffer, data, offset, blocking=True)

    def copy(self, source: Buffer, target: Buffer, nbytes: int) -> Event:
        """Enqueue a copy of the first `nbytes` bytes, at least one, of a buffer to another one; its event."""
        if isinstance(source, SharedMemory):
            return self._copy_bytes(target.int_ptr, source.int_ptr, nbytes, "copy a buffer")
        with _explained("copy a buffer"):
            event: Event = cl.enqueue_copy(self.handle, target, source, byte_count=nbytes)
            return event

    def read_later(self, data: NDArray[Any], buffer: Buffer) -> Event:
        """Enqueue a copy of a buffer to a contiguous host array; its event."""
        if isinstance(buffer, SharedMemory):
            return self._copy_bytes(shared_memory.address_of(data), buffer.int_ptr, data.nbytes, "read a buffer")
        with _explained("read a buffer"):
            event: Event = undocumented.enqueue_read_buffer(self.handle, buffer, data, blocking=False)
            return event

    def _copy_bytes(self, target: int, source: int, nbytes: int, what: str) -> Event:
        """Enqueue a copy between two addresses; its event."""
        event = ctypes.c_void_p()
        code = shared_memory.enqueue_copy(self.handle.int_ptr, target, source, nbytes, ctypes.byref(event))
        binding.checked(what, code)
        return _event(event.value)

    def write_image(self, image: Texture, data: Bytes, *, first_row: int, width: int, rows: int, row_pitch: int) -> None:
        """Copy `rows` rows of `width` texels from host memory, `row_pitch` bytes apart, to an image, and wait."""
        with _explained("write to a texture"):
            undocumented.enqueue_write_image(self.handle, image, (0, first_row), (width, rows), data, row_pitch).wait()

    def read_image(self, texels: NDArray[Any], image: Texture) -> None:
        """Copy a texture to a contiguous host array of shape [rows, columns, 4], and wait."""
        rows, width, _ = texels.shape
        with _explained("read a texture"):
            cl.enqueue_copy(self.handle, texels, image, origin=(0, 0), region=(width, rows))

    def map(self, buffer: Buffer, nbytes: int, *, offset: int = 0, invalidate: bool = False) -> Bytes:
        """Map a host-visible buffer; the host view, until `unmap`. With `invalidate` the old content is lost."""
        flags = cl.map_flags.WRITE_INVALIDATE_REGION if invalidate else cl.map_flags.READ | cl.map_flags.WRITE
        with _explained("map a buffer"):
            array = cl.enqueue_map_buffer(self.handle, buffer, flags, offset, (nbytes,), np.uint8)
        view: Bytes = array[0] if isinstance(array, tuple) else array
        return view

    def unmap(self, view: Bytes) -> Event:
        """Unmap a view; the event of the unmapping, after which the device sees the writes."""
        with _explained("unmap a buffer"):
            base: Any = view.base
            event: Event = base.release(self.handle)
            event.wait()
            return event

    @contextmanager
    def mapped(self, buffer: Buffer, nbytes: int, *, offset: int, unmapped: Callable[[Event], None]) -> Iterator[Bytes]:
        """Map bytes of a buffer in the body, for writing all of them. `unmapped` receives the event that other queues must wait
        for.

        No command may use `buffer` meanwhile. Pass a sub-buffer if other parts of the buffer are in use.
        """
        view = self.map(buffer, nbytes, offset=offset, invalidate=True)
        try:
            yield view
        finally:
            unmapped(self.unmap(view))

    def finish(self) -> None:
        """Wait until all enqueued commands have completed; other threads run meanwhile."""
        try:
            self.handle.finish()
        except cl.Error as error:
            raise _run_error("finish", error) from error


def _event(handle: int | None) -> LaunchEvent:
    """The event with this handle, which it then owns."""
    event: LaunchEvent = cl.Event.from_int_ptr(handle, retain=False)
    return event


def wait(event: Event) -> None:
    """Wait until the command of `event` has completed; other threads run meanwhile."""
    try:
        event.wait()
    except cl.Error as error:
        raise _run_error("finish a command", error) from error


def has_ended(event: LaunchEvent) -> bool:
    """Whether the command of `event` has completed or failed. `wait` then returns or raises at once."""
    with _explained("ask how far a command is"):
        status: int = event.command_execution_status
    return bool(status <= cl.command_execution_status.COMPLETE)


def event_seconds(event: LaunchEvent) -> tuple[float, float]:
    """Start and end of a completed command in seconds of the device's clock, from a queue with profiling."""
    with _explained("read a command's times"):
        return event.profile.start * 1e-9, event.profile.end * 1e-9


class Context:
    """An OpenCL context of one device: creates queues, memory objects and programs."""

    def __init__(self, device: Device, *, later: bool = False) -> None:
        """`later`: a thread makes it, and the first use waits: some drivers take 0.1 s.

        Raises:
            RunError: the process was forked after the driver had started, PoCL's cache has no room, or, without `later`, the
                driver refuses.
        """
        self.device = device
        if started_before_fork() and not device.survives_fork:
            raise RunError(
                f"{device.platform} was started before this process was forked, and its threads stayed behind; start the "
                "process with multiprocessing's method 'spawn', or use OpenCL in it only after the fork"
            )
        if device.compiles_at_launch:
            check_room()
        self._making: Apart[Handle] | None = None
        if later:
            self._making = Apart("flashmem-context", undocumented.make_context, device.handle)
        else:
            self._handle = undocumented.make_context(device.handle)
        self._queues: list[weakref.ref[Queue]] = []

    @property
    def ready(self) -> bool:
        """Whether no use has to wait."""
        return self._making is None or self._making.done

    @property
    def handle(self) -> Handle:
        """pyopencl's context. Raises like `wait`."""
        self.wait()
        return self._handle

    def wait(self) -> None:
        """Wait until it is made. Raises RunError: the driver refuses."""
        making = self._making
        if making is not None:
            self._handle = making.result()
            self._making = None

    def queue(self, *, profiling: bool = False) -> Queue:
        """A new in-order queue."""
        with _explained("create a queue"):
            made = Queue(self.handle, self.device.handle, profiling=profiling)
        self._queues[:] = [each for each in self._queues if each() is not None] + [weakref.ref(made)]
        return made

    def recorder(self, queue: Queue, probed: Mapping[str, str] = MappingProxyType({})) -> Recorder | None:
        """A recorder for launches of `queue`; None if the driver lacks an extension for it or, with a warning, refuses.

        `probed`: results of probes (`DeviceDescriptor.probed`). Qualcomm's queues are used after theirs has passed.
        """
        find = functions_of(self.device.handle.platform)
        own = queue.handle.int_ptr
        try:
            if COMMAND_BUFFERS in self.device.extensions:
                return CommandBuffers(find, own)
            if RECORDABLE_QUEUES in passed_probes(self.device, probed):
                return RecordableQueues(find, own, self.handle.int_ptr, self.device.handle.int_ptr)
        except RunError as error:
            warnings.warn(not_recorded(error), FlashmemWarning, stacklevel=2)
        return None

    def buffer(self, nbytes: int, *, host_visible: bool = False, of_tensors: bool = False) -> Buffer:
        """A new buffer; with `host_visible`, one that the host can map without a copy.

        `of_tensors`: tensors use the same bytes in turn, through sub-buffers.
        """
        if self.device.by_address and of_tensors and nbytes <= shared_memory.MOST_BYTES:
            return shared_memory.allocate(self.handle, nbytes, partial(_finish, self._queues))
        flags = cl.mem_flags.READ_WRITE | (cl.mem_flags.ALLOC_HOST_PTR if host_visible else 0)
        with _explained(f"allocate a buffer of {nbytes} bytes"):
            buffer: Buffer = cl.Buffer(self.handle, flags, size=nbytes)
            return buffer

    def wrap(self, data: Bytes) -> Buffer:
        """A read-only buffer over the host memory `data`, without a copy. `data` must outlive it."""
        with _explained(f"use {data.nbytes} mapped bytes in place"):
            buffer: Buffer = cl.Buffer(self.handle, cl.mem_flags.READ_ONLY | cl.mem_flags.USE_HOST_PTR, hostbuf=data)
            return buffer

    def scratch(self, data: Bytes) -> Buffer:
        """A buffer over the host memory `data`, without a copy, that kernels read and write. It keeps `data` alive. For
        CPUs.
        """
        with _explained(f"use {data.nbytes} bytes in place"):
            buffer: Buffer = cl.Buffer(self.handle, cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR, hostbuf=data)
            return buffer

    def sub_buffer(self, buffer: Buffer, offset: int, nbytes: int) -> Buffer:
        """A sub-buffer: `nbytes` bytes of a buffer from byte `offset` on."""
        with _explained(f"make a sub-buffer of {nbytes} bytes at {offset}"):
            return buffer.get_sub_region(offset, nbytes)

    def image(self, width: int, height: int, channel: Channel) -> Texture:
        """A texture of RGBA texels that kernels read and may write."""
        with _explained(f"allocate a texture of {width} x {height} texels"):
            image: Texture = cl.Image(self.handle, cl.mem_flags.READ_WRITE, _format(channel), desc=_image2d(width, height))
            return image

    def image_view(self, buffer: Buffer, width: int, height: int, row_pitch: int, channel: Channel) -> Texture:
        """A texture over a buffer's memory, with rows `row_pitch` bytes apart (cl_khr_image2d_from_buffer)."""
        with _explained(f"create a texture of {width} x {height} texels over a buffer"):
            shape = _image2d(width, height, row_pitch, buffer)
            image: Texture = cl.Image(self.handle, cl.mem_flags.READ_ONLY, _format(channel), desc=shape)
            return image

    def build(self, source: str, options: Sequence[str]) -> CompiledProgram:
        """Compile OpenCL C with the device's instructions; version 3 for subgroup shuffles and dot products of an extension."""
        dots = self.device.dots in (KHRONOS, KHRONOS_MIXED) and uses_dot_products(source)
        if (self.device.shuffles and shuffles(source)) or dots:
            options = [*options, "-cl-std=CL3.0"]
        with _explained("compile the kernels"), _QUIET:
            source = self.device.with_instructions(source)
            return CompiledProgram(cl.Program(self.handle, source).build([*options, _NO_WARNINGS], cache_dir=False))

    def load(self, binary: bytes, options: Sequence[str]) -> CompiledProgram:
        """Load a program from the result of `CompiledProgram.binary`."""
        with _explained("load compiled kernels"), _QUIET:
            return CompiledProgram(cl.Program(self.handle, [self.device.handle], [binary]).build(list(options)))


def _finish(queues: Iterable[weakref.ref[Queue]]) -> None:
    """Wait for all commands of the `queues` that are left, as far as the device permits."""
    for queue in [queue for each in list(queues) if (queue := each()) is not None]:
        with suppress(RunError):  # a lost device runs nothing
            queue.finish()


def set_memory(kernel: KernelObject, index: int, memory: DeviceMemory) -> None:
    """Set an argument of a kernel to a memory object, for its next launches."""
    with _explained(f"set up the kernel {kernel.function_name}"):
        _set_memory(kernel, index, memory)


def _set_memory(kernel: KernelObject, index: int, memory: DeviceMemory) -> None:
    if isinstance(memory, SharedMemory):
        shared_memory.set_argument(kernel, index, memory)
    else:
        kernel.set_arg(index, memory)


class CompiledProgram:
    """A compiled program."""

    def __init__(self, handle: ProgramHandle) -> None:
        self._handle = handle

    def kernel(self, name: str, arguments: Sequence[Any]) -> KernelObject:
        """A new kernel object with its arguments set: memory objects, `numpy.int32`, `numpy.float32`; None: not set yet."""
        with _explained(f"set up the kernel {name}"):
            kernel: KernelObject = undocumented.new_kernel(self._handle, name)
            if kernel.num_args != len(arguments):
                raise RunError(f"kernel {name} takes {kernel.num_args} arguments, the program has {len(arguments)}")
            for index, argument in enumerate(arguments):
                if argument is None:
                    continue
                if isinstance(argument, np.generic):
                    undocumented.set_number(kernel, index, argument)
                else:
                    _set_memory(kernel, index, argument)
            return kernel

    def check(self, name: str) -> None:
        """Create and drop a kernel object, since some drivers compile then. Raises RunError if the kernel does not exist."""
        with _explained(f"set up the kernel {name}"):
            undocumented.new_kernel(self._handle, name)

    def binary(self) -> bytes:
        """The compiled binary. Some drivers complete it only after the kernels have run (docs/research/opencl-notes.md)."""
        with _explained("fetch compiled kernels"):
            binaries: list[bytes] = self._handle.get_info(cl.program_info.BINARIES)
            return binaries[0]


def _image2d(width: int, height: int, row_pitch: int = 0, buffer: Buffer | None = None) -> Any:
    shape = cl.ImageDescriptor()
    shape.image_type = cl.mem_object_type.IMAGE2D
    shape.shape = (width, height, 0)
    shape.array_size = 0
    shape.pitches = (row_pitch, 0)
    shape.num_mip_levels = shape.num_samples = 0
    shape.buffer = buffer
    return shape


def _format(channel: Channel) -> Any:
    types = {
        "float": cl.channel_type.FLOAT,
        "half": cl.channel_type.HALF_FLOAT,
        "uint8": cl.channel_type.UNSIGNED_INT8,
        "uint16": cl.channel_type.UNSIGNED_INT16,
    }
    return cl.ImageFormat(cl.channel_order.RGBA, types[channel])


def release(*objects: DeviceMemory) -> None:
    """Release memory objects now, without waiting for Python's garbage collection."""
    for handle in objects:
        with _explained("release memory"):
            handle.release()
