"""Recorded launches: the recorded ranges, the same bits as without, and Qualcomm's calls to a mock library."""

from __future__ import annotations

import ctypes
import gc
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmem import Session
from flashmem.base.errors import FlashmemWarning, RunError
from flashmem.bundle.bundle import Bundle
from flashmem.profiler.descriptor import write_descriptor
from flashmem.profiler.launches import recording_pays
from flashmem.runtime.engine import launch_window as module
from flashmem.runtime.engine.executor import FEWEST, Executor
from flashmem.runtime.engine.launch_window import LaunchOrders, Spacing
from flashmem.runtime.engine.steps import Command, Step
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.opencl.launching import COMMAND_BUFFERS, CommandBuffers, RecordableQueues, Recording
from flashmem.target.descriptor import descriptor_names, load_descriptor
from tests.runtime.engine.test_executor import FakeLoader, FakeQueue, sessions
from tests.support.mini_bundle import write_mini_bundle

DEVICES = [device for device in list_devices() if COMMAND_BUFFERS in device.extensions]
EACH = pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.descriptor_name)


class FakeRecorder:
    def __init__(self, most: int) -> None:
        self.most = most
        self.made: list[tuple[int, ...]] = []

    def record(self, launches: Iterable[int]) -> tuple[int, ...]:
        self.made.append(tuple(launches))
        return self.made[-1]


class PlayingQueue(FakeQueue):
    def play(self, recording: tuple[int, ...]) -> int:
        self.launch_all(recording[:-1], alone=True)
        event = self.launch(recording[-1])
        self.flush()
        return event


@given(sessions(), st.booleans(), st.sampled_from((5, 1000)), st.integers(1, 300))
@settings(max_examples=200, deadline=None)
def test_recordings_end_where_something_is_waited_for(
    session: tuple[int, dict[str, int], dict[int, tuple[str, ...]], set[int], int], streamed: bool, most: int, quick: int
) -> None:
    """`quick` as in `test_executor`."""
    layers, releases, needs, frees, apart = session
    queue, recorder = PlayingQueue(), FakeRecorder(most)
    steps = [Step(str(n), (Command(n, (1,), None, ()),), needs.get(n, ())) for n in range(1, layers + 1)]
    executor = Executor(queue, steps, recorder)  # type: ignore[arg-type]
    executor.spacing.layers = apart
    ahead = 0

    def check() -> None:
        nonlocal ahead
        ahead = max(ahead, len(queue.enqueued) - queue.waited)

    for turn in range(3):
        queue.__init__()  # type: ignore[misc]
        loader = FakeLoader(queue, releases, frees) if streamed else None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "wait", queue.wait)
            patch.setattr(module, "has_ended", lambda event: event % quick == 0)
            patch.setattr(Spacing, "measure", lambda *_: None)
            executor.run(LaunchOrders(loader, check))  # type: ignore[arg-type]
        assert queue.enqueued == list(range(1, layers + 1)) and queue.waited == layers
        if loader:
            assert loader.done == sorted(loader.wakes - {0}) and all(loader.loaded.values())
        if not turn:
            assert not recorder.made  # this run may never repeat
    assert ahead < 3 * apart
    waking = {*releases.values(), *frees} if streamed else set()
    for made in recorder.made:
        assert list(made) == list(range(made[0], made[-1] + 1)) and FEWEST <= len(made) <= min(apart, most)
        assert not waking & set(made[:-1])
        assert not streamed or not any(needs.get(layer) for layer in made[1:])
    assert len({made[0] for made in recorder.made}) == len(recorder.made)  # each once
    if not waking and not needs and layers >= FEWEST:
        assert sum(map(len, recorder.made)) > layers - FEWEST


def test_an_interrupt_ends_a_run_between_recordings() -> None:
    queue, recorder = PlayingQueue(), FakeRecorder(1000)
    executor = Executor(queue, [Step("", (Command(n, (1,), None, ()),)) for n in range(1, 101)], recorder)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "wait", queue.wait)
        patch.setattr(Spacing, "measure", lambda *_: None)
        executor.spacing.layers = 10
        for _ in range(2):
            executor.run()
        queue.enqueued.clear()

        def interrupted(event: int) -> None:
            if event == 30:
                raise KeyboardInterrupt
            queue.wait(event)

        patch.setattr(module, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            executor.run()
    assert queue.enqueued == list(range(1, 41))  # one recording runs, the next one is enqueued


def test_recordings_are_made_anew_where_a_device_becomes_slow() -> None:
    queue, recorder = PlayingQueue(), FakeRecorder(1000)
    executor = Executor(queue, [Step("", (Command(n, (1,), None, ()),)) for n in range(1, 65)], recorder)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "wait", queue.wait)
        patch.setattr(Spacing, "measure", lambda *_: None)
        for apart, lengths in ((32, [32, 32]), (8, [32, 32]), (4, [4] * 16), (16, [4] * 16), (64, [64])):
            executor.spacing.layers = apart
            for _ in range(3):
                executor.run()
            assert [len(part.recording or ()) for part in executor.recorded.parts] == lengths  # type: ignore[union-attr, arg-type]


SOURCE = "__kernel void advance(__global int* data, int k) { int i = get_global_id(0); data[i] = data[i] * 3 + k + i; }"


def made(device: Any) -> tuple[Any, Any, Any, list[Step]]:
    """100 launches whose order changes the result."""
    context = Context(device)
    queue, data = context.queue(), context.buffer(4 * 64)
    program = context.build(SOURCE, [])
    steps = []
    for number in range(100):
        kernel = program.kernel("advance", [data, np.int32(number)])
        steps.append(Step("advance", (Command(kernel, (64,), None if number % 3 else (8,), (data,)),)))
    return context, queue, data, steps


def answer(queue: Any, data: Any, executor: Executor, runs: int) -> Any:
    queue.write(data, np.arange(64, dtype=np.int32))
    for _ in range(runs):
        executor.run()
    result = np.zeros(64, np.int32)
    queue.read(result, data)
    return result


@EACH
def test_recorded_launches_run_in_order_and_are_given_back(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    context, queue, data, steps = made(device)
    played: list[int] = []
    play = Recording.play
    monkeypatch.setattr(Recording, "play", lambda recording: played.append(len(recording._launches)) or play(recording))
    monkeypatch.setattr(Spacing, "measure", lambda *_: None)
    recorder = context.recorder(queue)
    assert isinstance(recorder, CommandBuffers)
    release, released = recorder._release, list[int]()
    recorder._release = lambda buffer: released.append(buffer) or release(buffer)
    executor = Executor(queue, steps, recorder)
    expected = answer(queue, data, Executor(queue, steps), 5)
    assert not played
    np.testing.assert_array_equal(answer(queue, data, executor, 5), expected)
    assert sum(played) == 400  # in four of five runs
    count = len([part for part in executor.recorded.parts if part.recording])  # type: ignore[union-attr]
    del executor
    gc.collect()
    assert len(released) >= count > 0


@EACH
def test_a_driver_that_fails_to_record_is_told_of_once(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    context, queue, data, steps = made(device)

    expected = answer(queue, data, Executor(queue, steps), 4)
    recorder = context.recorder(queue)
    assert isinstance(recorder, CommandBuffers)
    add, added = recorder._add, list[int]()
    recorder._add = lambda *given: added.append(1) or (add(*given) if len(added) < 70 else -5)  # some recordings exist
    executor = Executor(queue, steps, recorder)
    with pytest.warns(FlashmemWarning, match=r"failed to record a launch: OUT_OF_RESOURCES .*launched one by one") as told:
        np.testing.assert_array_equal(answer(queue, data, executor, 4), expected)
    assert len(told) == 1
    monkeypatch.setattr("flashmem.runtime.opencl.context.functions_of", lambda platform: lambda name: None)
    with pytest.warns(FlashmemWarning, match="the driver lacks clCreateCommandBufferKHR, so kernels are launched one by one"):
        assert context.recorder(queue) is None
    without = Context(replace(device, extensions=frozenset()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert without.recorder(without.queue()) is None


@EACH
@pytest.mark.parametrize("path", ["buffer", "texture"])
def test_sessions_give_the_same_bits(device: Any, path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_mini_bundle(tmp_path / "m.flashmem", path)
    name = str(list_devices().index(device))
    inputs, opened = [model.inputs(seed) for seed in (1, 2, 3, 4)], Bundle.open(model.path)
    play, played = Recording.play, [0]

    def counted(recording: Recording) -> int:
        played[0] += 1
        return play(recording)

    monkeypatch.setattr(Recording, "play", counted)
    monkeypatch.setattr(Spacing, "measure", lambda *_: None)
    recording = replace(opened, descriptor=replace(opened.descriptor, command_buffers=True))
    with Session(opened, device=name) as session:
        expected = [session.run(None, each) for each in inputs]
    assert not played[0]
    for mode in descriptor_for(device).modes[path]:
        with Session(recording, device=name, mode=mode) as session:
            answers = [session.run(None, each) for each in inputs]
        for one, two in zip((each for run in expected for each in run), (each for run in answers for each in run), strict=True):
            np.testing.assert_array_equal(one, two)
    played[0] = 0
    with Session(recording, device=name, strategy="preload", trace=True) as session:
        session.run(None, inputs[0])
        session.run(None, inputs[0])
    assert not played[0]  # a trace has an event for each launch
    with Session(recording, device=name, strategy="preload") as session:
        answers = [session.run(None, each) for each in inputs]
    assert played[0] >= 9  # in three of four runs
    for one, two in zip((each for run in expected for each in run), (each for run in answers for each in run), strict=True):
        np.testing.assert_array_equal(one, two)


class FakeQualcomm:
    """The calls of cl_qcom_recordable_queues as C functions. Objects are numbers; `log` records calls and their arguments."""

    def __init__(self, fails: str = "") -> None:
        p, n, code, size = ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_size_t
        self.log: list[tuple[Any, ...]] = []
        self.fails = fails
        types: dict[str, tuple[Any, ...]] = {
            "clGetDeviceInfo": (code, p, n, size, p, p),
            "clCreateCommandQueue": (p, p, p, ctypes.c_ulonglong, p),
            "clReleaseCommandQueue": (code, p),
            "clNewRecordingQCOM": (p, p, p),
            "clEndRecordingQCOM": (code, p),
            "clReleaseRecordingQCOM": (code, p),
            "clEnqueueNDRangeKernel": (code, p, p, n, p, p, p, n, p, p),
            "clEnqueueRecordingQCOM": (code, p, p, size, p, size, p, size, p, size, p, n, p, p),
        }
        self._kept = {name: ctypes.CFUNCTYPE(*kinds)(self._called(name, kinds)) for name, kinds in types.items()}

    def find(self, name: str) -> int | None:
        return ctypes.cast(self._kept[name], ctypes.c_void_p).value if name in self._kept else None

    def _called(self, name: str, kinds: tuple[Any, ...]) -> Callable[..., int]:
        def call(*given: Any) -> int:
            failing = -5 if name == self.fails else 0
            if name == "clGetDeviceInfo":
                assert given[1:3] == (0x41DE, 4)
                ctypes.cast(given[3], ctypes.POINTER(ctypes.c_uint))[0] = 64
            elif name == "clEnqueueNDRangeKernel":
                dimensions = given[2]
                local = given[5] and tuple(ctypes.cast(given[5], ctypes.POINTER(ctypes.c_size_t))[:dimensions])
                whole = tuple(ctypes.cast(given[4], ctypes.POINTER(ctypes.c_size_t))[:dimensions])
                assert given[3] is None and given[6:] == (0, None, None)
                given = (*given[:2], whole, local)
            elif name == "clEnqueueRecordingQCOM":
                assert given[2:12] == (0, None) * 4 + (0, None)
                ctypes.cast(given[12], ctypes.POINTER(ctypes.c_void_p))[0] = 4321
                given = given[:2]
            elif kinds[0] is ctypes.c_void_p:
                ctypes.cast(given[-1], ctypes.POINTER(ctypes.c_int))[0] = failing
                self.log.append((name, *given[:-1]))
                return 77 if name == "clCreateCommandQueue" else 88
            self.log.append((name, *given))
            return failing

        return call


class Handle:
    def __init__(self, number: int) -> None:
        self.int_ptr = number


def launches() -> list[Any]:
    from flashmem.runtime.opencl.launching import PreparedLaunch

    return [PreparedLaunch(Handle(1), Handle(10 + n), (64, n + 1), (8, 1) if n else None) for n in range(3)]


def test_calls_of_recordable_queues() -> None:
    library = FakeQualcomm()
    recorder = RecordableQueues(library.find, 1, 2, 3)
    assert recorder.most == 64
    assert [call for call in library.log if call[0] == "clCreateCommandQueue"] == [("clCreateCommandQueue", 2, 3, 1 << 30)]
    library.log.clear()
    recording = recorder.record(launches())
    assert recording.play() == recording.play() == 4321
    assert library.log == [
        ("clNewRecordingQCOM", 77),
        ("clEnqueueNDRangeKernel", 77, 10, (64, 1), None),
        ("clEnqueueNDRangeKernel", 77, 11, (64, 2), (8, 1)),
        ("clEnqueueNDRangeKernel", 77, 12, (64, 3), (8, 1)),
        ("clEndRecordingQCOM", 88),
        ("clEnqueueRecordingQCOM", 1, 88),
        ("clEnqueueRecordingQCOM", 1, 88),
    ]
    library.log.clear()
    del recording, recorder
    gc.collect()
    assert library.log == [("clReleaseRecordingQCOM", 88), ("clReleaseCommandQueue", 77)]


@pytest.mark.parametrize(
    ("fails", "sentence"),
    [
        ("clCreateCommandQueue", "create a recordable queue"),
        ("clNewRecordingQCOM", "begin a recording"),
        ("clEnqueueNDRangeKernel", "record a launch"),
        ("clEndRecordingQCOM", "end a recording"),
        ("clEnqueueRecordingQCOM", "enqueue recorded launches"),
    ],
)
def test_recordable_queues_that_fail(fails: str, sentence: str) -> None:
    library = FakeQualcomm(fails)
    with pytest.raises(RunError, match=f"OpenCL failed to {sentence}: OUT_OF_RESOURCES"):
        RecordableQueues(library.find, 1, 2, 3).record(launches()).play()
    begun = sum(call[0] == "clNewRecordingQCOM" for call in library.log) - (fails == "clNewRecordingQCOM")
    gc.collect()
    assert sum(call[0] == "clEndRecordingQCOM" for call in library.log) == begun
    assert sum(call[0] == "clReleaseRecordingQCOM" for call in library.log) == begun


def test_a_driver_without_the_functions_of_its_extension() -> None:
    with pytest.raises(RunError, match="the driver lacks clNewRecordingQCOM"):
        RecordableQueues(lambda name: None, 1, 2, 3)


@EACH
def test_a_profile_says_whether_recording_pays(device: Any, tmp_path: Path) -> None:
    context = Context(device)
    assert recording_pays(context, context.queue()) in (False, True)  # depends on the driver and the moment
    without = Context(replace(device, extensions=frozenset()))
    assert recording_pays(without, without.queue()) is False
    for paying in (False, True):
        descriptor = replace(load_descriptor("generic-cpu"), command_buffers=paying)
        assert load_descriptor(str(write_descriptor(tmp_path, descriptor, "here", "device"))).command_buffers is paying
    assert not any(load_descriptor(name).command_buffers for name in descriptor_names())  # no device was measured to gain
