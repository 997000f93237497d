"""The executor: events, waits, run-ahead, and the message of a failing launch."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmem.base.errors import RunError
from flashmem.runtime.engine import launch_window as module
from flashmem.runtime.engine.executor import Executor
from flashmem.runtime.engine.launch_window import LAYERS_APART, LaunchOrders, Spacing
from flashmem.runtime.engine.steps import Command, Step
from flashmem.runtime.opencl.context import Context, Queue
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.streaming.modes.interleave import InterleaveTransfer
from flashmem.runtime.streaming.transfer import Transfer


class FakeQueue:
    """Records enqueued launches. A kernel is the number of its launch, and so is an event; it is complete after a wait."""

    def __init__(self) -> None:
        self.enqueued: list[int] = []
        self.events: list[int] = []
        self.submitted = 0  # launches submitted to the device
        self.waited = 0
        self.followed: list[tuple[str, int]] = []  # events of other queues, and the number of launches before each

    def prepare(self, kernel: int, global_size: tuple[int, ...], local_size: None) -> int:
        return kernel

    def launch(self, launch: int, *, alone: bool = False) -> int:
        self.enqueued.append(launch)
        self.events.append(launch)
        return launch

    def launch_all(self, launches: Iterable[int], *, alone: bool = True) -> None:
        self.enqueued += launches

    def marker(self) -> int:
        return 0

    def launch_with_event(self, launches: list[int], *, alone: bool = True) -> int:
        self.enqueued += launches[:-1]
        event = self.launch(launches[-1]) if launches else self.marker()
        self.flush()
        return event

    def flush(self) -> None:
        self.submitted = len(self.enqueued)

    def finish(self) -> None:
        self.submitted = self.waited = len(self.enqueued)

    def follow(self, events: Iterable[str]) -> None:
        self.followed += [(event, len(self.enqueued)) for event in events]

    def wait(self, event: int) -> None:
        assert event in self.events
        self.submitted = max(self.submitted, self.enqueued.index(event) + 1)
        self.waited = max(self.waited, event)


class FakeLoader:
    """Loads that complete at their release; a load is released when the executor reports the end of its launch."""

    follows_launches = False

    def __init__(self, queue: FakeQueue, releases: dict[str, int], frees: Iterable[int]) -> None:
        self.queue, self.releases = queue, releases
        self.loaded = dict.fromkeys(releases, False)
        self.wakes = frozenset(releases.values()) | frozenset(frees)
        self.done: list[int] = []

    def take_over(self) -> None:
        pass

    def layer_done(self, layer: int) -> None:
        assert layer <= self.queue.waited, "a layer is done that nobody waited for"
        if layer in self.wakes:
            self.done.append(layer)

    def wait(self, name: str) -> None:
        assert self.queue.submitted == len(self.queue.enqueued), "the device would idle, and perhaps for ever"
        assert self.releases[name] <= max(self.done, default=0), "its release would never come"
        self.loaded[name] = True


@st.composite
def sessions(draw: st.DrawFn) -> tuple[int, dict[str, int], dict[int, tuple[str, ...]], set[int], int]:
    layers = draw(st.integers(1, 200))
    releases, needs = {}, dict[int, tuple[str, ...]]()
    for number in range(draw(st.integers(0, 20))):
        layer = draw(st.integers(1, layers))
        releases[f"s{number}"] = draw(st.integers(0, layer - 1))
        needs[layer] = (*needs.get(layer, ()), f"s{number}")
    frees = draw(st.sets(st.integers(1, layers), max_size=10))
    return layers, releases, needs, frees, draw(st.integers(*LAYERS_APART))


@given(sessions(), st.booleans(), st.integers(1, 300))
@settings(max_examples=300, deadline=None)
def test_every_gate_opens_and_nothing_else_is_waited_for(
    session: tuple[int, dict[str, int], dict[int, tuple[str, ...]], set[int], int], streamed: bool, quick: int
) -> None:
    """`quick`: one of so many launches has ended at each check."""
    layers, releases, needs, frees, apart = session
    queue = FakeQueue()
    steps = [Step(str(n), (Command(n, (1,), None, ()),), needs.get(n, ())) for n in range(1, layers + 1)]
    executor = Executor(queue, steps)  # type: ignore[arg-type]
    executor.spacing.layers = apart
    loader = FakeLoader(queue, releases, frees) if streamed else None
    most = 0

    def ahead() -> None:
        nonlocal most
        most = max(most, len(queue.enqueued) - queue.waited)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "wait", queue.wait)
        patch.setattr(module, "has_ended", lambda event: event % quick == 0)
        patch.setattr(Spacing, "measure", lambda *_: None)
        executor.run(LaunchOrders(loader, ahead))  # type: ignore[arg-type]
    assert queue.enqueued == list(range(1, layers + 1)) and queue.waited == layers
    assert most <= 2 * apart
    waking = loader.wakes - {0} if loader else set()
    if loader:
        assert loader.done == sorted(waking) and all(loader.loaded[name] for name in releases)
    assert waking <= set(queue.events)
    assert len(set(queue.events) - waking) <= layers // apart + 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=200), st.integers(*LAYERS_APART))
@settings(max_examples=200, deadline=None)
def test_a_run_without_loads_makes_the_same_launches_whoever_may_halt_it(counts: list[int], apart: int) -> None:
    """`counts`: launches of each step; later launches do the work of steps without any."""
    numbers = iter(range(1, 1000))
    steps = [Step(str(n), tuple(Command(next(numbers), (1,), None, ()) for _ in range(many))) for n, many in enumerate(counts)]
    made = []
    for halted in (None, lambda: False):
        queue = FakeQueue()
        executor = Executor(queue, steps)  # type: ignore[arg-type]
        executor.spacing.layers = apart
        checks: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "wait", lambda event: queue.wait(event) if event else None)  # noqa: B023 - called below
            patch.setattr(Spacing, "measure", lambda *_: None)
            done = executor.run(LaunchOrders(None, lambda: checks.append(len(queue.enqueued)), halted=halted))  # noqa: B023
        assert done == len(steps) and not (halted is None and queue.waited != sum(counts))
        assert max((after - before for before, after in pairwise([*checks, sum(counts)])), default=0) <= 3 * apart
        made.append(queue.enqueued)
    assert made[0] == made[1] == list(range(1, sum(counts) + 1))


@pytest.mark.parametrize("halted", [None, lambda: False], ids=["resident", "streamed"])
def test_what_comes_after_a_launch_comes_before_the_next_one(halted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output is read there whose memory in the arena another tensor gets later."""
    queue, seen = FakeQueue(), list[tuple[int, int]]()
    steps = [Step(str(n), (Command(n, (1,), None, ()),)) for n in range(1, 101)]
    monkeypatch.setattr(module, "wait", queue.wait)
    executor = Executor(queue, steps)  # type: ignore[arg-type]
    for stops in ([1, 2, 57, 100], [57], []):
        queue.__init__()  # type: ignore[misc]
        seen.clear()
        after = {layer: lambda layer=layer: seen.append((layer, len(queue.enqueued))) for layer in stops}
        executor.run(LaunchOrders(after=after, halted=halted))
        assert seen == [(layer, layer) for layer in stops] and queue.enqueued == list(range(1, 101))


@pytest.mark.parametrize("done", [0, 1, 2])
def test_layers_wait_for_the_events_of_what_brought_their_slices_in(done: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also events of slices that an earlier launch needed, before the run was halted after `done` launches, and a later one
    uses.
    """
    queue = FakeQueue()
    needs = {1: ("early",), 2: ("used again",), 3: ("late", "there before")}
    steps = [Step(str(n), (Command(n, (1,), None, ()),), needs.get(n, ())) for n in range(1, 5)]

    class Brought(FakeLoader):
        def wait(self, name: str) -> None:
            transfer.arrived[name] = [f"copy of {name}"]
            self.loaded[name] = True

    transfer = Transfer.__new__(InterleaveTransfer)
    transfer.arrived = {"there before": ["copy of there before"]}
    loads = {1: {"early", "used again", "late"}, 2: {"used again", "late"}, 3: {"used again", "late"}}[done + 1]
    loader = Brought(queue, dict.fromkeys(loads, 0), ())
    monkeypatch.setattr(module, "wait", queue.wait)
    monkeypatch.setattr(module, "has_ended", lambda event: False)
    Executor(queue, steps, None, transfer).run(LaunchOrders(loader, done=done))  # type: ignore[arg-type]
    assert queue.enqueued == list(range(done + 1, 5)) and not transfer.arrived
    expected = {"there before": 0, "used again": 1, "late": 2} | ({"early": 0} if done == 0 else {})
    assert dict(queue.followed) == {f"copy of {name}": max(0, layer - done) for name, layer in expected.items()}


class FollowedLoader(FakeLoader):
    """Loads whose copies wait on the device for launches."""

    follows_launches = True

    def launched(self, layer: int, event: int) -> None:
        assert event == layer == self.queue.submitted


@pytest.mark.parametrize("kind", [FakeLoader, FollowedLoader])
def test_a_halted_run_returns_when_its_launches_are_complete(kind: type[FakeLoader], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the host waits for no launch because copies do: what it frees next, launches may still read."""
    queue = FakeQueue()
    steps = [Step(str(n), (Command(n, (1,), None, ()),)) for n in range(1, 101)]
    monkeypatch.setattr(module, "wait", queue.wait)
    monkeypatch.setattr(module, "has_ended", lambda event: False)
    executor = Executor(queue, steps)  # type: ignore[arg-type]
    for halt in (10, 3):
        queue.__init__()  # type: ignore[misc]
        orders = LaunchOrders(kind(queue, {}, range(1, 101)), halted=lambda halt=halt: len(queue.enqueued) == halt)  # type: ignore[arg-type]
        assert executor.run(orders) == halt == queue.waited == len(queue.enqueued)


def test_events_are_as_far_apart_as_layers_are_quick() -> None:
    spacing = Spacing()
    assert spacing.layers == LAYERS_APART[0]  # until times are known
    for layers, seconds, apart in ((8, 8e-6, LAYERS_APART[1]), (8, 8e-3, 10), (1, 0.1, LAYERS_APART[0]), (5, 0.0, 64)):
        spacing.measure(layers, seconds)
        assert spacing.layers == apart


SOURCE = "__kernel void add(__global int* data, int more) { data[get_global_id(0)] += more; }"


@pytest.mark.parametrize("device", list_devices(), ids=lambda device: device.descriptor_name)
def test_launches_without_events_run_in_order_and_fail_with_a_sentence(device: Any) -> None:
    context = Context(device)
    queue, data = context.queue(), context.buffer(4 * 64)
    program = context.build(SOURCE, [])
    queue.write(data, np.zeros(64, np.int32))
    kernels = [program.kernel("add", [data, np.int32(number)]) for number in range(3)]
    launches = [queue.prepare(kernel, (64,), local) for kernel, local in zip(kernels, (None, (8,), (64,)), strict=True)]
    for _ in range(2):
        queue.launch_all(launches)
    answer = np.zeros(64, np.int32)
    queue.flush()
    queue.read(answer, data)
    assert (answer == 6).all()
    wrong = queue.prepare(kernels[0], (64,), (7,))
    with pytest.raises(RunError, match=r"OpenCL failed to launch add: INVALID_WORK_GROUP_SIZE"):
        queue.launch_all([launches[0], wrong])
    steps = [Step("a", (Command(kernels[1], (64,), (64,), (data,)),))] * 100
    Executor(queue, steps).run()
    queue.read(answer, data)
    assert (answer == 106).all()
    broken = Executor(queue, [*steps[:10], Step("b", (Command(kernels[1], (64,), (7,), (data,)),)), *steps[:10]])
    with pytest.raises(RunError, match="launch add"):
        broken.run()
    broken.drain()
    queue.read(answer, data)
    assert (answer == 116).all()


def test_a_driver_that_refuses_for_a_moment_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyopencl frees unreferenced objects; the launches that it then repeats are not enqueued twice."""
    device = list_devices()[0]
    context = Context(device)
    queue, data = context.queue(), context.buffer(4 * 64)
    queue.write(data, np.zeros(64, np.int32))
    kernel = context.build(SOURCE, []).kernel("add", [data, np.int32(1)])
    monkeypatch.setattr(queue, "_calls", [lambda *arguments: -4] * 2)
    asked: list[Any] = []
    launch = Queue.launch
    monkeypatch.setattr(Queue, "launch", lambda queue, each: asked.append(each) or launch(queue, each))
    queue.launch_all([queue.prepare(kernel, (64,), None)] * 2)
    answer = np.zeros(64, np.int32)
    queue.read(answer, data)
    assert len(asked) == 2 and (answer == 2).all()
