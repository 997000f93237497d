"""Runs that are begun without waiting, and runs that stop: cancelled, or at the end of their time."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

import flashmem
from flashmem import Session
from flashmem.base.errors import RunError
from flashmem.runtime.engine.activations import Activations
from flashmem.runtime.engine.stopping import OneThread, RunControl, RunStoppedError
from flashmem.runtime.opencl.context import Queue
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.session import _close_all
from tests.support.interrupts import interrupt_everywhere
from tests.support.mini_bundle import MiniModel, write_mini_bundle
from tests.support.state_models import recurrence

Array = NDArray[Any]
PLACES = [(device, mode) for device in range(len(list_devices())) for mode in ("map", "alias", "dma", "interleave")]
LAUNCH = 7
"""The launch before which a test stops a run: some slices are loaded then, some are not."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MiniModel:
    return write_mini_bundle(tmp_path_factory.mktemp("stopping") / "m.flashmem")


@pytest.fixture
def session(model: MiniModel) -> Iterator[Session]:
    with Session(model.path) as opened:
        yield opened


def before_launch(number: int, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Call `act` before launch `number` of the next run; returns a list that gets the launches of that run."""
    launches: list[int] = []

    def counted(enqueue: Callable[..., Any]) -> Callable[..., Any]:
        def counting(queue: Queue, launch: Any, **options: Any) -> Any:
            launches.append(len(launches) + 1)
            if launches[-1] == number:
                act()
            return enqueue(queue, launch, **options)

        return counting

    for name in ("launch", "launch_all"):
        monkeypatch.setattr(Queue, name, counted(getattr(Queue, name)))
    return launches


def right(answer: list[Array], model: MiniModel) -> bool:
    return bool(np.allclose(answer[0], model.reference(model.inputs())[0], rtol=0, atol=2e-5))


@pytest.mark.parametrize("strategy", ["auto", "preload"])
@pytest.mark.parametrize(("device", "mode"), PLACES)
def test_a_stopped_run_leaves_the_session_as_it_was(
    device: int, mode: Any, strategy: Any, model: MiniModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    if strategy == "preload" and mode not in ("dma", "alias"):
        pytest.skip("preloaded in the same way as in mode dma")
    inputs = model.inputs()
    with Session(model.path, device=str(device), mode=mode, strategy=strategy, prepare=False) as session:
        first = session.run(None, inputs)
        ledger = session._engine.bound.ledger  # type: ignore[union-attr]
        held, committed = dict(ledger.by_category), ledger.commitment
        for number in (1, LAUNCH):
            with monkeypatch.context() as patch:
                launches = before_launch(number, lambda: time.sleep(0.3), patch)
                with pytest.raises(TimeoutError, match=r"stopped by its timeout of 0.25 s"):
                    session.run(None, inputs, timeout=0.25)
                assert len(launches) < len(session.bundle.program.launches)
            assert ledger.total <= sum(held.values())
            again = session.run(None, inputs)
            assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))
            assert (ledger.by_category, ledger.commitment) == (held, committed)
    assert right(first, model)


@pytest.mark.parametrize(("device", "mode"), PLACES)
def test_nothing_of_python_runs_when_a_closed_session_ends(device: int, mode: Any, model: MiniModel) -> None:
    """Ctrl-C in such a function, of a weak reference or an end of an object, would be lost."""
    called: list[str] = []
    session = Session(model.path, device=str(device), mode=mode)
    for _ in range(2):
        session.run(None, model.inputs())
    session.close()
    gone = weakref.ref(session)
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_qualname) if event == "call" else None)
    del session
    sys.setprofile(None)
    assert gone() is None and called == []


def test_a_stopped_run_with_prefetches_and_steady_kernels(model: MiniModel, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = flashmem.compile(wide(), budget="8MB", chunk="16KB", build=False)
    feeds = {"x": np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)}
    with Session(bundle) as session:
        [wanted] = session.run(None, feeds)
        session.prepared()
        for number in (2, 4):
            with monkeypatch.context() as patch:
                before_launch(number, lambda: time.sleep(0.3), patch)
                with pytest.raises(TimeoutError):
                    session.run(None, feeds, timeout=0.2)
            np.testing.assert_allclose(session.run(None, feeds)[0], wanted, rtol=1e-5, atol=1e-6)
            session.prepared()


def wide() -> onnx.ModelProto:
    """Six products, one after the other."""
    rng = np.random.default_rng(1)
    weights = [rng.standard_normal((64, 64)).astype(np.float32) / 8 for _ in range(6)]
    nodes, values = [], ["x"]
    for number in range(len(weights)):
        nodes.append(onnx.helper.make_node("MatMul", [values[-1], f"w{number}"], [f"p{number}"]))
        nodes.append(onnx.helper.make_node("Tanh", [f"p{number}"], [f"y{number}"]))
        values.append(f"y{number}")
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [8, 64]) for name in ("x", values[-1]))
    constants = [onnx.numpy_helper.from_array(weight, f"w{number}") for number, weight in enumerate(weights)]
    graph = onnx.helper.make_graph(nodes, "g", [x], [y], constants)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)


def test_runs_without_waiting(session: Session, model: MiniModel) -> None:
    inputs = model.inputs()
    futures = [session.run_async(None, inputs) for _ in range(3)]
    failing = session.run_async(["z"], inputs)
    futures.append(session.run_async(["y"], inputs))
    assert all(right(future.result(60), model) for future in futures)
    with pytest.raises(ValueError, match="the model has no output 'z'"):
        failing.result(60)
    assert len(futures[-1].result()) == 1 and right(session.run(None, inputs), model)


def test_a_cancelled_run_stops(session: Session, model: MiniModel, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, futures = model.inputs(), list[Future[list[Array]]]()
    with monkeypatch.context() as patch:
        submitted = threading.Event()

        def cancel() -> None:
            submitted.wait(60)
            assert futures[0].cancel()

        launches = before_launch(LAUNCH, cancel, patch)
        futures += [session.run_async(None, inputs)]
        submitted.set()
        assert wait(futures, 60).done
        session._alone.during("a test", lambda: None)  # the thread has left the run
        assert LAUNCH <= len(launches) < len(session.bundle.program.launches)
    with pytest.raises(CancelledError):
        futures[0].result()
    assert right(session.run_async(None, inputs).result(60), model)


def test_a_coroutine_awaits_and_cancels(session: Session, model: MiniModel, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = model.inputs()

    async def both() -> list[Array]:
        loop = asyncio.get_running_loop()
        with monkeypatch.context() as patch:
            begun, let = asyncio.Event(), threading.Event()

            def stop_here() -> None:
                loop.call_soon_threadsafe(begun.set)
                let.wait(60)

            launches = before_launch(LAUNCH, stop_here, patch)
            task = asyncio.ensure_future(asyncio.wrap_future(session.run_async(None, inputs)))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(0)  # the loop passes the cancellation on to the session's future
            let.set()
            await asyncio.to_thread(session.prepared)  # waits for the end of the run
            assert len(launches) < len(session.bundle.program.launches)
        return await asyncio.wrap_future(session.run_async(None, inputs))

    assert right(asyncio.run(both()), model)


def test_a_busy_session_counts_as_time(session: Session, model: MiniModel, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, go, inside = model.inputs(), threading.Event(), threading.Event()
    write = Activations.write_inputs

    def slow(self: Activations, given: Any) -> None:
        inside.set()
        go.wait(60)
        write(self, given)

    with monkeypatch.context() as patch:
        patch.setattr(Activations, "write_inputs", slow)
        first = session.run_async(None, inputs)
        assert inside.wait(60)
        with pytest.raises(TimeoutError, match=r"its timeout of 0.1 s; allow more time"):
            session.run(None, inputs, timeout=0.1)
        late = session.run_async(None, inputs, timeout=0)
        go.set()
    assert right(first.result(60), model)
    with pytest.raises(TimeoutError):
        late.result(60)
    assert right(session.run(None, inputs, timeout=60), model)


@pytest.mark.parametrize(
    ("timeout", "message"), [(-1, "the timeout is -1; give seconds"), ("1", "the timeout is a str"), (float("nan"), "is nan")]
)
def test_a_timeout_is_a_number_of_seconds(session: Session, model: MiniModel, timeout: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        session.run(None, model.inputs(), timeout=timeout)
    with pytest.raises(ValueError, match=message):
        session.run_async(None, model.inputs(), timeout=timeout)


def test_closing_cancels_what_waits(session: Session, model: MiniModel, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, go = model.inputs(), threading.Event()
    before_launch(LAUNCH, lambda: go.wait(60), monkeypatch)
    first, second = (session.run_async(None, inputs) for _ in range(2))
    while not session._alone.busy:
        time.sleep(0.001)
    closing = threading.Thread(target=session.close)
    closing.start()
    assert wait([second], 60).done and second.cancelled()
    go.set()
    closing.join(60)
    assert right(first.result(60), model)
    with pytest.raises(RunError, match="the session is closed"):
        session.run_async(None, inputs).result(60)


def test_torn_states_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = recurrence()
    bundle = flashmem.compile(model.proto, states=model.states, build=False)
    with Session(bundle) as session:
        wanted = [session.run(None, model.inputs(number)) for number in range(2)]
        saved = session.states()
        with monkeypatch.context() as patch:
            launches = before_launch(2, lambda: time.sleep(0.3), patch)
            with pytest.raises(TimeoutError):
                session.run(None, model.inputs(2), timeout=0.2)
            assert launches
        for use in (lambda: session.run(None, model.inputs(0)), session.states):
            with pytest.raises(ValueError, match="is partly that of a run that was stopped; call reset, or set_states"):
                use()
        session.set_states(saved)
        assert all(np.array_equal(array, saved[name]) for name, array in session.states().items())
        session.run(None, model.inputs(2))
        session.reset()
        for number, right in enumerate(wanted):
            for one, other in zip(session.run(None, model.inputs(number)), right, strict=True):
                np.testing.assert_array_equal(one, other)


_EXIT = """
import sys, time
import flashmem
from flashmem.runtime.engine.inputs import complete_inputs
from flashmem.runtime.opencl.context import Queue
enqueue = Queue.launch
Queue.launch = lambda *given, **options: (print("launch", flush=True), time.sleep(0.2), enqueue(*given, **options))[2]
session = flashmem.Session(sys.argv[1], build_apart=False)
inputs = complete_inputs(session.bundle.program, {}, 0)
futures = [session.run_async(None, inputs) for _ in range(100)]
time.sleep(1)
"""


def test_a_process_ends_with_runs_under_way(model: MiniModel) -> None:
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _EXIT, str(model.path)], check=True, capture_output=True, text=True, timeout=100
    )
    assert "launch" in done.stdout and not done.stderr
    assert time.perf_counter() - begun < 60  # all of the runs would take minutes


def test_a_run_ends_at_its_time_or_when_it_is_cancelled() -> None:
    asked: list[int] = []
    assert RunControl().asked is None and not RunControl().stops()
    never = RunControl(cancelled=lambda: bool(asked.append(1)))
    assert never.asked is not None and not never.asked() and not never.stops() and len(asked) == 2
    assert RunControl(cancelled=lambda: True).stops()
    for control in (RunControl(0.0), RunControl(0.0, lambda: False), RunControl(time.perf_counter() + 60, lambda: True)):
        assert control.stops() and control.asked is not None and control.asked()
    assert not RunControl(time.perf_counter() + 60, lambda: False).stops()


def test_no_moment_of_an_interrupt_keeps_a_session_for_a_thread() -> None:
    alone, made = OneThread(), list[str]()

    def check() -> None:
        other = threading.Thread(target=lambda: alone.during("run", lambda: made.append("other"), until=0))
        other.start()
        other.join()
        assert made and made[-1] == "other" and not alone.busy

    assert interrupt_everywhere(lambda: alone.during("run", lambda: made.append("this")), check) > 5


def test_one_thread_at_a_time_and_never_twice() -> None:
    alone = OneThread()

    def again() -> None:
        with pytest.raises(RunError, match="close was called while the same thread is in a run"):
            alone.during("close", lambda: None)

    def busy() -> None:
        with pytest.raises(RunStoppedError):
            alone.during("run", lambda: None, until=time.perf_counter() + 0.01)
        told.append(alone.busy)

    told = list[bool]()
    other = threading.Thread(target=busy)
    alone.during("run", lambda: (again(), other.start(), other.join()))
    assert told == [True] and not alone.busy


def test_a_forked_child_that_exits_leaves_the_runs_of_its_parent(session: Session, model: MiniModel) -> None:
    session._process += 1  # as in a forked child
    go = threading.Event()
    first = session._background.submit(lambda cancelled: [np.array(go.wait(60))])
    second = session.run_async(None, model.inputs())
    _close_all()
    assert not first.cancelled() and not second.cancelled()
    go.set()
    session._process -= 1
    assert right(second.result(60), model)
    _close_all()
    with pytest.raises(RunError, match="the session is closed"):
        session.run(None, model.inputs())
