"""Reads in the background: all bytes arrive, by the C library and by Python, past the page cache too, and errors are told."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashmem.base.errors import RunError
from flashmem.runtime.memory.arena import new_pages
from flashmem.runtime.streaming import background_reads
from flashmem.runtime.streaming.background_reads import BackgroundReads, Reading
from flashmem.runtime.streaming.direct import UNIT
from flashmem.runtime.streaming.weight_file import WeightFile
from tests.support.isolated import call_isolated
from tests.support.refused_threads import refuse_threads

CONTENT = np.random.default_rng(3).integers(0, 255, 300 * UNIT + 123, np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "w.bin").write_bytes(CONTENT.tobytes())
    return tmp_path / "w.bin"


@pytest.fixture(params=["library", "python"])
def reads(request: pytest.FixtureRequest, path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BackgroundReads]:
    if request.param == "python":
        monkeypatch.setattr(background_reads, "_functions", lambda: None)
    elif background_reads._functions() is None:
        pytest.skip("this C library is not glibc")
    file = WeightFile(path, CONTENT.size)
    made = BackgroundReads(file, 3)
    yield made
    made.close()
    file.close()


def ranges(count: int) -> list[tuple[int, int]]:
    rng = np.random.default_rng(0)
    starts = rng.integers(0, CONTENT.size - 1, count)
    return [(int(start), int(rng.integers(1, CONTENT.size - start + 1))) for start in starts]


def test_many_reads_at_a_time_bring_all_bytes(reads: BackgroundReads) -> None:
    begun, threads = [], set[int]()

    def end_all() -> None:
        for *_, reading in reversed(begun):
            reading.wait()
            assert reading.ended
        for offset, data, reading in begun:
            reading.finish()
            reads.end(reading)
            assert reading.ended
            np.testing.assert_array_equal(data, CONTENT[offset : offset + data.size])
        begun.clear()

    for offset, nbytes in ranges(60):
        if reads.busy:
            assert {reading.thread for *_, reading in begun} == {0, 1, 2}
            end_all()
        data = np.zeros(nbytes, np.uint8)
        begun.append((offset, data, reads.begin(data, data.ctypes.data, offset)))
        threads.add(begun[-1][2].thread)
    end_all()
    assert threads == {0, 1, 2}


def test_what_does_not_stay_in_the_page_cache_is_read_past_it(reads: BackgroundReads) -> None:
    file = reads._file
    if file.direct.refused:
        pytest.skip("this file system has no such reads")
    file.stays = file.missed = False
    offset, nbytes = 7 * UNIT, CONTENT.size - 7 * UNIT
    data = new_pages(nbytes)[:nbytes]
    reading = reads.begin(data, data.ctypes.data, offset)
    reading.wait()
    reading.finish()
    np.testing.assert_array_equal(data, CONTENT[offset:])
    assert file.direct.nbytes == nbytes and file.missed


@pytest.mark.parametrize("direct", [False, True])
def test_a_truncated_file_is_an_error(direct: bool, reads: BackgroundReads, path: Path) -> None:
    reads._file.stays = not direct
    os.truncate(path, 20 * UNIT)
    data = new_pages(8 * UNIT)
    reading = reads.begin(data, data.ctypes.data, 16 * UNIT)
    reading.wait()
    with pytest.raises(RunError, match="ends before byte"):
        reading.finish()


def test_a_failing_disk_is_an_error(reads: BackgroundReads, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    reads._descriptors[reads._file._descriptor] = [os.open("/", os.O_RDONLY) for _ in range(3)]  # which nobody can read
    data = np.zeros(100, np.uint8)
    reading = reads.begin(data, data.ctypes.data, 0)
    reading.wait()
    with pytest.raises(RunError, match="Input/output error"):
        reading.finish()


def test_the_system_is_told_what_it_has_not_cached(reads: BackgroundReads, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    file = reads._file
    monkeypatch.setattr(file, "is_cached", lambda offset, nbytes: offset > UNIT)
    monkeypatch.setattr(file, "expect", lambda *place: told.append(place))
    for offset in (0, UNIT, 2 * UNIT, UNIT):  # after one that is cached, some are not looked at
        data = np.zeros(UNIT, np.uint8)
        reading = reads.begin(data, data.ctypes.data, offset)
        reading.wait()
        reading.finish()
        reads.end(reading)
        np.testing.assert_array_equal(data, CONTENT[offset : offset + UNIT])
    reads.close()  # ends the thread that tells
    assert told == [(0, UNIT), (UNIT, UNIT)] and not file.missed
    assert all(reads._is_cached(0, UNIT) for _ in range(background_reads._SEEN - 1)) and not reads._is_cached(0, UNIT)


def test_whether_bytes_are_cached_is_judged_by_the_last(path: Path) -> None:
    file = WeightFile(path, CONTENT.size)
    file.missed = False
    file.read_into(np.zeros(CONTENT.size, np.uint8), 0)
    file.missed = False
    assert file.is_cached(0, CONTENT.size) and not file.missed
    file._not_waiting = 0  # a system that cannot say
    assert not file.is_cached(0, 1) and file.missed
    file.close()


def test_a_request_is_used_again_once_no_thread_waits_for_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended, inside, wakes = list[int](), set[int](), threading.Event(), threading.Event()

    def suspend(*_: Any) -> None:
        inside.set()
        assert wakes.wait(20)

    functions = SimpleNamespace(
        read=begun.append, error=lambda at: 0 if at in ended else errno.EINPROGRESS, result=lambda at: 0, suspend=suspend
    )
    monkeypatch.setattr(background_reads, "_functions", lambda: functions)
    file, data = WeightFile(path, CONTENT.size), np.zeros(10, np.uint8)
    reads = BackgroundReads(file, 1)

    def begin() -> Reading:
        ended.clear()
        return reads.begin(data, data.ctypes.data, 0)

    def end(reading: Reading) -> None:
        ended.add(begun[-1])
        reading.finish()
        reads.end(reading)

    first = begin()
    waiter = threading.Thread(target=first.wait)
    waiter.start()
    assert inside.wait(20)
    end(first)
    second = begin()
    assert begun[1] != begun[0] and first.ended and not second.ended
    first.wait()  # at once
    wakes.set()
    waiter.join()
    end(second)
    for _ in range(4):
        end(begin())
    assert set(begun) == set(begun[:2])
    file.close()


LONG, MANY = 64 << 20, 30_000


def read_while_others_wait(path: str) -> int:
    """Many reads, six at a time; the number of wrong ones. Threads wait for them, and wake up when other ones have begun."""
    content = np.arange(LONG // 4, dtype=np.uint32).view(np.uint8)
    content.tofile(path)
    file = WeightFile(Path(path), LONG)
    reads, queues = BackgroundReads(file, 6), [SimpleQueue[Reading | None]() for _ in range(3)]

    def wait_for_each(queue: SimpleQueue[Reading | None]) -> None:
        while (reading := queue.get()) is not None:
            reading.wait()

    threads = [threading.Thread(target=wait_for_each, args=(queue,)) for queue in queues]
    for thread in threads:
        thread.start()
    memory = [np.zeros(300_000, np.uint8) for _ in range(6)]
    begun, wrong, number = deque[tuple[Any, int, Reading]](), 0, 0
    while number < MANY or begun:
        while number < MANY and not reads.busy:
            data, offset = memory.pop(), number * 300_000 % (LONG - 300_000)
            begun.append((data, offset, reads.begin(data, data.ctypes.data, offset)))
            queues[number % 3].put(begun[-1][2])
            number += 1
        for _ in range(len(begun)):
            data, offset, reading = begun.popleft()
            if not reading.ended:
                begun.append((data, offset, reading))
                continue
            reading.finish()
            reads.end(reading)
            memory.append(data)
            if not number % 50:
                wrong += not np.array_equal(data, content[offset : offset + data.size])
        time.sleep(0)
    for queue, thread in zip(queues, threads, strict=True):
        queue.put(None)
        thread.join()
    reads.close()
    file.close()
    return wrong


def test_requests_are_not_used_again_while_a_thread_waits(tmp_path: Path) -> None:
    """glibc crashes then, in every second process, so another one reads."""
    [(_, wrong)] = call_isolated(read_while_others_wait, [str(tmp_path / "long.bin")], jobs=1, timeout=120)
    assert wrong == 0


def test_reads_that_nobody_ends_are_waited_for(reads: BackgroundReads) -> None:
    data = np.zeros((2, CONTENT.size), np.uint8)
    for place in data:
        reads.begin(place, place.ctypes.data, 0)
    reads.stop()
    assert np.array_equal(data[0], CONTENT) and np.array_equal(data[1], CONTENT) and sorted(reads._idle) == [0, 1, 2]


def test_a_read_that_the_system_refuses_leaves_its_thread_idle(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_reads, "_functions", lambda: SimpleNamespace(read=lambda at: -1))
    file, data = WeightFile(path, CONTENT.size), np.zeros(10, np.uint8)
    reads = BackgroundReads(file, 1)
    for _ in range(2):
        with pytest.raises(RunError, match="could not begin"):
            reads.begin(data, data.ctypes.data, 0)
    assert not reads.busy
    reads.close()
    file.close()


def test_a_thread_that_cannot_start_fails_its_read_only(reads: BackgroundReads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads._file, "is_cached", lambda offset, nbytes: False)
    refuse_threads(monkeypatch, "flashmem-announcer")
    data = np.zeros(10, np.uint8)
    with pytest.raises(RunError, match="the thread flashmem-announcer could not be started"):
        reads.begin(data, data.ctypes.data, 0)
    reading = reads.begin(data, data.ctypes.data, 0)
    reading.wait()
    reading.finish()
    reads.end(reading)
    assert np.array_equal(data, CONTENT[:10])
