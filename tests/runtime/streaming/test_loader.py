"""Loader threads: which loads may start before their release, which may not, and how threads end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashmem.base.errors import RunError, UserError
from flashmem.base.types import TransferMode
from flashmem.program.tensors import Slice
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Context, Queue
from flashmem.runtime.opencl.copier import Copier
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.streaming.loader import LoaderRun
from flashmem.runtime.streaming.modes.interleave import InterleaveTransfer
from flashmem.runtime.streaming.transfer import ThreadedTransfer, TransferLoad, TransferRequest
from flashmem.runtime.streaming.weight_file import WeightFile
from flashmem.schedule.loads import Load, Segment
from flashmem.schedule.plan import PoolLayout
from flashmem.schedule.residency import free_from, streamed_layout
from flashmem.target.descriptor import DeviceDescriptor
from tests.support.interrupts import interrupt_everywhere
from tests.support.mini_bundle import write_mini_bundle
from tests.support.refused_threads import refuse_threads


class Noted(ThreadedTransfer):
    """Records its calls. Loads named in `failing` fail after they may be copied."""

    def __init__(self, *, reads_ahead: bool, failing: str = "") -> None:
        file = SimpleNamespace(missed=False, stays=True, look_at_memory=lambda: None)
        super().__init__(SimpleNamespace(file=file, checksums=None))  # type: ignore[arg-type]
        self.reads_ahead, self.failing = reads_ahead, failing
        self.done: list[tuple[str, str]] = []

    def load(self, part: Slice, segment: Segment, thread: int, turn: TransferLoad) -> None:
        self.done.append(("read", part.name))
        turn.did("read")
        turn.wait_for_release()
        if part.name == self.failing:
            raise RunError("the disk is gone")
        self.done.append(("copy", part.name))
        turn.did("copy")


def loads(*layers: int) -> list[Load]:
    return [Load(Slice(f"w{n}", "w", 0, 16), Segment(0, 16), layer) for n, layer in enumerate(layers)]


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_what_waits_in_staging_of_its_own_is_read_before_its_gate_and_copied_behind_it() -> None:
    transfer = Noted(reads_ahead=True)
    run = LoaderRun(transfer, loads(0, 1, 1, 2, 2), {}, threads=2)
    run.wait("w0")
    until(lambda: len(transfer.done) == 4)  # both threads have a load that waits for layer 1
    assert set(transfer.done) == {("read", "w0"), ("copy", "w0"), ("read", "w1"), ("read", "w2")}
    run.layer_done(1)
    run.wait("w1")
    run.wait("w2")
    until(lambda: len(transfer.done) == 8)
    assert {name for what, name in transfer.done if what == "copy"} == {"w0", "w1", "w2"}
    run.layer_done(2)
    run.wait("w4")
    run.stop()
    intervals = {interval.name: [what for what, _ in interval.steps] for interval in run.intervals}
    assert intervals["w0"] == ["read", "copy"] and intervals["w3"] == ["read", "wait", "copy"]
    assert {interval.thread for interval in run.intervals} == {0, 1}


def test_without_such_staging_nothing_begins_before_its_gate() -> None:
    transfer = Noted(reads_ahead=False)
    run = LoaderRun(transfer, loads(0, 1), {}, threads=2)
    run.wait("w0")
    time.sleep(0.02)
    assert transfer.done == [("read", "w0"), ("copy", "w0")]
    run.layer_done(1)
    run.wait("w1")
    run.stop()
    assert [what for interval in run.intervals for what, _ in interval.steps] == ["read", "copy"] * 2


def test_what_is_not_admitted_does_not_begin_and_nothing_is_read_ahead_meanwhile() -> None:
    transfer, room = Noted(reads_ahead=True), 1

    def admit(load: Load) -> bool:
        nonlocal room
        room -= 1
        return room >= 0

    run = LoaderRun(transfer, loads(3, 3, 4, 5), {}, threads=2, done=3, admit=admit)
    run.wait("w0")
    time.sleep(0.02)
    assert transfer.done == [("read", "w0"), ("copy", "w0")] and not run.idle
    room = 1
    run.wake()
    run.wait("w1")
    assert len(transfer.done) == 4
    run.admit_all()
    until(lambda: run.idle)  # both threads wait for releases
    assert set(transfer.done[4:]) == {("read", "w2"), ("read", "w3")}
    run.layer_done(4)
    run.wait("w2")
    run.stop()
    assert ("copy", "w3") not in transfer.done


def test_threads_take_from_one_queue_and_none_waits_for_a_slow_one() -> None:
    class Slow(Noted):
        def load(self, part: Slice, segment: Segment, thread: int, turn: TransferLoad) -> None:
            if part.name == "w0":
                until(lambda: len(self.done) == 10)  # all the others, by the other thread
            super().load(part, segment, thread, turn)

    transfer = Slow(reads_ahead=False)
    run = LoaderRun(transfer, loads(0, 0, 0, 0, 0, 0), {}, threads=2)
    run.wait("w0")
    run.stop()
    assert [name for what, name in transfer.done if what == "copy"] == ["w1", "w2", "w3", "w4", "w5", "w0"]
    assert len({interval.thread for interval in run.intervals if interval.name != "w0"}) == 1


@pytest.mark.parametrize("failing", ["", "w0"])
def test_threads_that_wait_at_a_gate_end_with_the_run(failing: str) -> None:
    before = {*threading.enumerate()}
    transfer = Noted(reads_ahead=True, failing=failing)
    run = LoaderRun(transfer, loads(0, 9, 9, 9), {}, threads=3)
    if failing:
        with pytest.raises(RunError, match="the disk is gone"):
            run.wait("w1")
        with pytest.raises(RunError, match="the disk is gone"):
            run.stop()
    else:
        until(lambda: len(transfer.done) == 5)
        run.stop()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("flashmem") and thread not in before]


@pytest.mark.parametrize("refused", [BlockingIOError(), OSError(95, "not supported"), None])
def test_reads_are_whole_whatever_the_page_cache_says(
    refused: OSError | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = np.random.default_rng(0).integers(0, 255, 10_000, np.uint8)
    (tmp_path / "w.bin").write_bytes(content.tobytes())
    file = WeightFile(tmp_path / "w.bin", content.size)
    read = os.preadv

    def some(descriptor: int, views: list[Any], offset: int, flags: int = 0) -> int:
        """Cached bytes end after 1000 bytes, or cannot be queried."""
        if flags and refused is not None:
            raise refused
        return read(descriptor, [views[0][:1000]] if flags else views, offset)

    monkeypatch.setattr(os, "preadv", some)
    file.missed = False
    got = np.zeros(5000, np.uint8)
    file.read_into(got, 123)
    np.testing.assert_array_equal(got, content[123:5123])
    assert file.missed
    if refused is None:
        file.missed = False
        file.read_into(got[:900], 7)
        assert not file.missed  # all bytes were cached
    file.close()


@pytest.mark.parametrize("device", list_devices(), ids=lambda device: device.descriptor_name)
def test_copies_arrive_and_one_that_cannot_be_made_says_so(device: Any) -> None:
    context = Context(device)
    copier, buffer = Copier(context), context.buffer(64)
    numbers, more = np.arange(16, dtype=np.uint8), np.zeros(65, np.uint8)
    copied = copier.prepare(buffer, 8, 16)(numbers.ctypes.data)
    copied.wait()
    answer = np.zeros(24, np.uint8)
    copier.queue.read(answer, buffer)
    np.testing.assert_array_equal(answer[8:], np.arange(16))
    with pytest.raises(RunError, match="OpenCL failed to write to a buffer: INVALID_VALUE"):
        copier.prepare(buffer, 0, 65)(more.ctypes.data)
    image = context.image(4, 4, "float")
    rows = np.arange(64, dtype=np.float32).view(np.uint8)
    copier.prepare_image(image, first_row=0, width=4, rows=4, row_pitch=64)(rows.ctypes.data).wait()
    with pytest.raises(RunError, match="OpenCL failed to write to a texture"):
        copier.prepare_image(image, first_row=1, width=4, rows=4, row_pitch=64)(rows.ctypes.data)


@pytest.mark.parametrize("device", list_devices(), ids=lambda device: device.descriptor_name)
def test_nothing_is_left_mapped_where_staging_is_refused(device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    layout = PoolLayout(staging_slots=(1 << 20,), ring_bytes=1 << 16, threads=1)
    (tmp_path / "weights.bin").write_bytes(bytes(16))
    context, mapped = Context(device), 0

    def noted(queue: Queue, *args: Any, **options: Any) -> Any:
        nonlocal mapped
        mapped += 1
        return real(queue, *args, **options)

    real = Queue.map
    monkeypatch.setattr(Queue, "map", noted)
    for budget, maps in ((1 << 20, 0), (1 << 21, 1)):  # too small for both, and large enough
        ledger, file = Ledger(context, budget), WeightFile(tmp_path / "weights.bin", 16)
        with pytest.raises(RunError, match="budget") if maps == 0 else nullcontext():
            InterleaveTransfer(TransferRequest(context, ledger, file, (), layout)).close()
        assert mapped == maps
        ledger.close()
        file.close()


@pytest.mark.parametrize("threads", [0, 65, 2.5])
def test_a_descriptor_with_another_number_of_threads_is_refused(threads: float) -> None:
    with pytest.raises(UserError, match=rf"loader_threads is {threads}; give a number from 1 to 64"):
        DeviceDescriptor.from_dict({"name": "mine", "modes": {}, "loader_threads": threads})


@pytest.mark.parametrize("path", ["buffer", "texture"])
@pytest.mark.parametrize(
    ("mode", "shares_memory"), [("alias", True), ("dma", True), ("dma", False), ("interleave", True), ("interleave", False)]
)
def test_a_slice_may_come_in_when_all_that_was_in_its_place_has_been_used(
    mode: TransferMode, shares_memory: bool, path: Any, tmp_path: Path
) -> None:
    bundle = write_mini_bundle(tmp_path / "m.flashmem", path).open()
    layout = streamed_layout(bundle.program, bundle.plan, mode, shares_memory=shares_memory)
    assert bool(layout.staging_slots) == (mode == "interleave" and not shares_memory)
    slices = {part.name: part for part in bundle.program.slices}
    streamed = [w for w in bundle.plan.weights if not w.preload]
    free = free_from(bundle.plan, slices, layout, mode)
    assert free.keys() == {w.name for w in streamed}

    def place(name: str) -> tuple[str, int, int]:
        slot = (layout.staging_slot_of if mode == "interleave" else layout.slot_of).get(name)
        if slot is not None:
            return "slot", slot, slot + 1
        start = (layout.staging if mode == "interleave" else layout.offsets)[name]
        return "bytes", start, start + slices[name].file_bytes

    for w in streamed:
        kind, start, end = place(w.name)
        before = [u for u in streamed if u.read_layer < w.read_layer and place(u.name)[0] == kind]
        before = [u for u in before if place(u.name)[1] < end and start < place(u.name)[2]]
        last = max((u.last_mover if mode == "interleave" else u.last_use for u in before), default=0)
        assert free[w.name] == last < w.read_layer
    assert any(free.values()) and (mode == "alias" or any(free[w.name] < w.read_layer - 1 for w in streamed))
    baseline = replace(bundle.plan, strategy="always-next")
    assert free_from(baseline, slices, layout, mode) == {w.name: w.read_layer - 1 for w in streamed}
    assert free_from(bundle.plan, slices, bundle.plan.layouts["map"], "map") == {w.name: w.read_layer - 1 for w in streamed}


def test_no_moment_of_an_interrupt_keeps_a_lock_or_a_thread() -> None:
    def play() -> None:
        transfers.append(transfer := Noted(reads_ahead=True))
        run = LoaderRun(transfer, loads(0, 1, 1), {}, threads=2)
        run.wait("w0")
        run.layer_done(1)
        run.wait("w2")
        run.stop()

    def check() -> None:
        while transfers:
            transfers.pop().close()  # ends loads that have begun, and that nobody knows of
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("flashmem") and thread.is_alive()]

    transfers = list[Noted]()
    assert interrupt_everywhere(play, check) > 50


def test_a_run_without_a_thread_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch, "flashmem-loader")
    transfer = Noted(reads_ahead=True)
    with pytest.raises(RunError, match="the thread flashmem-loader-0 could not be started"):
        LoaderRun(transfer, loads(0), {}, threads=1)
    run = LoaderRun(transfer, loads(0), {}, threads=1)
    run.wait("w0")
    run.stop()
