"""Several models under one budget: answers, order, memory, isolated failures, a changing budget."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import flashmem
from flashmem import Bundle, Runtime, Session
from flashmem.base.errors import BudgetError, RunError, UserError
from flashmem.planning import replanning as again
from flashmem.program.program import fixed_bytes
from flashmem.runtime.engine.run import Run
from flashmem.runtime.kernels.cache import CachedKernels
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.serving.first_plans import ShortTurns
from flashmem.runtime.serving.requests import Answer, Model
from tests.support.mini_bundle import MiniModel, write_mini_bundle
from tests.support.paths import DATA, ROOT
from tests.support.refused_threads import refuse_threads

DEVICES = range(len(list_devices()))
MODES = ("map", "alias", "dma", "interleave")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[MiniModel]:
    folder = tmp_path_factory.mktemp("many")
    return [write_mini_bundle(folder / f"m{seed}.flashmem", seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Bundle]:
    """Bundles that include launch times, so that they can be planned again."""
    folder = tmp_path_factory.mktemp("compiled")
    names = ("gptneo-tiny", "resnet-tiny")
    return [flashmem.compile(DATA / f"{name}.onnx", folder / f"{name}.flashmem", build=False) for name in names]


def needed(bundle: Bundle, mode: str) -> int:
    return fixed_bytes(bundle.program) + bundle.plan.layouts[mode].total_bytes


def drawn(bundle: Bundle, seed: int) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(seed)
    return {
        port.name: (
            rng.integers(0, 8, port.shape).astype(port.dtype)
            if "int" in port.dtype
            else rng.standard_normal(port.shape).astype(port.dtype)
        )
        for port in bundle.program.inputs
    }


def expected(bundle: Bundle | Path, inputs: dict[str, NDArray[Any]], **options: Any) -> list[NDArray[Any]]:
    with Session(bundle, **options) as session:
        return session.run(None, inputs)


def same(answers: list[NDArray[Any]], wanted: list[NDArray[Any]]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(answers, wanted, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
def test_every_model_gives_its_answers_in_order_and_the_budget_is_never_passed(
    mode: Any, device: int, models: list[MiniModel]
) -> None:
    bundles = [model.open() for model in models]
    budget = int(1.3 * max(needed(bundle, mode) for bundle in bundles))
    inputs = [model.inputs() for model in models]
    wanted = [expected(bundle, x, device=str(device), mode=mode) for bundle, x in zip(bundles, inputs, strict=True)]
    with Runtime(budget, device=str(device)) as many:
        opened = [many.open(bundle, mode=mode) for bundle in bundles]
        order = [0, 1, 2, 2, 0, 2, 1, 1, 0]
        finished: list[int] = []
        answers = []
        for number, which in enumerate(order):
            answers.append(many.submit(opened[which], inputs[which]))
            answers[-1].add_done_callback(lambda _, number=number: finished.append(number))
        for which, answer in zip(order, answers, strict=True):
            assert same(answer.result(60), wanted[which])
        assert finished == sorted(finished) and len(finished) == len(order)
        assert many.peak <= budget
        assert max(held for _, held in many.over_time()) == many.peak
        report = opened[0].last_run
        assert report is not None and report.memory.peak_bytes <= budget and report.loads
    assert many.held == 0


def test_the_next_model_loads_while_one_still_runs(models: list[MiniModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run waits in its last launch for loads of the next one, which only the runtime can begin."""
    first, second = (model.open() for model in models[:2])
    with Runtime(2 * needed(first, "map")) as many:
        a, b = many.open(first, mode="map"), many.open(second, mode="map")
        play, seen = Run.execute, threading.Event()

        def slow(run: Run, *ports: Any, **options: Any) -> Any:
            if run.bound.opened is a.loaded.opened:
                begun = time.monotonic()
                played = play(run, *ports, **options)
                while b.loaded.current is None or not any(b.loaded.current.loader.loaded.values()):  # type: ignore[union-attr]
                    assert time.monotonic() - begun < 30, "nothing was loaded ahead"
                    time.sleep(0.01)
                seen.set()
                return played
            return play(run, *ports, **options)

        monkeypatch.setattr(Run, "execute", slow)
        answers = [many.submit(a, models[0].inputs()), many.submit(b, models[1].inputs())]
        for answer, model in zip(answers, models, strict=False):
            assert same(answer.result(60), expected(model.path, model.inputs(), mode="map"))
        assert seen.is_set()


def test_the_model_after_the_next_loads_too_and_residents_wait_for_the_next_turn(
    models: list[MiniModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run waits in its last launch for loads of the third model, whose turn is after that of another.

    The first run waits until all requests are queued, because what a run leaves resident depends on the queue at its start.
    """
    bundles = [model.open() for model in models]
    wanted = [expected(model.path, model.inputs(), mode="map") for model in models]
    budget = sum(needed(bundle, "map") for bundle in bundles)
    with Runtime(budget) as many:
        opened = [many.open(bundle, mode="map") for bundle in bundles]
        last, play, runs = opened[2].loaded, Run.execute, list[Run]()
        queued, seen = threading.Event(), threading.Event()

        def slow(run: Run, *ports: Any, **options: Any) -> Any:
            runs.append(run)
            assert queued.wait(30)
            played = play(run, *ports, **options)
            begun = time.monotonic()
            while len(runs) == 3 and not seen.is_set():
                assert time.monotonic() - begun < 30, "nothing was loaded for the third model"
                if last.current is not None and last.current.loader is not None and any(last.current.loader.loaded.values()):
                    seen.set()
                time.sleep(0.01)
            return played

        monkeypatch.setattr(Run, "execute", slow)
        order = [0, 0, 0, 1, 2]
        answers = [many.submit(opened[which], models[which].inputs()) for which in order]
        queued.set()
        for which, answer in zip(order, answers, strict=True):
            assert same(answer.result(60), wanted[which])
        assert seen.is_set()
        first, again = (answers[number].report for number in (0, 2))
        assert first is not None and again is not None and len(again.loads) < len(first.loads)
        assert many.peak <= budget


def test_plans_are_made_in_short_turns() -> None:
    before = sys.getswitchinterval()
    with ShortTurns():
        with ShortTurns():
            assert sys.getswitchinterval() < before
        assert sys.getswitchinterval() < before
    assert sys.getswitchinterval() == before


def test_the_first_answer_waits_for_no_plan(compiled: list[Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the next answer, except for its own plan."""
    made, go, begun = again.plan_again, threading.Event(), list[str]()

    def later(program: Any, *rest: Any, **options: Any) -> Any:
        begun.append(next(bundle.path.name for bundle in compiled if bundle.program.slices == program.slices))
        assert go.wait(30)
        return made(program, *rest, **options)

    monkeypatch.setattr(again, "plan_again", later)
    inputs = [drawn(bundle, 4) for bundle in compiled]
    with Runtime(2 * max(needed(bundle, "map") for bundle in compiled)) as many:
        opened = [many.open(bundle, mode="map") for bundle in compiled]
        assert begun == []
        first, second = (many.submit(model, x) for model, x in zip(opened, inputs, strict=True))
        outputs = first.result(30)
        deadline = time.monotonic() + 30
        while not begun and time.monotonic() < deadline:
            time.sleep(0.01)
        assert begun == [compiled[1].path.name]  # the model whose turn is next
        go.set()
        assert same(second.result(30), expected(compiled[1], inputs[1], mode="map"))
        assert same(outputs, expected(compiled[0], inputs[0], mode="map"))
        assert same(opened[0].run(None, inputs[0]), outputs)
        assert all(model.loaded.bound.weights.plan is not model.bundle.plan for model in opened)  # type: ignore[union-attr]


def test_what_fits_stays_resident_and_no_more(models: list[MiniModel]) -> None:
    first, second = (model.open() for model in models[:2])
    whole = sum(part.file_bytes for part in first.program.slices)
    with Runtime(None) as many:
        a, b = many.open(first, mode="map"), many.open(second, mode="map")
        for _ in range(2):
            for model, opened in ((models[0], a), (models[1], b)):
                opened.run(None, model.inputs())
        assert a.last_run is not None and not a.last_run.loads
        assert many.held >= 2 * whole
        many.set_budget(needed(first, "map") + 20_000).result(30)
        assert many.held <= needed(first, "map") + 20_000
        for model, opened in ((models[0], a), (models[1], b)):
            assert same(opened.run(None, model.inputs()), expected(model.path, model.inputs(), mode="map"))
        assert many.held <= needed(first, "map") + 20_000


def test_cancelling_failing_and_closing_one_harms_no_other(models: list[MiniModel], tmp_path: Path) -> None:
    broken = write_mini_bundle(tmp_path / "broken.flashmem", seed=7)
    with Runtime() as many:
        a, b, c = (many.open(model.path, mode="map") for model in (models[0], broken, models[2]))
        os.truncate(broken.open().weights_path, broken.open().program.slices[-3].offset + 100)
        answers = [
            many.submit(model, source.inputs())
            for model, source in ((a, models[0]), (b, broken), (c, models[2]), (a, models[0]))
        ]
        answers[3].cancel()
        late = many.submit(b, broken.inputs())
        assert same(answers[0].result(60), expected(models[0].path, models[0].inputs(), mode="map"))
        with pytest.raises(RunError, match="cannot be mapped"):
            answers[1].result(60)
        assert same(answers[2].result(60), expected(models[2].path, models[2].inputs(), mode="map"))
        with pytest.raises(CancelledError):
            answers[3].result(60)
        with pytest.raises(RunError, match="the model is closed"):
            late.result(60)
        with pytest.raises(RunError, match="the model is closed"):
            many.submit(b, broken.inputs())
        waiting = [many.submit(c, models[2].inputs()) for _ in range(3)]
        c.close()
        for answer in waiting:
            if answer.exception(60) is not None:
                with pytest.raises(RunError, match="closed before its turn"):
                    answer.result()
        assert same(a.run(None, models[0].inputs()), expected(models[0].path, models[0].inputs(), mode="map"))


def test_what_does_not_fit_is_refused_at_once(models: list[MiniModel]) -> None:
    with Runtime() as many:
        a = many.open(models[0].path)
        with pytest.raises(ValueError, match="is missing"):
            many.submit(a, {})
        with pytest.raises(ValueError, match="no output 'z'"):
            many.submit(a, models[0].inputs(), ["z"])
        inputs = models[0].inputs()
        inputs["tokens"] = np.full_like(inputs["tokens"], 1000)
        with pytest.raises(ValueError, match="holds index 1000"):
            a.run(None, inputs)
        assert len(a.run(["y"], models[0].inputs())) == 1
        with pytest.raises(UserError, match="budget"):
            many.set_budget("lots")
    with pytest.raises(RunError, match="the runtime is closed"):
        many.submit(a, models[0].inputs())
    with pytest.raises(RunError, match="the runtime is closed"):
        many.open(models[0].path)
    with pytest.raises(UserError, match="on_pressure 'hope'"):
        Runtime(on_pressure="hope")
    with Runtime(10_000) as many, pytest.raises(BudgetError, match="compile the model again, or raise the budget"):
        many.open(models[0].path)


def test_a_callback_may_submit_and_close_but_not_wait(models: list[MiniModel]) -> None:
    with Runtime() as many:
        a, b = (many.open(model.path) for model in models[:2])
        later: Future[Any] = Future()

        def go_on(answer: Answer) -> None:
            try:
                with pytest.raises(RunError, match="would wait for itself"):
                    b.run(None, models[1].inputs())
                a.close()
                later.set_result(many.submit(b, models[1].inputs()))
            except BaseException as error:
                later.set_exception(error)

        many.submit(a, models[0].inputs()).add_done_callback(go_on)  # type: ignore[arg-type]
        assert len(later.result(60).result(60)) == 3


def test_futures_can_be_awaited(models: list[MiniModel]) -> None:
    async def both(many: Runtime, opened: list[Model]) -> list[Any]:
        asked = [many.submit(model, source.inputs()) for model, source in zip(opened, models, strict=False)]
        return await asyncio.gather(*map(asyncio.wrap_future, asked))

    with Runtime() as many:
        answers = asyncio.run(both(many, [many.open(model.path) for model in models[:2]]))
        assert all(len(answer) == 3 for answer in answers)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("flashmem")]


def test_many_threads_and_random_cancels_leave_nothing_behind(models: list[MiniModel]) -> None:
    """A hundred requests; `python -m benchmarks.serving.requests` makes a thousand."""
    wanted = [expected(model.path, model.inputs(), mode="map") for model in models]
    gc.collect()
    before = descriptors()
    with Runtime(int(1.5 * needed(models[0].open(), "map"))) as many:
        opened = [many.open(model.path, mode="map") for model in models]
        right: list[bool] = []

        def ask(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(13):
                which = rng.randrange(len(models))
                answer = many.submit(opened[which], models[which].inputs())
                if rng.random() < 0.3 and answer.cancel():
                    continue
                right.append(same(answer.result(120), wanted[which]))

        asking = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(120)
        assert not any(thread.is_alive() for thread in asking)
        assert right and all(right)
    assert threads() == [] and many.held == 0
    gc.collect()
    assert descriptors() <= before


def halting(monkeypatch: pytest.MonkeyPatch, after: int, act: Callable[[], object]) -> None:
    """Call `act` once, after launch `after` of the first run is enqueued."""
    play = Run.execute
    left = [act]

    def acting(run: Run, *ports: Any, halted: Callable[[], bool], **options: Any) -> Any:
        seen = 0

        def counted() -> bool:
            nonlocal seen
            seen += 1
            if seen > after and left:
                left.pop()()
            return halted()

        return play(run, *ports, halted=counted, **options)

    monkeypatch.setattr(Run, "execute", acting)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
def test_a_run_goes_on_under_a_smaller_budget_with_the_same_bits(
    mode: Any, device: int, compiled: list[Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = compiled[0]
    inputs = drawn(bundle, 1)
    wanted = expected(bundle, inputs, device=str(device))
    with Runtime(device=str(device)) as many:
        model = many.open(bundle, mode=mode)
        smallest = model.loaded.smallest
        assert same(model.run(None, inputs), wanted)
        assert many.held > smallest
        relieved: list[Future[None]] = []
        halting(monkeypatch, 5, lambda: relieved.append(many.set_budget(smallest)))
        assert same(model.run(None, inputs), wanted)
        relieved[0].result(30)
        assert many.held <= smallest
        since = [held for at, held in many.over_time()]
        assert min(since[-20:]) <= smallest
        assert same(model.run(None, inputs), wanted) and many.held <= smallest
        many.set_budget(None).result(30)
        assert same(model.run(None, inputs), wanted)
        assert same(model.run(None, inputs), wanted) and many.held > smallest


def test_kernels_that_another_plan_replaces_load_no_longer(compiled: list[Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    """If kernels copy weights, each plan has its own kernels."""
    begin, made = CachedKernels.__init__, list[CachedKernels]()

    def noted(kernels: CachedKernels, *arguments: Any) -> None:
        made.append(kernels)
        begin(kernels, *arguments)

    monkeypatch.setattr(CachedKernels, "__init__", noted)
    with Runtime() as many:
        model, inputs = many.open(compiled[0], mode="interleave"), drawn(compiled[0], 1)
        many.set_budget(model.loaded.smallest).result(30)
        model.run(None, inputs)
        many.set_budget(None).result(30)
        model.run(None, inputs)
        model.run(None, inputs)
    assert len(made) > 2 and all(kernels._loading is None for kernels in made)


def test_nobody_has_to_wait_for_a_budget_that_is_moved(compiled: list[Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    """Like `asyncio.wait_for`, which cancels the future that it waits for."""
    inputs = drawn(compiled[0], 1)
    with Runtime() as many:
        model, cancelled = many.open(compiled[0], mode="map"), list[bool]()
        wanted = model.run(None, inputs)
        halting(monkeypatch, 3, lambda: cancelled.append(many.set_budget(model.loaded.smallest).cancel()))
        assert same(model.run(None, inputs), wanted) and cancelled == [True]
        assert many.held <= model.loaded.smallest
        assert same(model.run(None, inputs), wanted)


@pytest.mark.parametrize(("policy", "mode"), [("finish", "map"), ("fail", "map"), ("finish", "dma"), ("fail", "dma")])
def test_below_the_smallest_budget_a_run_finishes_or_fails(
    policy: Any, mode: Any, compiled: list[Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = compiled[1]
    inputs = drawn(bundle, 2)
    wanted = expected(bundle, inputs)
    with Runtime(on_pressure=policy) as many:
        model, other = many.open(bundle, mode=mode), many.open(compiled[0], mode=mode)
        other.run(None, drawn(compiled[0], 3))
        relieved: list[Future[None]] = []
        halting(monkeypatch, 3, lambda: relieved.append(many.set_budget(model.loaded.smallest - 1)))
        if policy == "finish":
            assert same(model.run(None, inputs), wanted)
        else:
            with pytest.raises(BudgetError, match="too small"):
                model.run(None, inputs)
        relieved[0].result(30)
        assert many.held < model.loaded.smallest
        with pytest.raises(BudgetError, match="too small"):
            model.run(None, inputs)
        many.set_budget("1GB").result(30)
        assert same(model.run(None, inputs), wanted)


@pytest.mark.parametrize("mode", ["map", "dma"])
def test_a_budget_that_moves_all_the_time_changes_no_bit(mode: Any, compiled: list[Bundle]) -> None:
    inputs = [drawn(bundle, seed) for seed, bundle in enumerate(compiled)]
    wanted = [expected(bundle, x) for bundle, x in zip(compiled, inputs, strict=True)]
    with Runtime() as many:
        opened = [many.open(bundle, mode=mode) for bundle in compiled]
        least = max(model.loaded.smallest for model in opened)
        rng = random.Random(5)
        answers = [(which, many.submit(opened[which], inputs[which])) for which in (rng.randrange(2) for _ in range(30))]
        moved = []
        while not answers[-1][1].done():
            moved.append(many.set_budget(rng.randrange(least, 4 * least)))
            time.sleep(0.005)
        assert all(same(answer.result(60), wanted[which]) for which, answer in answers)
        wait(moved, 30)
        assert all(each.done() for each in moved)
        assert many.budget is not None and many.held <= many.budget


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert threads() == []


def test_the_examples_of_the_page_run(compiled: list[Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All examples in sequence, in one namespace."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(compiled[0].path, tmp_path / "gptneo-copy.flashmem")
    for name, bundle in zip(("gptneo-125m", "resnet50"), compiled, strict=True):
        (tmp_path / f"{name}.flashmem").symlink_to(bundle.path)
    (ids,), (image,) = (drawn(bundle, 0).values() for bundle in compiled)
    page = (ROOT / "docs/how-to/many-models.md").read_text(encoding="utf-8")
    blocks = [block.partition("```")[0] for block in page.split("```python\n")[1:]]
    names = {"image": next(iter(drawn(compiled[1], 0))), "ids": next(iter(drawn(compiled[0], 0)))}
    space: dict[str, Any] = {"image": image, "ids": ids, "asyncio": asyncio, "flashmem": flashmem}
    moved = 0
    with Runtime("200MB") as many:
        for block in blocks:
            for said, named in names.items():
                block = block.replace(f'"{said}"', repr(named))
            if "with flashmem.Runtime" not in block:  # the blocks after an example use its runtime
                space["runtime"] = many
            exec(block, space)
            if "set_budget" in block:
                moved += 1
                assert many.budget == 120_000_000
        assert moved == 1
        opened = [many.open(name) for name in ("resnet50.flashmem", "gptneo-125m.flashmem")]
        answers = asyncio.run(space["both"](*opened, image, ids))
        for answer, model, inputs in zip(answers, reversed(compiled), (image, ids), strict=True):
            assert same(answer, expected(model, {next(iter(drawn(model, 0))): inputs}))
    assert space["other"].last_run.memory.by_category.get("weights", 0) == 0


def test_a_runtime_that_is_dropped_ends_its_threads(models: list[MiniModel]) -> None:
    runtime = Runtime("auto")
    opened = runtime.open(models[0].path)
    opened.run(None, models[0].inputs())
    budget, dropped = runtime._device.budget, weakref.ref(runtime)
    del runtime, opened
    gc.collect()
    assert dropped() is None
    end = time.monotonic() + 30
    while budget.total or [each for each in threading.enumerate() if each.name in ("flashmem-runtime", "flashmem-pressure")]:
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_runtime_whose_thread_cannot_start_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch, "flashmem-pressure")
    with pytest.raises(RunError, match="the thread flashmem-pressure could not be started"):
        Runtime("auto")
    assert not [each for each in threading.enumerate() if each.name == "flashmem-runtime"]
