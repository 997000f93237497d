"""Tests of the strict device's imports and recordings: calls that break a rule are caught, and correct ones are not."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.strict_device import BrokenRuleError, StrictOpenCL
from tests.support.strict_device.door import base_device
from tests.support.strict_device.vendors import Vendors
from tests.support.strict_program import FLOATS, PART, Small, profile

PAGE = mmap.PAGESIZE
HOST = (ctypes.c_ssize_t * 3)(0x40B2, 0x40B3, 0)
READ_ONLY = 4


class Calls:
    """A small program, with the vendors' functions as C calls them: pointers and handles are numbers."""

    def __init__(self, name: str) -> None:
        self.p = Small(StrictOpenCL(profile(name, recordable=2), base_device()))
        self.functions = Vendors(self.p.cl.world, self._gave)
        self.given: list[Any] = []
        self.memory = mmap.mmap(-1, 4 * PAGE)
        self.host = np.frombuffer(self.memory, np.uint8)
        self.error = ctypes.c_int(-1)

    def _gave(self, where: Any, event: Any) -> int:
        self.given.append(event)
        return 0

    def pages(self, first: int = 0, nbytes: int = PAGE, flags: int = READ_ONLY, properties: Any = HOST) -> Any:
        """Import bytes of host memory from byte `first` on."""
        address = ctypes.addressof(properties) if properties is not None else None
        handle = self.functions._clImportMemoryARM(
            0, flags, address, self.host.ctypes.data + first, nbytes, ctypes.addressof(self.error)
        )
        return self.p.keep(self.p.cl.Buffer.from_int_ptr(handle, retain=False))

    def queue(self) -> int:
        """A queue that records."""
        return self.functions._clCreateCommandQueue(0, 0, 1 << 30, ctypes.addressof(self.error))

    def begin(self, queue: int) -> int:
        """A new recording."""
        return self.functions._clNewRecordingQCOM(queue, ctypes.addressof(self.error))

    def record(self, queue: int, kernel: Any, event: Any = None) -> int:
        """Record a launch."""
        sizes = (ctypes.c_size_t * 1)(FLOATS)
        return self.functions._clEnqueueNDRangeKernel(
            queue, kernel.int_ptr, 1, None, ctypes.addressof(sizes), None, 0, None, event
        )

    def play(self, recording: int, queue: int | None = None) -> Any:
        """Replay a recording; its event."""
        target = self.p.queue.int_ptr if queue is None else queue
        self.functions._clEnqueueRecordingQCOM(target, recording, *[0, None] * 4, 0, None, 1)
        return self.given[-1]


def import_inside_a_cache_line(c: Calls) -> None:
    c.pages(first=4)


def import_of_nothing(c: Calls) -> None:
    c.pages(nbytes=0)


def import_with_a_flag_for_new_memory(c: Calls) -> None:
    c.pages(flags=1 << 4)  # CL_MEM_ALLOC_HOST_PTR


def import_of_a_dma_buf(c: Calls) -> None:
    c.pages(properties=(ctypes.c_ssize_t * 3)(0x40B2, 0x40B4, 0))


def import_of_pages_that_are_not_mapped(c: Calls) -> None:
    c.pages(nbytes=1 << 40)


def imports_that_share_a_page(c: Calls) -> None:
    c.pages(nbytes=PAGE + 64)
    c.pages(first=PAGE + 64, nbytes=64)


def kernel_writes_what_is_imported_for_reading(c: Calls) -> None:
    c.p.kernel("copy", c.p.part(0), c.pages())


def kernel_reads_a_released_import(c: Calls) -> None:
    imported = c.pages()
    kernel = c.p.kernel("copy", imported, c.p.part(0))
    imported.release()
    c.p.launch(kernel)


def recording_is_played_before_its_end(c: Calls) -> None:
    queue = c.queue()
    recording = c.begin(queue)
    c.record(queue, c.p.kernel("copy", c.p.part(0), c.p.part(1)))
    c.play(recording)


def recording_is_played_on_the_queue_that_records(c: Calls) -> None:
    queue = c.queue()
    recording = c.begin(queue)
    c.functions._clEndRecordingQCOM(recording)
    c.play(recording, queue)


def recording_is_played_again_too_early(c: Calls) -> None:
    recording = recorded(c, c.p.kernel("copy", c.p.part(0), c.p.part(1)))
    c.play(recording)
    c.play(recording)


def two_recordings_at_a_time(c: Calls) -> None:
    queue = c.queue()
    c.begin(queue)
    c.begin(queue)


def launch_outside_a_recording(c: Calls) -> None:
    c.record(c.queue(), c.p.kernel("copy", c.p.part(0), c.p.part(1)))


def launch_with_an_event(c: Calls) -> None:
    queue = c.queue()
    c.begin(queue)
    c.record(queue, c.p.kernel("copy", c.p.part(0), c.p.part(1)), event=1)


def too_many_launches(c: Calls) -> None:
    recorded(c, *[c.p.kernel("copy", c.p.part(0), c.p.part(1)) for _ in range(3)])


def recording_without_an_argument(c: Calls) -> None:
    recorded(c, c.p.kernel("copy", c.p.part(0)))


def recording_of_released_memory(c: Calls) -> None:
    source = c.p.part(0)
    recording = recorded(c, c.p.kernel("copy", source, c.p.part(1)))
    source.release()
    c.play(recording)


def released_recording_is_played(c: Calls) -> None:
    recording = recorded(c, c.p.kernel("copy", c.p.part(0), c.p.part(1)))
    c.functions._clReleaseRecordingQCOM(recording)
    c.play(recording)


def recorded(c: Calls, *kernels: Any) -> int:
    queue = c.queue()
    recording = c.begin(queue)
    for kernel in kernels:
        c.p.keep(kernel)
        c.record(queue, kernel)
    c.functions._clEndRecordingQCOM(recording)
    return recording


BROKEN: dict[str, list[Callable[[Calls], None]]] = {
    "aligned": [import_inside_a_cache_line],
    "arguments": [
        import_of_nothing, import_with_a_flag_for_new_memory, import_of_a_dma_buf, kernel_writes_what_is_imported_for_reading,
        recording_without_an_argument,
    ],
    "range": [import_of_pages_that_are_not_mapped],
    "overlap": [imports_that_share_a_page],
    "released": [kernel_reads_a_released_import, recording_of_released_memory, released_recording_is_played],
    "record": [
        recording_is_played_before_its_end, recording_is_played_on_the_queue_that_records, recording_is_played_again_too_early,
        two_recordings_at_a_time, launch_outside_a_recording, launch_with_an_event,
    ],
    "limit": [too_many_launches],
}  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "program"), [pytest.param(rule, each, id=each.__name__) for rule, programs in BROKEN.items() for each in programs]
)
def test_what_breaks_a_rule_is_caught(rule: str, program: Callable[[Calls], None]) -> None:
    with pytest.raises(BrokenRuleError) as caught:
        program(Calls("mali-valhall" if "import" in program.__name__ else "adreno7xx"))
    assert caught.value.rule == rule, caught.value


def test_an_import_is_the_hosts_memory_until_it_is_released() -> None:
    c = Calls("mali-valhall")
    c.host[: 4 * FLOATS] = np.arange(FLOATS, dtype=np.float32).view(np.uint8)[:PAGE]
    imported, target = c.pages(nbytes=PART), c.p.part(1)
    assert c.error.value == 0 and c.p.cl.world.most_pinned == PART
    c.p.copy(imported, target).wait()
    assert np.array_equal(c.p.read(target), np.arange(FLOATS, dtype=np.float32))
    imported.release()
    assert c.p.cl.world.pinned == [] and c.p.cl.rules.broken == []


def test_a_recording_replays_the_arguments_of_its_time() -> None:
    c = Calls("adreno7xx")
    first, second, target = c.p.part(0), c.p.part(1), c.p.part(2)
    c.p.write(first, np.full(FLOATS, 1, np.float32))
    c.p.write(second, np.full(FLOATS, 2, np.float32))
    kernel = c.p.keep(c.p.kernel("copy", first, target))
    recording = recorded(c, kernel)
    kernel.set_arg(0, second)
    c.p.launch(kernel).wait()
    assert (c.p.read(target) == 2).all()
    for _ in range(2):
        c.play(recording).wait()
        assert (c.p.read(target) == 1).all()
    c.p.launch(kernel).wait()  # with its own argument again
    assert (c.p.read(target) == 2).all() and c.p.cl.rules.broken == []


def test_a_device_has_the_functions_of_its_extensions() -> None:
    mali, adreno = Calls("mali-valhall").functions, Calls("adreno7xx").functions
    assert mali.address("clImportMemoryARM") and not adreno.address("clImportMemoryARM")
    assert adreno.address("clNewRecordingQCOM") and not mali.address("clNewRecordingQCOM")
    assert not mali.address("clCreateCommandBufferKHR")
