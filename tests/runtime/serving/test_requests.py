"""Failed or cancelled requests of a runtime, and callbacks: no effect on others, and no leaks."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashmem
from flashmem import Bundle, Runtime
from flashmem.base.errors import FlashmemWarning, RunError, UserError
from flashmem.planning import replanning as again
from flashmem.runtime.engine.bound_program import BoundKernels
from flashmem.runtime.engine.executor import Executor
from flashmem.runtime.engine.warm_up import WarmUp
from flashmem.runtime.memory.accounts import Changes
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.serving.arbiter import MemoryArbiter
from flashmem.runtime.serving.loaded_model import LoadedModel
from flashmem.runtime.serving.requests import Answer
from flashmem.runtime.streaming.weight_file import WeightFile
from tests.support.mini_bundle import MiniModel, write_mini_bundle
from tests.support.paths import DATA


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[MiniModel]:
    folder = tmp_path_factory.mktemp("requests")
    return [write_mini_bundle(folder / f"m{seed}.flashmem", seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle that can be planned again."""
    return flashmem.compile(DATA / "resnet-tiny.onnx", tmp_path_factory.mktemp("planned") / "m.flashmem", build=False)


def right(answer: list[Any], model: MiniModel) -> bool:
    return bool(np.allclose(answer[0], model.reference(model.inputs())[0], rtol=0, atol=2e-5))


# A budget is granted after kernels are loaded, and released if they fail.


@pytest.mark.parametrize("error", [RunError("the driver refuses the kernels"), UserError("they compute in half")])
def test_kernels_that_fail_keep_no_budget(error: Exception, models: list[MiniModel], monkeypatch: pytest.MonkeyPatch) -> None:
    with Runtime(prepare=False) as runtime:
        first, second = (runtime.open(model.path) for model in models)
        runtime.set_budget(first.loaded.smallest)

        def refused(*_: Any) -> Any:
            raise error

        monkeypatch.setattr(first.loaded.engine.bindings, "kernels_for", refused)
        with pytest.raises(type(error), match=str(error)):
            first.run(None, models[0].inputs())
        assert runtime._device.budget.committed == 0
        assert right(second.run(None, models[1].inputs()), models[1])


# A failed run leaves nothing on the device.


@pytest.mark.parametrize("where", ["load", "layer"])
@pytest.mark.parametrize("mode", ["map", "dma"])
def test_a_failed_run_keeps_no_device_memory_while_its_error_is_kept(
    mode: Any, where: str, models: list[MiniModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even until Python collects cycles."""
    made: list[Any] = []
    for name in ("buffer", "scratch", "wrap", "sub_buffer"):
        make = getattr(Context, name)

        def noted(*arguments: Any, make: Any = make, **options: Any) -> Any:
            made.append(make(*arguments, **options))
            return made[-1]

        monkeypatch.setattr(Context, name, noted)

    def fail(*_: Any, **__: Any) -> None:
        raise RunError("the device is lost")

    def begun(executor: Executor, *arguments: Any, **options: Any) -> int:
        layer = executor._streamed._prepared.steps[3].commands[0].arguments  # like the variables of a frame
        assert layer
        fail()
        return 0

    if where == "layer":
        monkeypatch.setattr(Executor, "run", begun)
    else:
        monkeypatch.setattr(WeightFile, "populate", fail)
        monkeypatch.setattr(WeightFile, "read_into", failing_after(6, WeightFile.read_into, fail))
    gc.collect()
    gc.disable()
    try:
        with Runtime(prepare=False) as runtime:
            opened = runtime.open(models[0].path, mode=mode)
            answer = opened.submit(models[0].inputs())
            error = answer.exception(30)
            assert isinstance(error, RunError) and "the device is lost" in str(error)
            assert len(made) > 20 and runtime.held == 0
            alone = [object()]
            unheld = sys.getrefcount(alone[0])
            assert [sys.getrefcount(made[number]) for number in range(len(made))] == [unheld] * len(made)
    finally:
        gc.enable()


def test_an_error_that_is_kept_keeps_no_model(models: list[MiniModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the content of its bundle: half a megabyte for each model that failed and was opened again."""

    def fail(*_: Any, **__: Any) -> None:
        raise RunError("the device is lost")

    monkeypatch.setattr(Executor, "run", fail)
    errors, inputs = list[RunError](), models[0].inputs()
    gc.collect()
    gc.disable()
    try:
        with Runtime(prepare=False) as runtime:
            opened = runtime.open(models[0].path)
            alive = weakref.ref(opened)
            try:
                opened.run(None, inputs)
            except RunError as error:
                errors.append(error)
            runtime._worker.have_done(lambda: None)  # the request is over
            del opened
            assert str(errors[0]) == "the device is lost" and alive() is None
    finally:
        gc.enable()


def failing_after(count: int, act: Any, fail: Any) -> Any:
    """`act`, which fails after `count` calls."""
    calls = 0

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return fail() if calls > count else act(*arguments)

    return counted


# No request waits for the needs of others.


def test_no_request_waits_while_a_budget_is_set(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan decides whether the current run can continue with less memory."""
    begun, go, running = threading.Event(), threading.Event(), threading.Event()
    smallest, run = again.smallest_budget, Executor.run
    inputs = {port.name: np.zeros(port.shape, port.dtype) for port in bundle.program.inputs}

    def later(*arguments: Any) -> int:
        begun.set()
        assert go.wait(30)
        return smallest(*arguments)

    def layers(executor: Executor, *arguments: Any, **options: Any) -> int:
        running.set()
        assert go.wait(30)
        return run(executor, *arguments, **options)

    monkeypatch.setattr(again, "smallest_budget", later)
    monkeypatch.setattr(Executor, "run", layers)
    monkeypatch.setattr("flashmem.runtime.serving.first_plans.Planner.wake", lambda _: None)  # which makes plans too
    with Runtime(prepare=False) as runtime:
        opened = runtime.open(bundle, mode="map")
        answers = [opened.submit(inputs)]
        assert running.wait(30)
        setting = threading.Thread(target=runtime.set_budget, args=(1,))
        setting.start()
        assert begun.wait(30)
        asking = threading.Thread(target=lambda: answers.append(opened.submit(inputs)))
        asking.start()
        asking.join(10)
        waited = asking.is_alive()
        go.set()
        setting.join(30)
        asking.join(30)
        assert not waited and answers[0].result(30)


def test_an_answer_waits_for_nothing_that_is_done_ahead(models: list[MiniModel], monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go, look = threading.Event(), threading.Event(), MemoryArbiter.load_ahead
    run = Executor.run

    def stuck(*arguments: Any) -> None:
        begun.set()
        assert go.wait(30)
        look(*arguments)

    def layers(executor: Executor, *arguments: Any, **options: Any) -> int:
        assert begun.wait(30)
        return run(executor, *arguments, **options)

    monkeypatch.setattr(MemoryArbiter, "load_ahead", stuck)
    monkeypatch.setattr(Executor, "run", layers)
    with Runtime(prepare=False) as runtime:
        opened = [runtime.open(model.path, mode="map") for model in models]
        first, second = (each.submit(model.inputs()) for each, model in zip(opened, models, strict=True))
        try:
            assert right(first.result(10), models[0])
        finally:
            go.set()
        assert right(second.result(30), models[1])


def test_a_callback_may_close_a_model_that_is_loaded_ahead(models: list[MiniModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the thread that loads ahead."""
    looking, at_work = threading.Event(), list[bool]()
    look, close, run = MemoryArbiter.load_ahead, LoadedModel.close, Executor.run

    def slow(*arguments: Any) -> None:
        looking.set()
        threading.Event().wait(0.2)
        look(*arguments)
        looking.clear()

    def noted(closed: LoadedModel, why: str) -> None:
        at_work.append(looking.is_set())
        close(closed, why)

    def layers(executor: Executor, *arguments: Any, **options: Any) -> int:
        assert looking.wait(30)
        return run(executor, *arguments, **options)

    monkeypatch.setattr(MemoryArbiter, "load_ahead", slow)
    monkeypatch.setattr(LoadedModel, "close", noted)
    monkeypatch.setattr(Executor, "run", layers)
    with Runtime(prepare=False) as runtime:
        opened = [runtime.open(model.path, mode="map") for model in models]
        go = threading.Event()
        first = opened[0].submit(models[0].inputs())
        first.add_done_callback(lambda _: go.wait(30) and opened[1].close())
        second = opened[1].submit(models[1].inputs())
        go.set()
        assert right(first.result(30), models[0])
        assert isinstance(second.exception(30), RunError)
        runtime._worker.have_done(lambda: None)  # the callback is over
        assert opened[1].failure == "close was called" and at_work == [False]


# Callbacks are isolated, and all of them are called.


def interrupt(_: Any) -> None:
    raise KeyboardInterrupt


def leave(_: Any) -> None:
    sys.exit()


@pytest.mark.parametrize("ending", [interrupt, leave])
def test_what_a_callback_raises_ends_neither_the_runtime_nor_other_callbacks(
    ending: Any, models: list[MiniModel], caplog: pytest.LogCaptureFixture
) -> None:
    with Runtime(prepare=False) as runtime:
        opened, told = runtime.open(models[0].path), list[Answer]()
        answer = opened.submit(models[0].inputs())
        answer.add_done_callback(ending)
        answer.add_done_callback(told.append)
        with caplog.at_level(logging.ERROR):
            assert right(answer.result(30), models[0])
            assert right(opened.run(None, models[0].inputs()), models[0])
        assert told == [answer]
        assert any("a callback of a future raised" in record.message for record in caplog.records)


@pytest.mark.parametrize("ending", [interrupt, leave])
def test_all_who_wait_are_told_when_a_runtime_closes(
    ending: Any, models: list[MiniModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, go, run = threading.Event(), threading.Event(), Executor.run

    def layers(executor: Executor, *arguments: Any, **options: Any) -> int:
        running.set()
        assert go.wait(30)
        return run(executor, *arguments, **options)

    monkeypatch.setattr(Executor, "run", layers)
    with Runtime(prepare=False) as runtime:
        opened, told = runtime.open(models[0].path), list[Answer]()
        answers = [opened.submit(models[0].inputs()) for _ in range(4)]
        for answer in answers[1:]:
            answer.add_done_callback(ending)
            answer.add_done_callback(told.append)
        assert running.wait(30)
        closing = threading.Thread(target=runtime.close)
        closing.start()
        while runtime._worker.closing is None:
            pass
        go.set()
        closing.join(30)
        assert right(answers[0].result(30), models[0])
        for answer in answers[1:]:
            with pytest.raises(CancelledError):
                answer.result(5)
        assert told == answers[1:]


@pytest.mark.parametrize("act", ["cancel", "close"])
def test_an_interrupt_in_a_callback_reaches_the_thread_that_called_it(
    act: str, models: list[MiniModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After all callbacks have been called."""
    go, run = threading.Event(), Executor.run

    def layers(executor: Executor, *arguments: Any, **options: Any) -> int:
        assert go.wait(30)
        return run(executor, *arguments, **options)

    monkeypatch.setattr(Executor, "run", layers)
    with Runtime(prepare=False) as runtime:
        first, second = (runtime.open(model.path) for model in models)
        running, told = first.submit(models[0].inputs()), list[Answer]()
        answers = [second.submit(models[1].inputs()) for _ in range(2)]
        for answer in answers:
            answer.add_done_callback(interrupt)
            answer.add_done_callback(told.append)
        if act == "cancel":
            with pytest.raises(KeyboardInterrupt):
                answers[0].cancel()
            assert answers[0].cancelled() and told == answers[:1]
        go.set()
        with pytest.raises(KeyboardInterrupt):
            second.close()
        assert right(running.result(30), models[0])
        assert told == answers and second.failure == "close was called"
        with pytest.raises(KeyboardInterrupt):
            running.add_done_callback(interrupt)


def test_a_budget_is_told_to_all_who_wait_for_it(models: list[MiniModel], monkeypatch: pytest.MonkeyPatch) -> None:
    with Runtime(prepare=False) as runtime:
        opened = runtime.open(models[0].path, mode="map")
        opened.run(None, models[0].inputs())
        go, told = threading.Event(), list[Future[None]]()
        waiting = opened.submit(models[0].inputs())
        waiting.add_done_callback(lambda _: go.wait(30))
        done = [runtime.set_budget(opened.loaded.smallest // 2) for _ in range(2)]
        for each in done:
            each.add_done_callback(leave)
            each.add_done_callback(told.append)
        go.set()
        for each in done:
            each.result(30)
        runtime.set_budget(None).result(30)
        assert right(opened.run(None, models[0].inputs()), models[0])
        assert told == done


# Models open and close.


def test_a_model_that_is_opened_again_and_again_leaves_nothing(models: list[MiniModel]) -> None:
    """Fifteen times; `python -m benchmarks.serving.reopening` does so a thousand times, and measures the process."""

    def again(times: int) -> tuple[int, int, int]:
        for _ in range(times):
            with runtime.open(models[0].path, mode="map") as opened:
                assert right(opened.run(None, models[0].inputs()), models[0])
        gc.collect()
        return tracemalloc.get_traced_memory()[0], len(gc.get_objects()), len(list(Path("/proc/self/fd").iterdir()))

    tracemalloc.start()
    try:
        with Runtime(prepare=False) as runtime:
            nbytes, objects, descriptors = (after - before for before, after in zip(again(3), again(15), strict=True))
            assert runtime.held == 0
    finally:
        tracemalloc.stop()
    assert nbytes <= 15 * 4096 and objects <= 15 and descriptors <= 0


def test_the_latest_changes_of_a_total_are_remembered_in_their_order() -> None:
    changes = Changes(3)
    for number in range(5):
        assert list(changes) == [(float(n), 10 * n) for n in range(max(0, number - 3), number)]
        changes.note(float(number), 10 * number)
    assert list(changes) == [(2.0, 20), (3.0, 30), (4.0, 40)]


# The warm-up delays no answer.


def prepared(opened: LoadedModel) -> WarmUp:
    """As for a bundle that has steady kernels."""
    return WarmUp(opened.opened, opened.device, apart=False)


def test_an_answer_is_given_where_nothing_can_be_prepared(models: list[MiniModel], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    with Runtime() as runtime:
        opened = runtime.open(models[0].path)
        monkeypatch.setattr(BoundKernels, "steady_launches", fail)
        monkeypatch.setattr(opened.loaded.engine.bindings, "warm_up", prepared(opened.loaded))
        assert right(opened.run(None, models[0].inputs()), models[0])
        runtime.prepared()
        with pytest.warns(FlashmemWarning, match="later runs keep the kernels of the first one: MemoryError"):
            answer = opened.run(None, models[0].inputs())
        assert right(answer, models[0])


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("flashmem")]
