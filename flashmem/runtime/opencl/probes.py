"""Probes of a driver's extensions: host memory that kernels read in place, and recorded launches.

Each probe uses an extension as the runtime would, on a small input, and checks the kernel's result: drivers report extensions
that do not work. A driver may crash, so each probe runs in its own process:

    python -m flashmem.runtime.opencl.probes cl_arm_import_memory_host DEVICE-NUMBER FOLDER

Prints the result as one line of JSON. `results` reads results back. Specifications: registry.khronos.org/OpenCL/extensions
(arm/cl_arm_import_memory.txt, qcom/cl_qcom_ext_host_ptr.txt, cl_khr_external_memory_dma_buf), and CL/cl_ext.h for numbers.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, get_args

import numpy as np

from flashmem.base.child_processes import ending_in_a_sentence
from flashmem.base.errors import RunError, UserError
from flashmem.runtime.opencl.binding import checked, cl
from flashmem.runtime.opencl.context import Context, Queue
from flashmem.runtime.opencl.discovery import device_at
from flashmem.runtime.opencl.launching import (
    COMMAND_BUFFERS,
    RECORDABLE_QUEUES,
    CommandBuffers,
    Find,
    RecordableQueues,
    Recorder,
    c_function,
    functions_of,
)
from flashmem.target.descriptor import IMPORT_HOST_MEMORY

Outcome = Literal["passed", "failed", "absent"]

ARM_IMPORT = IMPORT_HOST_MEMORY
QCOM_HOST_POINTER = "cl_qcom_ext_host_ptr"
DMA_BUF = "cl_khr_external_memory_dma_buf"
HOST_POINTER = "CL_MEM_USE_HOST_PTR"

BYTES = 1 << 20  # of the memory that a kernel reads; a multiple of every page size
_LAUNCHES = 16
_PLAYS = 2

_NUMBER = ctypes.c_uint
_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_size_t
_CODE = ctypes.c_int
_FLAGS = ctypes.c_ulonglong
_READ_ONLY = 1 << 2
_USE_HOST_PTR = 1 << 3
_EXT_HOST_PTR = 1 << 29
_IMPORT_TYPE = 0x40B2  # CL_IMPORT_TYPE_ARM
_IMPORT_HOST = 0x40B3  # CL_IMPORT_TYPE_HOST_ARM
_EXTERNAL_DMA_BUF = 0x2067  # CL_EXTERNAL_MEMORY_HANDLE_DMA_BUF_KHR
_QCOM_DMA_BUF = 0x411D  # CL_MEM_DMABUF_HOST_PTR_QCOM
_WRITE_BACK = 0x40A5  # CL_MEM_HOST_WRITEBACK_QCOM
_QCOM_DMA_BUF_EXTENSION = "cl_qcom_dmabuf_host_ptr"

_HEAP = Path("/dev/dma_heap/system")
_HEAP_ALLOCATE = 0xC0184800  # DMA_HEAP_IOCTL_ALLOC of linux/dma-heap.h: struct of a u64, two u32 and a u64
_SYNCHRONISE = 0x40086200  # DMA_BUF_IOCTL_SYNC of linux/dma-buf.h: a u64 of flags
_BEGIN_WRITE = 2
_END_WRITE = 2 | 4

_SOURCE = """
__kernel void sum(__global const uint* numbers, __global uint* sums, uint count) {
    uint item = (uint)get_global_id(0), total = 0;
    for (uint i = item; i < count; i += (uint)get_global_size(0)) total += numbers[i];
    sums[item] = total;
}
__kernel void add(__global uint* numbers) { numbers[get_global_id(0)] += 1; }
"""
_ITEMS = 64


@dataclass(frozen=True)
class Probe:
    """The result of one probe. `absent`: the driver does not report the extension. `said`: one sentence.

    `facts`: what else was found, by name: kinds of memory that worked, seconds. `driver`: the `Device.driver` it is valid for.
    """

    extension: str
    outcome: Outcome
    said: str
    facts: Mapping[str, str | float] = field(default_factory=dict)
    driver: str = ""


def results(data: object) -> dict[str, Probe]:
    """The probes in JSON data: an object of `asdict(Probe)` by extension.

    Raises:
        UserError: the data is something else.
    """
    try:
        found = {str(name): Probe(**each) for name, each in dict(data).items()}  # type: ignore[call-overload]
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"these are not results of probes ({error}); make the file again") from error
    for probe in found.values():
        if probe.outcome not in get_args(Outcome):
            raise UserError(f"{probe.outcome!r} is not the outcome of a probe; make the file again")
    return found


def passed_probes(found: Mapping[str, Probe]) -> dict[str, str]:
    """`DeviceDescriptor.probed` from results: the drivers on which probes of extensions passed."""
    return {name: probe.driver for name, probe in found.items() if probe.outcome == "passed" and name != HOST_POINTER}


def arm_import_memory(context: Context, find: Find, folder: Path) -> Probe:
    """Import memory by cl_arm_import_memory: mapped file pages in two kinds of mapping, and anonymous memory."""
    create = c_function(
        find, "clImportMemoryARM", _POINTER, _POINTER, _FLAGS, ctypes.POINTER(ctypes.c_ssize_t), _POINTER, _SIZE, _POINTER
    )
    kind = (ctypes.c_ssize_t * 3)(_IMPORT_TYPE, _IMPORT_HOST, 0)

    def imported(address: int) -> Any:
        error = _CODE()
        handle = create(context.handle.int_ptr, _READ_ONLY, kind, address, BYTES, ctypes.byref(error))
        checked("import host memory", error.value)
        return cl.Buffer.from_int_ptr(handle, retain=False)

    return _read_in_place(ARM_IMPORT, context, folder, imported)


def qcom_host_pointer(context: Context, find: Find, folder: Path) -> Probe:
    """Give a dma-buf of the system's heap to the driver by cl_qcom_ext_host_ptr and cl_qcom_dmabuf_host_ptr.

    Qualcomm's extension takes ION and dma-buf memory only, not mapped files: weights have to be read into such memory.
    """
    if _QCOM_DMA_BUF_EXTENSION not in context.device.extensions:
        return Probe(
            QCOM_HOST_POINTER, "failed", f"the driver lacks {_QCOM_DMA_BUF_EXTENSION}, so no dma-buf can be given to it"
        )
    create = c_function(find, "clCreateBuffer", _POINTER, _POINTER, _FLAGS, _SIZE, _POINTER, _POINTER)

    class HostPointer(ctypes.Structure):
        _fields_ = (("allocation", _NUMBER), ("policy", _NUMBER), ("descriptor", _CODE), ("address", _POINTER))

    def imported(descriptor: int, address: int) -> Any:
        error = _CODE()
        pointer = HostPointer(_QCOM_DMA_BUF, _WRITE_BACK, descriptor, address)
        flags = _READ_ONLY | _USE_HOST_PTR | _EXT_HOST_PTR
        handle = create(context.handle.int_ptr, flags, BYTES, ctypes.byref(pointer), ctypes.byref(error))
        checked("use a dma-buf as a host pointer", error.value)
        return cl.Buffer.from_int_ptr(handle, retain=False)

    return _read_dma_buf(QCOM_HOST_POINTER, context, imported)


def khr_dma_buf(context: Context, find: Find, folder: Path) -> Probe:
    """Import a dma-buf of the system's heap by cl_khr_external_memory_dma_buf."""
    create = c_function(
        find, "clCreateBufferWithProperties",
        _POINTER, _POINTER, ctypes.POINTER(ctypes.c_ulonglong), _FLAGS, _SIZE, _POINTER, _POINTER,
    )  # fmt: skip
    names = ("clEnqueueAcquireExternalMemObjectsKHR", "clEnqueueReleaseExternalMemObjectsKHR")
    acquire, release = (
        c_function(find, name, _CODE, _POINTER, _NUMBER, _POINTER, _NUMBER, _POINTER, _POINTER) for name in names
    )

    def imported(descriptor: int, address: int) -> Any:
        error = _CODE()
        properties = (ctypes.c_ulonglong * 3)(_EXTERNAL_DMA_BUF, descriptor, 0)
        handle = create(context.handle.int_ptr, properties, _READ_ONLY, BYTES, None, ctypes.byref(error))
        checked("import a dma-buf", error.value)
        return cl.Buffer.from_int_ptr(handle, retain=False)

    @contextmanager
    def acquired(queue: Queue, buffer: Any) -> Iterator[None]:
        objects = (_POINTER * 1)(buffer.int_ptr)
        checked("acquire a dma-buf", acquire(queue.handle.int_ptr, 1, objects, 0, None, None))
        yield
        checked("release a dma-buf", release(queue.handle.int_ptr, 1, objects, 0, None, None))

    return _read_dma_buf(DMA_BUF, context, imported, acquired)


def use_host_pointer(context: Context, find: Find, folder: Path) -> Probe:
    """Whether CL_MEM_USE_HOST_PTR reads mapped file pages in place, or copies them."""
    return _read_in_place(HOST_POINTER, context, folder, lambda address: context.wrap(np.frombuffer(_at(address), np.uint8)))


def recordable_queues(context: Context, find: Find, folder: Path) -> Probe:
    """Record launches by cl_qcom_recordable_queues, and replay them."""
    handles = context.handle.int_ptr, context.device.handle.int_ptr
    return _record(RECORDABLE_QUEUES, context, lambda queue: RecordableQueues(find, queue.handle.int_ptr, *handles))


def command_buffers(context: Context, find: Find, folder: Path) -> Probe:
    """Record launches by cl_khr_command_buffer, and replay them."""
    return _record(COMMAND_BUFFERS, context, lambda queue: CommandBuffers(find, queue.handle.int_ptr))


PROBES: dict[str, Callable[[Context, Find, Path], Probe]] = {
    ARM_IMPORT: arm_import_memory,
    QCOM_HOST_POINTER: qcom_host_pointer,
    DMA_BUF: khr_dma_buf,
    HOST_POINTER: use_host_pointer,
    RECORDABLE_QUEUES: recordable_queues,
    COMMAND_BUFFERS: command_buffers,
}
"""The probes by extension; CL_MEM_USE_HOST_PTR is in every driver."""


def run_probe(extension: str, context: Context, folder: Path, find: Find | None = None) -> Probe:
    """Run one probe. `folder`: for a file of BYTES, removed afterwards. `find`: finds the driver's functions.

    Raises:
        UserError: no such probe.
    """
    if extension not in PROBES:
        raise UserError(f"no probe of {extension!r}; name one of: {', '.join(PROBES)}")
    if extension != HOST_POINTER and extension not in context.device.extensions:
        return Probe(extension, "absent", "the driver does not report it", driver=context.device.driver)
    try:
        found = PROBES[extension](context, find or functions_of(context.device.handle.platform), folder)
    except (RunError, OSError) as error:
        found = Probe(extension, "failed", str(error))
    return replace(found, driver=context.device.driver)


def _read_in_place(extension: str, context: Context, folder: Path, imported: Callable[[int], Any]) -> Probe:
    """Whether a kernel reads host memory in place: file pages in two kinds of mapping, and anonymous memory."""
    reader = _Reader(context)
    facts = dict[str, str | float]()
    numbers = _numbers(1)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(numbers.data)
        file.flush()
        kinds: dict[str, Callable[[], mmap.mmap]] = {
            _AS_THE_RUNTIME: lambda: mmap.mmap(file.fileno(), BYTES, mmap.MAP_SHARED, mmap.PROT_READ),
            "file pages, private, writable": lambda: mmap.mmap(file.fileno(), BYTES, mmap.MAP_PRIVATE),
            "anonymous memory": lambda: mmap.mmap(-1, BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
        }
        for kind, make in kinds.items():
            memory = make()
            try:
                facts[kind] = reader.judge(memory, numbers, imported, file.fileno() if "shared" in kind else None)
            except RunError as error:
                facts[kind] = str(error)
    good = [kind for kind, found in facts.items() if found in (IN_PLACE, IN_PLACE_WHEN_MAPPED)]
    if good and facts[_AS_THE_RUNTIME] in (IN_PLACE, UNSEEN):
        return Probe(extension, "passed", f"kernels read in place: {'; '.join(good)}", facts)
    return Probe(extension, "failed", "; ".join(f"{kind}: {found}" for kind, found in facts.items()), facts)


IN_PLACE = "in place"
"""The judgement of memory whose later changes kernels see at once."""

IN_PLACE_WHEN_MAPPED = "in place, and changes are seen after a map"

UNSEEN = "right, but later changes are not seen"
"""A copy, or caches that are not coherent. The other kinds of memory show which."""

_AS_THE_RUNTIME = "file pages, shared, read only"
"""The kind of mapping in which the runtime has the weight file: it has to work, and one kind has to be in place."""


class _Reader:
    """Runs a kernel that sums the numbers in a buffer."""

    def __init__(self, context: Context) -> None:
        self.queue = context.queue()
        self._sums = context.buffer(4 * _ITEMS)
        self._program = context.build(_SOURCE, [])

    def _total(self, buffer: Any) -> int:
        """The sum of the buffer's numbers, modulo 2**32, by the device."""
        kernel = self._program.kernel("sum", [buffer, self._sums, np.uint32(BYTES // 4)])
        self.queue.launch(self.queue.prepare(kernel, (_ITEMS,), None))
        found = np.empty(_ITEMS, np.uint32)
        self.queue.read(found, self._sums)
        return int(found.sum(dtype=np.uint32))

    def reads(self, buffer: Any, numbers: Any) -> bool:
        """Whether the device reads `numbers` in the buffer."""
        return self._total(buffer) == _sum(numbers)

    def judge(self, memory: mmap.mmap, numbers: Any, imported: Callable[[int], Any], file: int | None) -> str:
        """Whether the device reads `memory` through `imported`, and later changes by the host (through `file` if given) too.

        The runtime never changes memory in use, but only a change shows whether memory is used in place. Where caches are not
        coherent, the device sees the change after the host has mapped the buffer. A driver with a copy then restores the old
        numbers.
        """
        view = np.frombuffer(memory, np.uint32)
        if file is None:
            view[:] = numbers
        buffer = imported(view.ctypes.data)
        if not self.reads(buffer, numbers):
            return "the kernel reads other numbers than the host wrote"
        changed = _numbers(2)
        if file is not None:
            os.pwrite(file, changed.data, 0)
            try:
                return IN_PLACE if self.reads(buffer, changed) else UNSEEN
            finally:
                os.pwrite(file, numbers.data, 0)
        view[:] = changed
        if self.reads(buffer, changed):
            return IN_PLACE
        self.queue.unmap(self.queue.map(buffer, BYTES))
        return IN_PLACE_WHEN_MAPPED if self.reads(buffer, changed) else "copied"


def _numbers(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 1 << 32, BYTES // 4, np.uint32)


def _sum(numbers: Any) -> int:
    return int(numbers.sum(dtype=np.uint32))


def _at(address: int) -> Any:
    return (ctypes.c_uint8 * BYTES).from_address(address)


@contextmanager
def _always(queue: Queue, buffer: Any) -> Iterator[None]:
    yield


def _read_dma_buf(
    extension: str,
    context: Context,
    imported: Callable[[int, int], Any],
    acquired: Callable[[Queue, Any], Any] = _always,
) -> Probe:
    """Whether a kernel reads a dma-buf that the host has filled through a mapping. `imported(descriptor, address)` makes it."""
    try:
        descriptor = _allocate_dma_buf()
    except OSError as error:
        return Probe(extension, "failed", f"{_HEAP} gives no dma-buf: {error.strerror}")
    try:
        memory = mmap.mmap(descriptor, BYTES)
        numbers = _numbers(3)
        reader = _Reader(context)
        view = np.frombuffer(memory, np.uint32)
        fcntl.ioctl(descriptor, _SYNCHRONISE, struct.pack("Q", _BEGIN_WRITE))
        view[:] = numbers
        fcntl.ioctl(descriptor, _SYNCHRONISE, struct.pack("Q", _END_WRITE))
        buffer = imported(descriptor, view.ctypes.data)
        with acquired(reader.queue, buffer):
            right = reader.reads(buffer, numbers)
        buffer.release()
    finally:
        os.close(descriptor)
    if right:
        return Probe(extension, "passed", f"a kernel reads a dma-buf of {_HEAP} in place")
    return Probe(extension, "failed", "the kernel reads other numbers than the host wrote")


def _allocate_dma_buf() -> int:
    """The descriptor of a new dma-buf of BYTES from the system's heap. Raises OSError."""
    heap = os.open(_HEAP, os.O_RDONLY | os.O_CLOEXEC)
    try:
        request = bytearray(struct.pack("QIIQ", BYTES, 0, os.O_RDWR | os.O_CLOEXEC, 0))
        fcntl.ioctl(heap, _HEAP_ALLOCATE, request)
        descriptor: int = struct.unpack("QIIQ", request)[1]
        return descriptor
    finally:
        os.close(heap)


def _record(extension: str, context: Context, make: Callable[[Queue], Recorder]) -> Probe:
    """Record launches that count, replay them twice, and compare the counts."""
    queue = context.queue()
    counts = context.buffer(4 * _ITEMS)
    found = np.zeros(_ITEMS, np.uint32)
    queue.write(counts, found)
    program = context.build(_SOURCE, [])
    launch = queue.prepare(program.kernel("add", [counts]), (_ITEMS,), (_ITEMS,))
    recorder = make(queue)
    count = min(_LAUNCHES, recorder.most)
    queue.launch_all([launch] * count)  # loads the kernel
    queue.finish()
    begun = perf_counter()
    queue.launch_all([launch] * count)
    queue.finish()
    one_by_one = perf_counter() - begun
    recording = recorder.record([launch] * count)
    for _ in range(_PLAYS):
        begun = perf_counter()
        queue.play(recording).wait()
        recorded = perf_counter() - begun
    queue.read(found, counts)
    wanted = count * (2 + _PLAYS)
    facts = {"launches": float(count), "seconds one by one": one_by_one, "seconds recorded": recorded}
    if (found == wanted).all():
        return Probe(extension, "passed", f"{count} recorded launches ran {_PLAYS} times", facts)
    return Probe(extension, "failed", f"after {wanted} launches the count is {found.min()} to {found.max()}", facts)


def main() -> None:
    """Run one probe and print its result."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a driver's output must not mix with the result
    extension, number, folder = sys.argv[1:]
    with ending_in_a_sentence():
        answers.write(json.dumps(asdict(run_probe(extension, Context(device_at(int(number))), Path(folder)))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
