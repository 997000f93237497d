"""The strict device's checks of order between two queues: unordered programs are caught, with both call sites."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.strict_device import BrokenRuleError, StrictOpenCL
from tests.support.strict_device.door import base_device
from tests.support.strict_program import FLOATS, PART, Raw, Small, profile

FILE = re.escape(Path(__file__).name)


@pytest.fixture
def small() -> Small:
    return Small(StrictOpenCL(profile("adreno7xx"), base_device()))


# -- no order


def two_queues_write_one_buffer(p: Small) -> None:
    p.write(p.buffer, blocking=False)
    p.write(p.buffer, queue=p.other, blocking=False)


def two_kernels_write_one_part(p: Small) -> None:
    place = p.part(0)
    p.copy(p.part(1), place)
    p.copy(p.part(2), place, p.other)


def two_queues_write_other_bytes_of_one_buffer(p: Small) -> None:
    p.write(p.buffer, blocking=False)
    p.write(p.buffer, queue=p.other, offset=2 * PART, blocking=False)


def two_queues_write_other_bytes_of_one_part(p: Small) -> None:
    place = p.keep(p.buffer.get_sub_region(0, 2 * PART))
    p.write(place, blocking=False)
    p.write(place, queue=p.other, offset=PART, blocking=False)


def two_queues_write_other_rows_of_one_image(p: Small) -> None:
    image = p.image(8, 4)
    p.write_rows(image, 0)
    p.write_rows(image, 2, p.other)


def part_and_other_bytes_of_the_whole(p: Small) -> None:
    p.write(p.part(3), blocking=False)
    p.write(p.buffer, queue=p.other, blocking=False)  # its first quarter


def overlapping_parts(p: Small) -> None:
    p.copy(p.part(2), p.part(0))
    p.write(p.keep(p.buffer.get_sub_region(PART // 2, PART)), queue=p.other, blocking=False)


def image_over_a_buffer_and_other_bytes_of_it(p: Small) -> None:
    image, out = p.image(8, 2, over=p.buffer, pitch=1024), p.new(PART)
    p.launch(p.kernel("look", image, out), items=8)
    p.write(p.buffer, queue=p.other, offset=2 * PART, blocking=False)


def read_without_an_event(p: Small) -> None:
    place = p.part(0)
    p.write(place, blocking=False)
    p.copy(place, p.part(1), p.other)


def write_beside_a_kernel_that_reads(p: Small) -> None:
    place = p.part(0)
    p.copy(place, p.part(1))
    p.write(place, queue=p.other, blocking=False)


def write_beside_a_kernel_that_reads_other_bytes(p: Small) -> None:
    p.copy(p.buffer, p.new(PART))
    p.write(p.buffer, queue=p.other, offset=3 * PART, blocking=False)


def flush_is_no_wait(p: Small) -> None:
    place = p.part(0)
    p.write(place, blocking=False)
    p.queue.flush()
    p.copy(place, p.part(1), p.other)


def seen_complete_is_no_wait(p: Small) -> None:
    place = p.part(0)
    event = p.write(place, blocking=False)
    while event.command_execution_status != p.cl.command_execution_status.COMPLETE:
        pass
    p.copy(place, p.part(1), p.other)


def wait_for_an_earlier_command(p: Small) -> None:
    place = p.part(0)
    first = p.write(place, blocking=False)
    p.write(place, blocking=False)
    first.wait()
    p.copy(place, p.part(1), p.other)


def event_of_an_earlier_command(p: Small) -> None:
    place = p.part(0)
    first = p.write(place, blocking=False)
    p.write(place, blocking=False)
    p.queue.flush()
    p.copy(place, p.part(1), p.other, waits=[first])


def finish_of_the_other_queue(p: Small) -> None:
    place = p.part(0)
    p.write(place, blocking=False)
    p.other.finish()
    p.copy(place, p.part(1), p.other)


def raw_write_and_a_kernel_without_its_event(p: Small) -> None:
    raw, place = Raw(p), p.part(0)
    raw.write(place, p.other)
    raw.flush(p.other)
    raw.launch(p.kernel("copy", place, p.part(1)), p.queue)


def raw_event_of_another_copy(p: Small) -> None:
    raw, place, another = Raw(p), p.part(0), p.part(2)
    event = raw.write(another, p.other)
    raw.write(place, p.other)
    raw.flush(p.other)
    raw.launch(p.kernel("copy", place, p.part(1)), p.queue, [event])


def raw_marker_before_the_copy(p: Small) -> None:
    raw, place = Raw(p), p.part(0)
    event = raw.marker(p.other)
    raw.write(place, p.other)
    raw.flush(p.other)
    raw.launch(p.kernel("copy", place, p.part(1)), p.queue, [event])


def raw_part_and_the_whole(p: Small) -> None:
    raw = Raw(p)
    raw.write(raw.part(p.buffer, PART, PART), p.queue)
    raw.write(p.buffer, p.other)


UNORDERED = (
    two_queues_write_one_buffer, two_kernels_write_one_part, two_queues_write_other_bytes_of_one_buffer,
    two_queues_write_other_bytes_of_one_part, two_queues_write_other_rows_of_one_image, part_and_other_bytes_of_the_whole,
    overlapping_parts, image_over_a_buffer_and_other_bytes_of_it, read_without_an_event, write_beside_a_kernel_that_reads,
    write_beside_a_kernel_that_reads_other_bytes, flush_is_no_wait, seen_complete_is_no_wait, wait_for_an_earlier_command,
    event_of_an_earlier_command, finish_of_the_other_queue, raw_write_and_a_kernel_without_its_event,
    raw_event_of_another_copy, raw_marker_before_the_copy, raw_part_and_the_whole,
)  # fmt: skip


@pytest.mark.parametrize("program", UNORDERED, ids=lambda program: program.__name__)
def test_commands_that_nothing_orders_are_caught_with_both_call_sites(program: Callable[[Small], None], small: Small) -> None:
    with pytest.raises(BrokenRuleError) as caught:
        program(small)
    assert caught.value.rule == "order", caught.value
    first = program.__code__.co_firstlineno
    lines = [int(line) for line in re.findall(rf"{FILE}:(\d+) in {program.__name__}", str(caught.value))]
    assert len(set(lines)) == 2, caught.value
    assert all(first < line < first + 10 for line in lines)


# -- events


def event_of_a_queue_that_nobody_flushed(p: Small) -> None:
    place = p.part(0)
    event = p.write(place, blocking=False)
    p.copy(place, p.part(1), p.other, waits=[event])


def raw_event_of_a_queue_that_nobody_flushed(p: Small) -> None:
    raw, place = Raw(p), p.part(0)
    raw.flush(p.other)
    event = raw.write(place, p.other)
    raw.barrier(p.queue, [event])


def event_released_before_it_is_waited_for(p: Small) -> None:
    raw = Raw(p)
    event = raw.write(p.part(0), p.other)
    raw.library.clReleaseEvent(event)
    raw.wait(event)


def event_released_twice(p: Small) -> None:
    raw = Raw(p)
    event = raw.write(p.part(0), p.other)
    raw.library.clReleaseEvent(event)
    raw.library.clReleaseEvent(event)


def wait_list_without_events(p: Small) -> None:
    Raw(p).library.clWaitForEvents(1, None)


# -- host memory


def staging_is_written_again_before_its_copy_is_done(p: Small) -> None:
    raw, staging = Raw(p), np.ones(FLOATS, np.float32)
    event = raw.write(p.part(0), p.other, staging)
    staging[:] = 2  # the next slice
    raw.wait(event)


def staging_is_written_again_after_another_copy(p: Small) -> None:
    raw, staging = Raw(p), np.ones((2, FLOATS), np.float32)
    first = raw.write(p.part(0), p.queue, staging[0])
    second = raw.write(p.part(1), p.other, staging[1])
    raw.wait(second)
    staging[0] = 2
    raw.wait(first)


def host_writes_what_a_kernel_reads(p: Small) -> None:
    place = p.part(0)
    p.copy(place, p.part(1))
    p.map(place, queue=p.other)[:] = 1


def kernel_reads_what_the_host_writes(p: Small) -> None:
    place = p.part(0)
    view = p.map(place, queue=p.other)
    Raw(p).launch(p.kernel("copy", place, p.part(1)), p.queue)
    view[:] = 1


OTHERS = {
    "flush": (event_of_a_queue_that_nobody_flushed, raw_event_of_a_queue_that_nobody_flushed),
    "released": (event_released_before_it_is_waited_for, event_released_twice),
    "arguments": (wait_list_without_events,),
    "host memory": (staging_is_written_again_before_its_copy_is_done, staging_is_written_again_after_another_copy),
    "order": (host_writes_what_a_kernel_reads,),
    "mapped": (kernel_reads_what_the_host_writes,),
}


@pytest.mark.parametrize(
    ("rule", "program"), [pytest.param(rule, each, id=each.__name__) for rule, programs in OTHERS.items() for each in programs]
)
def test_events_and_the_hosts_memory(rule: str, program: Callable[[Small], None], small: Small) -> None:
    with pytest.raises(BrokenRuleError) as caught:
        program(small)
    assert caught.value.rule == rule, caught.value


# -- ordered by something


def by_an_event(p: Small, place: Any, data: Any) -> None:
    event = p.write(place, data, p.other, blocking=False)
    p.other.flush()
    p.copy(place, p.part(1), waits=[event])
    p.queue.finish()


def by_an_event_of_a_later_command(p: Small, place: Any, data: Any) -> None:
    p.write(place, data, p.other, blocking=False)
    marker = p.cl.enqueue_marker(p.other)
    p.other.flush()
    p.copy(place, p.part(1), waits=[marker])
    p.queue.finish()


def by_an_event_that_an_earlier_command_waited_for(p: Small, place: Any, data: Any) -> None:
    event = p.write(place, data, p.other, blocking=False)
    p.other.flush()
    p.cl.enqueue_barrier(p.queue, wait_for=[event])
    p.copy(place, p.part(1))
    p.queue.finish()


def by_way_of_a_third_queue(p: Small, place: Any, data: Any) -> None:
    third = p.cl.CommandQueue(p.context, p.device, 0)
    event = p.write(place, data, p.other, blocking=False)
    p.other.flush()
    passed = p.cl.enqueue_marker(third, wait_for=[event])
    third.flush()
    p.copy(place, p.part(1), waits=[passed])
    p.queue.finish()


def by_finish(p: Small, place: Any, data: Any) -> None:
    p.write(place, data, p.other, blocking=False)
    p.other.finish()
    p.copy(place, p.part(1))


def by_a_wait_of_the_host(p: Small, place: Any, data: Any) -> None:
    p.write(place, data, p.other, blocking=False).wait()
    p.copy(place, p.part(1))


def by_a_blocking_call(p: Small, place: Any, data: Any) -> None:
    p.write(place, data, p.other)
    p.copy(place, p.part(1))


def by_a_wait_of_another_thread(p: Small, place: Any, data: Any) -> None:
    thread = threading.Thread(target=lambda: p.write(place, data, p.other, blocking=False).wait())
    thread.start()
    thread.join()
    p.copy(place, p.part(1))


def by_a_raw_event(p: Small, place: Any, data: Any) -> None:
    raw = Raw(p)
    event = raw.write(place, p.other, data)
    raw.flush(p.other)
    copied = raw.launch(p.kernel("copy", place, p.part(1)), p.queue, [event])
    raw.library.clReleaseEvent(event)
    raw.wait(copied)
    raw.library.clReleaseEvent(copied)


def by_a_raw_event_in_a_barrier(p: Small, place: Any, data: Any) -> None:
    raw = Raw(p)
    event = raw.write(place, p.other, data)
    raw.flush(p.other)
    raw.barrier(p.queue, [event])
    raw.launch(p.kernel("copy", place, p.part(1)), p.queue)
    raw.finish(p.queue)


def by_a_raw_wait(p: Small, place: Any, data: Any) -> None:
    raw = Raw(p)
    raw.wait(raw.write(place, p.other, data))
    p.copy(place, p.part(1))


ORDERED = (
    by_an_event, by_an_event_of_a_later_command, by_an_event_that_an_earlier_command_waited_for, by_way_of_a_third_queue,
    by_finish, by_a_wait_of_the_host, by_a_blocking_call, by_a_wait_of_another_thread, by_a_raw_event,
    by_a_raw_event_in_a_barrier, by_a_raw_wait,
)  # fmt: skip


@pytest.mark.parametrize("program", ORDERED, ids=lambda program: program.__name__)
def test_what_is_ordered_is_right(program: Callable[[Small, Any, Any], None], small: Small) -> None:
    data = np.arange(FLOATS, dtype=np.float32)
    program(small, small.part(0), data)
    np.testing.assert_array_equal(small.read(small.part(1)), data)
    small.other.finish()
    assert small.cl.rules.broken == []


# -- order by an event: the host's wait is not enough


ONLY_THE_HOST_WAITS = (by_finish, by_a_wait_of_the_host, by_a_blocking_call, by_a_wait_of_another_thread, by_a_raw_wait)


@pytest.mark.parametrize("program", ORDERED, ids=lambda program: program.__name__)
def test_where_events_are_asked_for_a_wait_of_the_host_is_not_enough(program: Callable[[Small, Any, Any], None]) -> None:
    data = np.arange(FLOATS, dtype=np.float32)
    p = Small(StrictOpenCL(profile("adreno7xx"), base_device(), by_event=True))
    if program in ONLY_THE_HOST_WAITS:
        with pytest.raises(BrokenRuleError) as caught:
            program(p, p.part(0), data)
        assert caught.value.rule == "visible"
        assert len(re.findall(rf"{FILE}:\d+ in ({program.__name__}|<lambda>)", str(caught.value))) == 2
    else:
        program(p, p.part(0), data)
        np.testing.assert_array_equal(p.read(p.part(1)), data)
        assert p.cl.rules.broken == []


def test_an_event_of_bytes_that_were_written_over_is_not_asked_for() -> None:
    """Required only for the bytes that are read; bytes that the reading queue itself has overwritten need none."""
    p = Small(StrictOpenCL(profile("adreno7xx"), base_device(), by_event=True))
    p.write(p.part(0), queue=p.other)
    p.write(p.part(2), queue=p.other)
    p.write(p.part(0))
    p.copy(p.part(0), p.part(1))
    assert p.cl.rules.broken == []
    with pytest.raises(BrokenRuleError, match="visible"):
        p.copy(p.part(2), p.part(1))


# -- no order needed


def test_other_memory_objects_need_no_order(small: Small) -> None:
    """Disjoint sub-buffers, images, and objects that both queues read."""
    parts = [small.part(number) for number in range(4)]
    images = [small.image(8, 2) for _ in range(2)]
    ones = np.ones(FLOATS, np.float32)
    for part, image, queue in zip(parts, images, (small.queue, small.other), strict=False):
        small.write(part, ones, queue, blocking=False)
        small.write_rows(image, 1, queue)
    for queue in (small.queue, small.other):
        queue.finish()
    small.copy(parts[0], parts[2])
    small.copy(parts[0], parts[3], small.other)
    for part, queue in zip(parts[2:], (small.queue, small.other), strict=True):
        np.testing.assert_array_equal(small.read(part, queue), ones)
    assert small.cl.rules.broken == []


def test_staging_may_be_written_again_once_its_copy_is_done(small: Small) -> None:
    raw, staging = Raw(small), np.ones(FLOATS, np.float32)
    raw.wait(raw.write(small.part(0), small.other, staging))
    staging[:] = 2
    raw.wait(raw.write(small.part(1), small.other, staging))
    assert small.read(small.part(0))[0] == 1 and small.read(small.part(1))[0] == 2
    assert small.cl.rules.broken == []


# -- threads of the host


def _copy_in_two_threads(p: Small, queues: tuple[Any, Any], place: Any, seconds: float, lock: Any = None) -> None:
    """Each thread copies its half of a part three times, and waits for each copy, as loader threads do.

    `seconds`: how long a copy waits for the other thread's.
    """

    def work(number: int) -> None:
        raw, data = Raw(p), np.full(FLOATS, number + 1, np.float32)
        try:
            for _ in range(3):
                with lock or nullcontext():
                    raw.write(place, queues[number], data, offset=number * PART)
                    raw.finish(queues[number])
        except BrokenRuleError:  # the strict device has recorded it
            return

    p.cl.world.overlap.seconds = seconds
    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_that_wait_for_their_own_copies_are_caught_though_none_overlaps(small: Small) -> None:
    """Each copy takes microseconds, and ends before the other thread starts: the strict device keeps it in flight."""
    place = small.keep(small.buffer.get_sub_region(0, 2 * PART))
    _copy_in_two_threads(small, (small.queue, small.other), place, 0.4)
    assert {each.rule for each in small.cl.rules.broken} == {"order"}
    assert len(set(re.findall(r"thread ([^)]*)\)", str(small.cl.rules.broken[0])))) == 2


def test_threads_that_share_a_queue_are_right(small: Small) -> None:
    place = small.keep(small.buffer.get_sub_region(0, 2 * PART))
    _copy_in_two_threads(small, (small.other, small.other), place, 0.05)
    np.testing.assert_array_equal(small.read(place, floats=2 * FLOATS), np.repeat([1, 2], FLOATS))
    assert small.cl.rules.broken == []


def test_threads_that_copy_in_turn_are_right(small: Small) -> None:
    place = small.keep(small.buffer.get_sub_region(0, 2 * PART))
    _copy_in_two_threads(small, (small.queue, small.other), place, 0.01, threading.Lock())
    np.testing.assert_array_equal(small.read(place, floats=2 * FLOATS), np.repeat([1, 2], FLOATS))
    assert small.cl.rules.broken == []
