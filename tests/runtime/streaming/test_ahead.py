"""Loads on a device with memory of its own: what is read and enqueued when, and in which thread."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashmem.base.errors import RunError
from flashmem.program.tensors import Slice
from flashmem.runtime.opencl.context import Bytes
from flashmem.runtime.streaming.ahead import AheadRun, Copy, Planned, Read
from flashmem.schedule.loads import Load, Segment
from tests.support.refused_threads import refuse_threads

NBYTES = 16


class FakeReading:
    """A read that ends when the test says so."""

    thread = 1

    def __init__(self, transfer: FakeTransfer, name: str) -> None:
        self._transfer, self._name = transfer, name

    @property
    def ended(self) -> bool:
        return self._name not in self._transfer.slow

    def wait(self) -> None:
        until(lambda: self.ended)

    def finish(self) -> None:
        if self._name == self._transfer.failing:
            raise RunError("the disk is gone")
        self._transfer.read.append(self._name)


class FakeTransfer:
    """Notes reads, and copies with the event they wait for and the thread that enqueues them. Reads named in `slow` do not end.

    Loads named in `held` are in the host tier. Loads in `parts` are made of so many reads.
    """

    def __init__(self, pieces: int = 8, *, held: Sequence[str] = ()) -> None:
        self.slow: set[str] = set()
        self.failing, self.refused = "", ""
        self.held, self.tier = held, FakeTier(held) if held else None
        self.arrived, self.in_tier = list[str](), list[bool]()
        self.parts: dict[str, int] = defaultdict(lambda: 1)
        self.begun, self.read = list[str](), list[str]()
        self.copied: list[tuple[str, Any, str]] = []
        self.under_way: list[FakeReading] = []
        self.reads = SimpleNamespace(begin=self._begin, busy=False, end=self.under_way.remove, stop=self._stop)
        self.runs: list[AheadRun] = []
        self.ring = FakeRing(pieces)
        self._at: dict[int, str] = {}

    def planned(self, loads: Sequence[Load], *, apart: bool) -> Planned:
        self._at = {load.part.offset: load.part.name for load in loads}
        held: dict[int, list[tuple[Copy, int]]] = {}
        for load in loads if apart else ():
            if load.part.name in self.held:
                held.setdefault(load.after, []).append((self._prepared(load), 0))
        reads = [read for load in loads if not apart or load.part.name not in self.held for read in self._reads_of(load)]
        return Planned(reads, held, Counter(load.part.name for load in loads), frozenset(load.after for load in loads))

    def _reads_of(self, load: Load) -> Iterator[Read]:
        parts = self.parts[load.part.name]
        for part in range(parts):
            yield Read(load.part.offset, NBYTES, [self._prepared(load, last=part == parts - 1)], load.after, first=not part)

    def _prepared(self, load: Load, *, last: bool = True) -> Copy:
        def enqueue(address: int, behind: Any) -> Any:
            self.copied.append((load.part.name, behind, threading.current_thread().name))
            return SimpleNamespace(int_ptr=0, seconds=lambda: (1.0, 2.0))

        return Copy(load, enqueue, last=last)

    def _begin(self, data: Bytes, address: int, offset: int) -> FakeReading:
        name = self._at[offset]
        if name == self.refused:
            raise RunError("a read could not begin")
        self.begun.append(name)
        self.under_way.append(FakeReading(self, name))
        return self.under_way[-1]

    def _stop(self) -> None:
        while self.under_way:
            self.under_way.pop().wait()

    def begins(self, run: AheadRun) -> None:
        self.runs.append(run)

    def has_stopped(self, run: AheadRun) -> None:
        self.runs.remove(run)

    def has_read(self, read: Read, memory: Bytes, *, in_tier: bool) -> None:
        self.in_tier.append(in_tier)

    def arrives(self, part: Slice, event: Any) -> None:
        self.arrived.append(part.name)

    def flush(self) -> None:
        pass

    def clock_apart(self) -> float:
        return 10.0

    def order(self) -> list[tuple[str, Any]]:
        return [each[:2] for each in self.copied]


class FakeTier:
    """Holds some slices; `placed` have a place, and no bytes yet."""

    def __init__(self, held: Sequence[str]) -> None:
        self._held, self.placed = held, set(held)

    def place(self, part: Slice, segment: Segment) -> Bytes | None:
        return np.zeros(segment.nbytes, np.uint8) if part.name in self.placed else None

    def holds(self, part: Slice, segment: Segment) -> bool:
        return part.name in self._held


class FakeRing:
    """Pieces that are free once their copies are enqueued, or dropped."""

    oldest = None

    def __init__(self, pieces: int) -> None:
        self.pieces = self.free = pieces

    def take(self) -> Bytes | None:
        self.free -= 1
        if self.free < 0:
            self.free = 0
            return None
        return np.zeros(NBYTES, np.uint8)

    def give_back(self, piece: Bytes, copy: Any) -> None:
        self.free += 1


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are not of OpenCL."""
    monkeypatch.setattr("flashmem.runtime.streaming.ahead.wait_for_copies", lambda copies: None)


def loads(*layers: int) -> list[Load]:
    return [Load(Slice(f"w{n}", "w", 100 * n, NBYTES), Segment(0, NBYTES), layer) for n, layer in enumerate(layers)]


def begun(transfer: FakeTransfer, *layers: int, **options: Any) -> AheadRun:
    return AheadRun(transfer, loads(*layers), **options)  # type: ignore[arg-type]


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def no_threads() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("flashmem")]


HERE = threading.main_thread().name


def test_what_is_read_before_its_release_is_copied_behind_the_launch_that_releases_it() -> None:
    transfer = FakeTransfer()
    run = begun(transfer, 0, 2, 1, 2, 3)
    assert run.wakes == {0, 1, 2, 3} and run.follows_launches
    until(lambda: len(transfer.read) == 5 and run.idle)
    assert transfer.order() == [("w0", None)] and [name for name, there in run.loaded.items() if there] == ["w0"]
    run.take_over()
    for layer, event in ((1, "one"), (2, "two"), (3, "three"), (4, "four")):
        run.launched(layer, event)
    run.wait("w4")
    run.stop()
    assert transfer.order() == [("w0", None), ("w2", "one"), ("w1", "two"), ("w3", "two"), ("w4", "three")]
    assert all(run.loaded.values()) and {thread for *_, thread in transfer.copied[1:]} == {HERE}
    assert [(each.name, each.end, each.thread, [what for what, _ in each.steps]) for each in run.intervals] == [
        (name, 12.0, 1, ["read", "copy"]) for name, _ in transfer.order()
    ]
    assert transfer.ring.free == 8 and no_threads() and transfer.arrived == [name for name, _ in transfer.order()]


def test_reads_are_as_many_as_the_pieces_and_go_on_when_one_is_free() -> None:
    transfer = FakeTransfer(pieces=2)
    run = begun(transfer, 0, 1, 1, 1)
    run.take_over()
    until(no_threads)
    run.wait("w0")
    assert transfer.begun == ["w0", "w1", "w2"]
    run.launched(1, "one")
    run.wait("w3")
    run.stop()
    assert transfer.order() == [("w0", None), ("w1", "one"), ("w2", "one"), ("w3", "one")] and transfer.ring.free == 2


def test_released_loads_pass_others_and_the_waiting_thread_copies_them() -> None:
    transfer = FakeTransfer(pieces=1)
    transfer.slow = {"w1"}
    run = begun(transfer, 5, 0, 0)
    run.take_over()
    threading.Timer(0.02, transfer.slow.clear).start()
    run.wait("w2")
    assert transfer.order() == [("w1", None), ("w2", None)]
    run.stop()
    assert transfer.begun == ["w1", "w2", "w0"] and transfer.ring.free == 1


def test_before_the_launches_begin_a_thread_makes_the_loads() -> None:
    transfer = FakeTransfer()
    transfer.slow = {"w0"}
    run = begun(transfer, 0, 0, 1)
    assert not run.idle and transfer.copied == []
    transfer.slow.clear()
    until(lambda: run.loaded["w0"] and run.loaded["w1"])
    assert {thread for *_, thread in transfer.copied} == {"flashmem-loader"}
    run.take_over()
    until(no_threads)
    run.stop()


def test_a_load_of_several_reads_is_complete_with_the_last() -> None:
    transfer = FakeTransfer(pieces=2)
    transfer.parts["w0"] = 3
    run = begun(transfer, 1, 1)
    run.take_over()
    until(no_threads)
    run.launched(1, "one")
    run.wait("w1")
    run.stop()
    assert transfer.order() == [("w0", "one")] * 3 + [("w1", "one")]
    assert [each.name for each in run.intervals] == ["w0", "w1"]


def test_all_reads_of_a_load_go_to_one_place_although_the_tier_gets_it_meanwhile() -> None:
    transfer = FakeTransfer(pieces=1, held=("w9",))
    transfer.parts["w0"] = 3
    transfer.slow = {"w0"}
    run = begun(transfer, 0, 0)
    assert transfer.begun == ["w0"] and isinstance(transfer.tier, FakeTier)
    transfer.tier.placed |= {"w0", "w1"}
    transfer.slow.clear()
    run.take_over()
    run.wait("w1")
    run.stop()
    assert transfer.begun == ["w0", "w0", "w0", "w1"] and transfer.in_tier == [False, False, False, True]


def test_loads_of_the_host_tier_are_enqueued_with_the_launches_that_release_them() -> None:
    transfer = FakeTransfer(held=("w0", "w1", "w2", "w3", "w4"))
    run = begun(transfer, 0, 2, 1, 2, 5)
    assert transfer.copied == [("w0", None, HERE)] and run.loaded["w0"] and not run.loaded["w2"] and run.idle and no_threads()
    run.take_over()
    for layer, event in ((1, "one"), (2, "two"), (3, "three")):
        run.launched(layer, event)
    assert transfer.copied[1:] == [("w2", "one", HERE), ("w1", "two", HERE), ("w3", "two", HERE)]
    run.wait("w3")
    run.stop()
    assert [(each.name, each.start, each.end, [what for what, _ in each.steps]) for each in run.intervals] == [
        (name, 11.0, 12.0, ["copy"]) for name, _ in transfer.order()
    ]
    assert len(run.intervals) == 4 and run.intervals[-1].name == "w3" and not transfer.begun


def test_what_is_not_admitted_does_not_begin_and_nothing_is_read_ahead_meanwhile() -> None:
    transfer, room = FakeTransfer(held=("w1",)), 1

    def admit(load: Load) -> bool:
        nonlocal room
        room -= 1
        return room >= 0

    run = begun(transfer, 3, 3, 4, 5, done=3, admit=admit)
    run.wait("w0")
    time.sleep(0.02)
    assert transfer.order() == [("w0", None)] and not run.idle
    room = 1
    run.wake()
    until(lambda: run.loaded["w1"])  # of the host tier, and admitted all the same
    time.sleep(0.02)
    assert transfer.begun == ["w0"] and run.idle  # the others wait for launches
    run.admit_all()
    until(lambda: len(transfer.read) == 3)
    run.take_over()
    run.launched(4, "four")
    run.wait("w2")
    run.stop()
    assert transfer.order() == [("w0", None), ("w1", None), ("w2", "four")] and transfer.ring.free == 8


def test_admission_does_not_change_while_it_is_asked() -> None:
    transfer, asking, made, kept = FakeTransfer(), threading.Event(), threading.Event(), list[bool]()

    def admit(load: Load) -> bool:
        if threading.current_thread().name != HERE:
            asking.set()
            made.wait(20)
            time.sleep(0.05)
            kept.append(run._admit is not None)
        return False

    run = begun(transfer, 0, 1, admit=admit)
    made.set()
    assert asking.wait(20)
    run.admit_all()
    run.wait("w0")
    run.stop()
    assert kept and all(kept) and transfer.order() == [("w0", None)]


@pytest.mark.parametrize("taken_over", [False, True])
@pytest.mark.parametrize("what", ["a read", "the begin of a read"])
def test_a_failure_is_raised_where_it_is_waited_for_and_leaves_nothing(what: str, taken_over: bool) -> None:
    transfer = FakeTransfer(pieces=3)
    transfer.slow = {"w0"}
    run = begun(transfer, 0, 9, 0, 9, 9)
    if taken_over:
        run.take_over()
    if what == "a read":
        transfer.failing = "w2"
    else:
        transfer.refused = "w4"
    transfer.slow.clear()
    with pytest.raises(RunError, match="the disk is gone" if what == "a read" else "could not begin"):
        run.wait("w0")
        run.wait("w2")
        run.wait("w4")
    with suppress(RunError):  # if the thread failed, and not this one
        run.stop()
    assert transfer.ring.free == 3 and no_threads()


def test_a_run_that_stops_waits_for_its_reads_because_their_memory_is_used_again() -> None:
    transfer = FakeTransfer()
    transfer.slow = {"w1"}
    run = begun(transfer, 0, 0, 9)
    run.take_over()
    until(no_threads)
    run.wait("w0")
    threading.Timer(0.05, transfer.slow.clear).start()
    run.stop()
    assert not transfer.slow and transfer.ring.free == 8
    assert not run.loaded["w1"] and transfer.read == ["w0"] and run.idle


def test_a_slice_whose_launch_is_not_enqueued_is_never_waited_for() -> None:
    run = begun(FakeTransfer(), 1)
    run.take_over()
    until(no_threads)
    with pytest.raises(AssertionError, match="w0 waits for a launch"):
        run.wait("w0")
    run.stop()


@pytest.mark.parametrize("what", ["the thread", "the begin of a read", "a copy of the host tier"])
def test_a_run_that_cannot_begin_ends_what_it_has_begun(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = FakeTransfer(pieces=3, held=("w9",))
    transfer.slow = {"w0"}
    if what == "the thread":
        refuse_threads(monkeypatch, "flashmem-loader")
    elif what == "the begin of a read":
        transfer.refused = "w2"
    else:
        assert isinstance(transfer.tier, FakeTier)
        monkeypatch.setattr(transfer.tier, "place", lambda part, segment: fail() if part.name == "w2" else None)

    def fail() -> None:
        raise RunError("the driver refuses")

    threading.Timer(0.02, transfer.slow.clear).start()
    with pytest.raises(RunError):
        begun(transfer, 1, 1, 1)
    assert transfer.begun and not transfer.under_way and not transfer.slow, "nobody waits for these reads"
    assert transfer.ring.free == 3 and not transfer.runs and no_threads()
