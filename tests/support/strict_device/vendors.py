"""Vendors' extensions: cl_arm_import_memory (host memory) and cl_qcom_recordable_queues, as C functions at addresses.

`Vendors.address` gives the address of a function: of an extension of the profile, or of a function of the library that callers
of such an extension look up too. Errors cannot leave a C callback: the rules record them, and the call returns a code.

Imports: Khronos' registry, extensions/arm/cl_arm_import_memory.txt, revision 12. Recordings: Qualcomm's header `cl_ext_qcom.h`
has the functions; it says nothing of what they do, so the rules are those of cl_khr_command_buffer: a recording keeps the
arguments of its kernels, has no wait lists and no events, is enqueued after its end only, and not again before it is complete.
"""
# ruff: noqa: N802 - the names are OpenCL's

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyopencl as cl

from tests.support.strict_device.commands import BrokenRuleError
from tests.support.strict_device.objects import StrictBuffer, StrictEvent, StrictQueue, World
from tests.support.strict_device.programs import StrictKernel, launch

IMPORT = "cl_arm_import_memory_host"
RECORD = "cl_qcom_recordable_queues"

_P, _N, _CODE, _SIZE, _BITS = ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_size_t, ctypes.c_ulonglong
_TYPES: dict[str, tuple[str, tuple[Any, ...]]] = {  # the extension, the result and the parameters
    "clImportMemoryARM": (IMPORT, (_P, _P, _BITS, _P, _P, _SIZE, _P)),
    "clNewRecordingQCOM": (RECORD, (_P, _P, _P)),
    "clEndRecordingQCOM": (RECORD, (_CODE, _P)),
    "clReleaseRecordingQCOM": (RECORD, (_CODE, _P)),
    "clEnqueueRecordingQCOM": (RECORD, (_CODE, _P, _P, *[_SIZE, _P] * 4, _N, _P, _P)),
    "clCreateCommandQueue": ("", (_P, _P, _P, _BITS, _P)),
    "clReleaseCommandQueue": ("", (_CODE, _P)),
    "clEnqueueNDRangeKernel": ("", (_CODE, _P, _P, _N, _P, _P, _P, _N, _P, _P)),
    "clGetDeviceInfo": ("", (_CODE, _P, _N, _SIZE, _P, _P)),
}
_REFUSED = -59  # CL_INVALID_OPERATION
_IMPORT_TYPE, _HOST = 0x40B2, 0x40B3
_RECORDABLE_QUEUE_MAX_SIZE, _RECORDABLE = 0x41DE, 1 << 30
_CACHE_LINE = 64
_PAGE = 4096
_IMPORT_FLAGS = int(
    cl.mem_flags.READ_WRITE | cl.mem_flags.WRITE_ONLY | cl.mem_flags.READ_ONLY | cl.mem_flags.USE_HOST_PTR
    | cl.mem_flags.HOST_WRITE_ONLY | cl.mem_flags.HOST_READ_ONLY | cl.mem_flags.HOST_NO_ACCESS
)  # fmt: skip


_Given = dict[int, Callable[[], Any]]

_callbacks: list[Any] = []
"""Every C function whose address was given: a program may release what it holds long after its device is gone."""


class ImportedBuffer(StrictBuffer):
    """A buffer over pages of the program, which are pinned until it is released."""

    pages: range

    def release(self) -> None:
        """Release it, and its pages."""
        super().release()
        self.world.pinned.remove(self.pages)


@dataclass
class _Recording:
    """Launches: kernel, global size, local size, and the arguments at the time of recording."""

    queue: int
    launches: list[tuple[StrictKernel, tuple[int, ...], tuple[int, ...] | None, _Given]] = field(default_factory=list)
    ended: bool = False
    last: StrictEvent | None = None


class Vendors:
    """The functions of a strict device's extensions."""

    def __init__(self, world: World, gave: Callable[[Any, StrictEvent], int]) -> None:
        """`gave` returns an event through a pointer."""
        self._world, self._gave = world, gave
        self._callbacks: dict[str, Any] = {}
        self._numbers = itertools.count(0x1000, 16)
        self._queues: set[int] = set()  # recordable ones
        self._recordings: dict[int, _Recording] = {}
        self._open: dict[int, _Recording] = {}  # by queue

    def address(self, name: str) -> int:
        """The address of a function; 0 if the device does not have it."""
        extension, types = _TYPES.get(name, ("?", ()))
        if extension and extension not in self._world.profile.extensions:
            return 0
        if name not in self._callbacks:
            self._callbacks[name] = ctypes.CFUNCTYPE(*types)(self._guarded(getattr(self, f"_{name}"), types[0]))
            _callbacks.append(self._callbacks[name])
        return int(ctypes.cast(self._callbacks[name], _P).value or 0)

    def _guarded(self, method: Callable[..., int], result: Any) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            try:
                return method(*arguments)
            except (BrokenRuleError, cl.Error):
                if result is _P:
                    _write(arguments[-1], ctypes.c_int, _REFUSED)
                return 0 if result is _P else _REFUSED

        return call

    # -- imports of host memory

    def _clImportMemoryARM(self, _: int, flags: int, properties: Any, memory: int | None, size: int, error: Any) -> int:
        world, rules = self._world, self._world.rules
        if flags & ~_IMPORT_FLAGS or memory is None or size < 1:
            rules.broke("arguments", f"an import of {size} bytes at {memory} with flags {flags:#x}")
        if properties and tuple((ctypes.c_ssize_t * 3).from_address(properties)) != (_IMPORT_TYPE, _HOST, 0):
            rules.broke("arguments", "an import of something else than host memory")
        if memory % _CACHE_LINE:
            rules.broke("aligned", f"an import at {memory:#x}, and caches have lines of {_CACHE_LINE} bytes")
        first, end = memory // _PAGE, -(-(memory + size) // _PAGE)
        libc = ctypes.CDLL(None)
        if libc.msync(_P(first * _PAGE), _SIZE((end - first) * _PAGE), 1):  # MS_ASYNC: fails where nothing is mapped
            rules.broke("range", f"an import of {size} bytes at {memory:#x}, where pages are not mapped")
        pages = range(first, end)
        if (memory % _PAGE or size % _PAGE) and any(max(pages[0], p[0]) <= min(pages[-1], p[-1]) for p in world.pinned):
            rules.broke("overlap", f"an import of {size} bytes at {memory:#x} shares a page with another one")
        world.limit("bytes of an import", size, world.profile.max_alloc)
        writes = not flags & int(cl.mem_flags.READ_ONLY)
        data = np.frombuffer((ctypes.c_ubyte * size).from_address(memory), np.uint8)
        real = cl.Buffer(world.context, cl.mem_flags.READ_ONLY | cl.mem_flags.USE_HOST_PTR, hostbuf=data)
        what = f"an import of {size} bytes"
        made = ImportedBuffer(world, rules.allocate(what, size, kernels_write=writes), real)
        made.pages = pages
        world.pin(pages)
        world.kept[made.int_ptr] = made
        _write(error, ctypes.c_int, 0)
        return int(made.int_ptr)

    # -- recorded launches

    def _clGetDeviceInfo(self, _: int, parameter: int, size: int, value: Any, __: Any) -> int:
        assert (parameter, size) == (_RECORDABLE_QUEUE_MAX_SIZE, 4)
        _write(value, ctypes.c_uint, self._world.profile.recordable)
        return 0

    def _clCreateCommandQueue(self, _: int, device: int, properties: int, error: Any) -> int:
        if RECORD not in self._world.profile.extensions or properties != _RECORDABLE:
            self._world.rules.broke("extension", f"a queue with properties {properties:#x}")
        number = next(self._numbers)
        self._queues.add(number)
        _write(error, ctypes.c_int, 0)
        return number

    def _clReleaseCommandQueue(self, queue: int) -> int:
        self._queues.remove(queue)
        return 0

    def _clNewRecordingQCOM(self, queue: int, error: Any) -> int:
        if queue not in self._queues or queue in self._open:
            self._world.rules.broke("record", "a recording on a queue that does not record, or before the last one has ended")
        number = next(self._numbers)
        self._recordings[number] = self._open[queue] = _Recording(queue)
        _write(error, ctypes.c_int, 0)
        return number

    def _clEnqueueNDRangeKernel(
        self, queue: int, kernel: int, dimensions: int, offset: Any, sizes: Any, groups: Any, count: int, waits: Any, event: Any
    ) -> int:
        rules = self._world.rules
        recording = self._open.get(queue)
        if recording is None or offset or count or waits or event:
            rules.broke("record", "a launch is recorded with an offset, events or a wait list, or outside a recording")
        recorded = self._world.handles[kernel]
        recorded.check()
        whole, group = _sizes(sizes, dimensions), _sizes(groups, dimensions) if groups else None
        recording.launches.append((recorded, whole, group, dict(recorded.given)))
        self._world.limit("launches of a recording", len(recording.launches), self._world.profile.recordable)
        return 0

    def _clEndRecordingQCOM(self, recording: int) -> int:
        found = self._found(recording)
        if found.ended:
            self._world.rules.broke("record", "a recording is ended twice")
        found.ended = True
        del self._open[found.queue]
        return 0

    def _clReleaseRecordingQCOM(self, recording: int) -> int:
        self._found(recording)
        del self._recordings[recording]
        return 0

    def _clEnqueueRecordingQCOM(self, queue: int, recording: int, *rest: Any) -> int:
        *updates, count, waits, event = rest
        found, rules = self._found(recording), self._world.rules
        if any(updates) or count or waits:
            raise NotImplementedError("updates of recordings, and their wait lists")
        if not found.ended or queue in self._queues:
            rules.broke("record", "a recording is enqueued before its end, or on a queue that records")
        if found.last is not None and not rules.is_known(found.last.command):
            rules.broke("record", "a recording is enqueued again, and nobody knows that it is complete")
        target: StrictQueue = self._world.handles[queue]
        for kernel, whole, group, given in found.launches:
            now = dict(kernel.given)
            self._set(kernel, given)
            found.last = launch(target, kernel, whole, group)
            if now != given:
                self._set(kernel, now)
        assert found.last is not None
        return self._gave(event, found.last)

    def _set(self, kernel: StrictKernel, given: _Given) -> None:
        for index, value in given.items():
            if (argument := value()) is None:
                self._world.rules.broke("released", f"{kernel.function_name} is replayed with memory that was released")
            kernel.set_arg(index, argument)

    def _found(self, recording: int) -> _Recording:
        if recording not in self._recordings:
            self._world.rules.broke("released", f"a call with a recording that is nobody's any more: {recording:#x}")
        return self._recordings[recording]


def _sizes(pointer: Any, count: int) -> tuple[int, ...]:
    return tuple((_SIZE * count).from_address(pointer))


def _write(pointer: Any, kind: Any, value: int) -> None:
    if pointer:
        kind.from_address(pointer).value = value
