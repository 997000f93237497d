"""Tests of the strict device: for each rule, programs that break it are caught, and correct ones are not."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.strict_device import PROFILES, BrokenRuleError, StrictLibrary, StrictOpenCL
from tests.support.strict_device.door import base_device
from tests.support.strict_program import BYTES, FLOATS, PART, SOURCE, Small, limited, profile


@pytest.fixture(params=["adreno7xx"])
def small(request: pytest.FixtureRequest) -> Small:
    return Small(StrictOpenCL(profile(request.param), base_device()))


# -- mapped memory


def kernel_reads_what_is_mapped(p: Small) -> None:
    place = p.part(0)
    p.map(place)
    p.launch(p.kernel("copy", place, p.part(1)))


def kernel_reads_a_part_of_what_is_mapped(p: Small) -> None:
    p.map(p.buffer)  # its first quarter
    p.launch(p.kernel("copy", p.part(2), p.part(1)))


def kernel_reads_the_whole_of_what_is_mapped(p: Small) -> None:
    place = p.part(3)
    view = p.map(place)
    p.launch(p.kernel("copy", p.buffer, p.new(PART)))
    del view


def kernel_reads_an_overlapping_part(p: Small) -> None:
    view = p.map(p.buffer.get_sub_region(PART // 2, PART))
    p.launch(p.kernel("copy", p.part(1), p.part(3)))
    del view


def kernel_writes_what_is_mapped_for_reading(p: Small) -> None:
    place = p.part(0)
    view = p.map(place, read=True)
    p.launch(p.kernel("copy", p.part(1), place))
    del view


def kernel_reads_an_image_over_what_is_mapped(p: Small) -> None:
    image = p.image(over=p.buffer, pitch=4096)
    view = p.map(p.buffer)
    p.launch(p.kernel("look", image, p.new(PART)), items=8)
    del view


def kernel_does_not_wait_for_the_unmap(p: Small) -> None:
    place = p.part(0)
    p.unmap(p.map(place))  # nobody waits for it
    p.launch(p.kernel("copy", place, p.part(1)))


def copy_to_what_is_mapped(p: Small) -> None:
    place = p.part(0)
    view = p.map(place)
    p.write(place)
    del view


def two_maps_of_the_same_bytes(p: Small) -> None:
    first = p.map(p.part(0))
    second = p.map(p.part(0))
    del first, second


def map_while_a_kernel_runs(p: Small) -> None:
    place = p.part(0)
    p.launch(p.kernel("copy", place, p.part(1)))
    p.map(place)


def unmapped_twice(p: Small) -> None:
    view = p.map(p.part(0))
    p.unmap(view)
    p.unmap(view)


def released_while_mapped(p: Small) -> None:
    buffer = p.new(PART)
    view = p.map(buffer)
    buffer.release()
    del view


# -- overlapping memory objects


def kernel_takes_overlapping_parts(p: Small) -> None:
    p.launch(p.kernel("copy", p.part(0), p.part(0)))  # two objects, the same bytes


def kernel_takes_a_part_and_the_whole(p: Small) -> None:
    p.launch(p.kernel("copy", p.buffer, p.part(3)))


def kernel_reads_and_writes_an_image(p: Small) -> None:
    image = p.image()
    p.launch(p.kernel("both", image, image), items=1)


# -- host memory


def host_changes_what_is_read(p: Small) -> None:
    data = np.ones(FLOATS, np.float32)
    event = p.write(p.buffer, data, blocking=False)
    data[0] = 2
    event.wait()


def array_is_gone_before_it_is_read(p: Small) -> None:
    event = p.write(p.buffer, np.ones(FLOATS, np.float32), blocking=False)
    event.wait()


# -- alignment, ranges, limits


def part_begins_anywhere(p: Small) -> None:
    p.buffer.get_sub_region(64, 64)


def part_beyond_the_end(p: Small) -> None:
    p.buffer.get_sub_region(PART, BYTES)


def part_of_a_part(p: Small) -> None:
    p.part(1).get_sub_region(0, 128)


def rows_of_an_image_lie_anywhere(p: Small) -> None:
    p.image(8, 2, over=p.buffer, pitch=128)


def image_begins_anywhere(p: Small) -> None:
    p.image(8, 2, over=p.buffer.get_sub_region(128, 4096), pitch=1024)


def image_beyond_its_buffer(p: Small) -> None:
    p.image(64, 17, over=p.buffer, pitch=1024)


def copy_beyond_the_end(p: Small) -> None:
    p.write(p.part(0), np.zeros(FLOATS + 1, np.float32))


def copy_beyond_an_image(p: Small) -> None:
    rows = np.zeros((2, 64), np.float32)
    p.cl._cl._enqueue_write_image(p.queue, p.image(16, 1), (0, 0), (16, 2), rows, 256, is_blocking=True)


def group_does_not_divide(p: Small) -> None:
    p.launch(p.kernel("copy", p.part(0), p.part(1)), items=10, group=4)


def group_is_not_the_required_one(p: Small) -> None:
    p.launch(p.kernel("eight", p.part(0)), items=64, group=16)


def argument_is_missing(p: Small) -> None:
    p.launch(p.kernel("copy", p.part(0)))


def buffer_for_an_image(p: Small) -> None:
    p.kernel("look", p.part(0))


def kernel_writes_what_is_for_reading(p: Small) -> None:
    p.kernel("draw", p.part(0), p.image(flags=p.cl.mem_flags.READ_ONLY))


# -- released objects


def argument_was_released(p: Small) -> None:
    buffer = p.new(PART)
    kernel = p.kernel("copy", buffer, p.part(1))
    buffer.release()
    p.launch(kernel)


def argument_was_collected(p: Small) -> None:
    kernel = p.kernel("copy", p.buffer, p.new(PART))
    p.kept.pop()
    p.launch(kernel)


def released_twice(p: Small) -> None:
    buffer = p.new(PART)
    buffer.release()
    buffer.release()


def parts_are_released_in_the_order_of_their_making(p: Small) -> None:
    first, _, last = p.part(0), p.part(1), p.part(0)
    first.release()
    last.release()


# -- events


def times_of_a_queue_without(p: Small) -> None:
    event = p.launch(p.kernel("copy", p.part(0), p.part(1)))
    event.wait()
    assert event.profile.start


def times_before_the_end(p: Small) -> None:
    p = Small(p.cl, profiling=True)
    assert p.launch(p.kernel("copy", p.part(0), p.part(1))).profile.start


# -- extensions


def double_precision(p: Small) -> None:
    p.cl.Program(p.context, "__kernel void f(__global float* x) { double y = x[0]; x[1] = y; }").build([])


def pragma(p: Small) -> None:
    p.cl.Program(p.context, "#pragma OPENCL EXTENSION cl_khr_fp16 : enable\n__kernel void f() {}").build([])


def newer_language(p: Small) -> None:
    p = Small(StrictOpenCL(profile("adreno6xx"), base_device()))
    p.cl.Program(p.context, "__kernel void f() {}").build(["-cl-std=CL3.0"])


def image_over_a_buffer(p: Small) -> None:
    limited(extensions=frozenset()).image(8, 2, over=p.buffer, pitch=1024)


BROKEN: dict[str, list[Callable[[Small], None]]] = {
    "mapped": [
        kernel_reads_what_is_mapped, kernel_reads_a_part_of_what_is_mapped, kernel_reads_the_whole_of_what_is_mapped,
        kernel_reads_an_overlapping_part, kernel_writes_what_is_mapped_for_reading, kernel_reads_an_image_over_what_is_mapped,
        kernel_does_not_wait_for_the_unmap, copy_to_what_is_mapped, two_maps_of_the_same_bytes, unmapped_twice,
        released_while_mapped,
    ],
    "order": [map_while_a_kernel_runs],
    "overlap": [kernel_takes_overlapping_parts, kernel_takes_a_part_and_the_whole, kernel_reads_and_writes_an_image],
    "host memory": [host_changes_what_is_read, array_is_gone_before_it_is_read],
    "aligned": [part_begins_anywhere, rows_of_an_image_lie_anywhere, image_begins_anywhere],
    "range": [part_beyond_the_end, image_beyond_its_buffer, copy_beyond_the_end, copy_beyond_an_image],
    "arguments": [
        part_of_a_part, group_does_not_divide, group_is_not_the_required_one, argument_is_missing, buffer_for_an_image,
        kernel_writes_what_is_for_reading,
    ],
    "release": [parts_are_released_in_the_order_of_their_making],
    "released": [argument_was_released, argument_was_collected, released_twice],
    "event": [times_of_a_queue_without, times_before_the_end],
    "extension": [double_precision, pragma, newer_language, image_over_a_buffer],
}  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "program"), [pytest.param(rule, each, id=each.__name__) for rule, programs in BROKEN.items() for each in programs]
)
def test_what_breaks_a_rule_is_caught(rule: str, program: Callable[[Small], None], small: Small) -> None:
    with pytest.raises(BrokenRuleError) as caught:
        program(small)
    assert caught.value.rule == rule, caught.value


def big_buffer(p: Small) -> None:
    p.new(BYTES + 1)


def big_image(p: Small) -> None:
    p.image(32, 33)


def wide_image(p: Small) -> None:
    p.image(9, 1)


def tall_image(p: Small) -> None:
    p.image(1, 9)


def large_group(p: Small) -> None:
    p.launch(p.kernel("copy", p.part(0), p.part(1)), items=16, group=16)


def large_group_of_many_registers(p: Small) -> None:
    p.launch(p.kernel("copy", p.part(0), p.part(1)), group=32)
    p.launch(p.kernel("wide", p.part(0), p.part(1)), group=16)
    p.launch(p.kernel("wide", p.part(0), p.part(1)), group=32)


def many_images(p: Small) -> None:
    p.launch(p.kernel("both", p.image(8, 1), p.image(8, 1)), items=1)


def long_arguments(p: Small) -> None:
    p.launch(p.kernel("copy", p.part(0), p.part(1)))


def local_memory(p: Small) -> None:
    p.launch(p.kernel("shared", p.part(0), p.part(1)), items=8, group=8)


@pytest.mark.parametrize(
    ("program", "limits"),
    [
        (big_buffer, {"max_alloc": BYTES}),
        (big_image, {"max_alloc": BYTES}),
        (wide_image, {"image_width": 8}),
        (tall_image, {"image_height": 8}),
        (large_group, {"max_group": 8}),
        (large_group, {"max_group_sizes": (8, 1024, 1024)}),
        (large_group_of_many_registers, {"kernel_groups": ((8, 32), (48, 16))}),
        (many_images, {"read_images": 0}),
        (many_images, {"write_images": 0}),
        (long_arguments, {"max_parameters": 15}),
        (local_memory, {"local_memory": 4095}),
        (local_memory, {"constant_arguments": 0}),
        (local_memory, {"constant_bytes": PART - 1}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "-".join(value),
)
def test_limits(program: Callable[[Small], None], limits: dict[str, Any]) -> None:
    with pytest.raises(BrokenRuleError) as caught:
        program(limited(**limits))
    assert caught.value.rule == "limit"


def test_registers_are_the_values_of_a_place() -> None:
    p = Small(StrictOpenCL(profile("mali-valhall"), base_device()))
    assert p.kernel("copy").registers == 0 and p.kernel("copy").required_group is None
    assert p.kernel("wide").registers == 2 * 16 + 2 * 8  # the two blocks after each other, and the four floats of one are gone
    assert p.kernel("eight").required_group == (8, 1, 1)
    assert [p.cl.world.profile.group_of(count) for count in (0, 32, 33, 64, 65)] == [384, 384, 192, 192, 192]


@pytest.mark.parametrize("name", ["mali-valhall", "adreno7xx"])
def test_a_binary_has_the_kernels_that_were_created_before(name: str) -> None:
    """On Malis; elsewhere it has all of them."""
    p = Small(StrictOpenCL(profile(name), base_device()))
    program = p.cl.Program(p.context, SOURCE).build([])
    p.cl.Kernel(program, "copy")
    (binary,) = program.get_info(p.cl.program_info.BINARIES)
    loaded = p.cl.Program(p.context, [p.device], [binary]).build([])
    p.cl.Kernel(loaded, "copy")
    if name == "adreno7xx":
        p.cl.Kernel(loaded, "wide")
        return
    with pytest.raises(BrokenRuleError, match="binary: wide is compiled again"):
        p.cl.Kernel(loaded, "wide")


def test_a_right_program_computes() -> None:
    """Maps of one part while kernels use others, waits, events between queues, views of buffers, times."""
    p = Small(StrictOpenCL(profile("mali-valhall"), base_device()), profiling=True)
    parts = [p.part(number) for number in range(4)]
    data = np.arange(FLOATS, dtype=np.float32)
    view = p.map(parts[0])
    assert np.isnan(view.view(np.float32)).all()  # the old content is lost
    p.write(parts[1])
    p.launch(p.kernel("copy", parts[1], parts[2]))  # during the map
    view[:] = data.view(np.uint8)
    p.unmap(view).wait()
    assert np.isnan(view.view(np.float32)).all()  # also after the unmap
    event = p.launch(p.kernel("copy", parts[0], parts[3]))
    event.wait()
    assert event.profile.end >= event.profile.start
    got = np.zeros(FLOATS, np.float32)
    later = p.cl._cl._enqueue_read_buffer(p.other, parts[3], got, 0, is_blocking=False)
    assert np.isnan(got).all()  # the host reads nothing valid now
    later.wait()
    np.testing.assert_array_equal(got, data)
    over = p.image(8, 4, over=parts[0], pitch=1024)
    out = p.new(PART)
    for shift in (0, 1):  # the image view shows the written data
        view = p.map(parts[0])
        view[:] = (data + shift).view(np.uint8)
        p.unmap(view).wait()
        p.launch(p.kernel("look", over, out), items=8)
        p.cl._cl._enqueue_read_buffer(p.queue, out, got, 0, is_blocking=True)
        np.testing.assert_array_equal(got[:32], data[:32] + shift)
    assert p.cl.rules.broken == []
    assert p.cl.rules.counts["map"] == p.cl.rules.counts["unmap"] == 3


def test_the_library_is_held_to_the_same_rules() -> None:
    p = Small(StrictOpenCL(profile("adreno8xx"), base_device()))
    library = StrictLibrary(p.cl)
    keep = p.part(0), p.part(1)
    kernel = p.kernel("copy", *keep)
    sizes = (ctypes.c_size_t * 1)(FLOATS)
    data = np.arange(FLOATS, dtype=np.float32)
    queue, where = ctypes.c_void_p(p.queue.int_ptr), ctypes.c_void_p(data.ctypes.data)
    size, none = ctypes.c_size_t(data.nbytes), ctypes.c_uint(0)
    place = ctypes.c_void_p(keep[0].int_ptr)
    assert library.clEnqueueWriteBuffer(queue, place, none, ctypes.c_size_t(0), size, where, none, None, None) == 0
    assert library.clEnqueueNDRangeKernel(queue, kernel.int_ptr, 1, None, sizes, None, none, None, None) == 0
    assert library.clFinish(queue) == 0
    got = np.zeros_like(data)
    p.cl._cl._enqueue_read_buffer(p.queue, keep[1], got, 0, is_blocking=True)
    np.testing.assert_array_equal(got, data)
    library.clEnqueueWriteBuffer(queue, place, none, ctypes.c_size_t(0), size, where, none, None, None)
    data += 1
    with pytest.raises(BrokenRuleError, match="host memory"):
        library.clFinish(queue)
    library.clEnqueueNDRangeKernel(queue, kernel.int_ptr, 1, None, sizes, None, none, None, None)
    with pytest.raises(BrokenRuleError, match="order"):
        p.write(keep[1], queue=p.other)


def test_what_is_not_checked_is_refused() -> None:
    p = Small(StrictOpenCL(profile("adreno7xx"), base_device()))
    for nobody in (p.cl, p.cl._cl, StrictLibrary(p.cl)):
        with pytest.raises(AttributeError):
            nobody.enqueue_copy  # noqa: B018
    assert isinstance(p.cl._cl, SimpleNamespace)


def test_every_profile_says_where_it_is_from() -> None:
    assert len({each.name for each in PROFILES}) == len(PROFILES) == 5
    for each in PROFILES:
        assert any("https://" in source for source in each.sources)
        assert each.assumed
