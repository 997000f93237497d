"""One engine for sessions and runtimes: the same answers, and the same ends of runs, models and budgets in both."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import flashmem
from flashmem import Bundle, Runtime, Session
from flashmem.base.errors import BudgetError, RunError
from flashmem.program.program import fixed_bytes
from flashmem.runtime.engine.activations import Activations
from flashmem.runtime.engine.engine import Engine
from flashmem.runtime.engine.executor import Executor
from flashmem.runtime.streaming.weight_file import WeightFile
from tests.support.mini_bundle import MiniModel, write_mini_bundle

MODES = ("map", "alias", "dma", "interleave")
THROUGH = ("session", "runtime")

Array = NDArray[Any]


class Opened(NamedTuple):
    """An open model and its engines: one for a session, one for each shape variant in a runtime."""

    run: Callable[[Sequence[str] | None, Any], list[Array]]
    close: Callable[[], None]
    engines: tuple[Engine, ...]

    @property
    def held(self) -> int:
        return self.engines[0].device.budget.total


@contextmanager
def opened(through: str, bundle: Bundle | Path, mode: Any = "auto", budget: int | None = None) -> Iterator[Opened]:
    if through == "session":
        with Session(bundle, mode=mode, budget=budget) as session:
            yield Opened(session.run, session.close, (session._engine,))
        return
    with Runtime(budget) as runtime:
        model = runtime.open(bundle, mode=mode)
        yield Opened(model.run, model.close, tuple(each.engine for each in model.variants))


@pytest.fixture
def model(tmp_path: Path) -> MiniModel:
    return write_mini_bundle(tmp_path / "m.flashmem")


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A product of 4 or 32 rows and a weight."""
    folder = tmp_path_factory.mktemp("variants")
    weight = np.random.default_rng(0).standard_normal((64, 40)).astype(np.float32)
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size]) for name, size in (("x", 64), ("z", 40))]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["z"])], "g", ports[:1], ports[1:], [numpy_helper.from_array(weight, "w")]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), folder / "m.onnx")
    shapes = [{"x": (rows, 64)} for rows in (4, 32)]
    return flashmem.compile(folder / "m.onnx", folder / "m.flashmem", shapes=shapes, build=False)


def rows(count: int) -> dict[str, Array]:
    return {"x": np.random.default_rng(count).standard_normal((count, 64)).astype(np.float32)}


def right(answer: list[Array], model: MiniModel) -> bool:
    return bool(np.allclose(answer[0], model.reference(model.inputs())[0], rtol=0, atol=2e-5))


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("flashmem")]


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_the_same_bits(mode: str, model: MiniModel) -> None:
    answers = []
    for through in THROUGH:
        with opened(through, model.path, mode) as each:
            answers += [each.run(None, model.inputs()) for _ in range(3)]
    assert right(answers[0], model)
    for answer in answers[1:]:
        assert all(np.array_equal(one, other) for one, other in zip(answer, answers[0], strict=True))


# Failures


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("where", ["a layer", "a load", "the status"])
@pytest.mark.parametrize("mode", ["map", "dma"])
def test_a_run_that_fails_closes_its_model_and_holds_nothing(
    mode: str, where: str, through: str, model: MiniModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = failing(RunError("the device is lost"))
    with opened(through, model.path, mode) as each:
        if where != "a load":  # else the next run may find all its weights
            assert right(each.run(None, model.inputs()), model)
        with monkeypatch.context() as patch:
            if where == "a layer":
                patch.setattr(Executor, "run", fail)
            elif where == "the status":
                patch.setattr(Activations, "check_status", fail)
            else:
                patch.setattr(WeightFile, "populate", fail)
                patch.setattr(WeightFile, "read_into", fail)
            with pytest.raises(RunError, match="the device is lost"):
                each.run(None, model.inputs())
        assert each.held == 0 and each.engines[0].bound is None
        assert each.engines[0].failure == "its last run failed: the device is lost"
        with pytest.raises(RunError, match=r"is closed \(its last run failed: the device is lost\); open"):
            each.run(None, model.inputs())
    assert threads() == []


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("when", ["write_inputs", "check_status"])
def test_a_request_that_cannot_be_answered_leaves_its_model_open(
    when: str, through: str, model: MiniModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the failure decides, not the kind of error."""
    with opened(through, model.path) as each:
        for error in (MemoryError("no room to convert an input"), TypeError("not an index"), ValueError("outside the table")):
            with monkeypatch.context() as patch:
                patch.setattr(Activations, when, failing(error))
                with pytest.raises(type(error), match=str(error)):
                    each.run(None, model.inputs())
            assert each.engines[0].failure is None
        assert right(each.run(None, model.inputs()), model)
        monkeypatch.setattr(Executor, "run", failing(ValueError("inside a layer")))
        with pytest.raises(ValueError, match="inside a layer"):
            each.run(None, model.inputs())
        assert each.engines[0].failure == "its last run failed: inside a layer" and each.held == 0


@pytest.mark.parametrize("through", THROUGH)
def test_an_interrupt_closes_the_model_whenever_it_comes(
    through: str, model: MiniModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for when in ("write_inputs", "check_status"):
        with opened(through, model.path) as each, monkeypatch.context() as patch:
            patch.setattr(Activations, when, failing(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                each.run(None, model.inputs())
            assert each.engines[0].failure == "its last run was interrupted" and each.held == 0


# Closing


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("mode", MODES)
def test_closing_gives_everything_back(mode: str, through: str, model: MiniModel) -> None:
    with opened(through, model.path, mode) as each:
        each.run(None, model.inputs())
        assert each.held > 0
        each.close()
        each.close()
        assert each.held == 0 and each.engines[0].failure == "close was called"
        with pytest.raises(RunError, match=r"is closed \(close was called\)"):
            each.run(None, model.inputs())
    assert threads() == []


# Budgets


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("mode", MODES)
def test_every_budget_is_kept_or_refused(mode: str, through: str, model: MiniModel) -> None:
    bundle = model.open()
    least = fixed_bytes(bundle.program) + bundle.plan.layouts[mode].total_bytes
    for budget in (2 * least, least):
        with opened(through, bundle, mode, budget) as each:
            for _ in range(2):
                assert right(each.run(None, model.inputs()), model)
            assert each.engines[0].device.budget.peak <= budget
    with pytest.raises(BudgetError), opened(through, bundle, mode, fixed_bytes(bundle.program)):
        pass
    assert threads() == []


@pytest.mark.parametrize("mode", MODES)
def test_a_budget_that_changes_gives_the_answers_of_one_that_does_not(mode: Any, model: MiniModel) -> None:
    bundle = model.open()
    least = fixed_bytes(bundle.program) + bundle.plan.layouts[mode].total_bytes
    with Session(bundle, mode=mode, budget=least) as session:
        wanted = session.run(None, model.inputs())
    with Runtime(device="auto") as runtime:
        loaded = runtime.open(bundle, mode=mode)
        for budget in (None, least, 2 * least, least):
            runtime.set_budget(budget).result(30)
            assert budget is None or runtime.held <= budget
            assert all(np.array_equal(one, other) for one, other in zip(loaded.run(None, model.inputs()), wanted, strict=True))
            assert budget is None or runtime.held <= budget


# Changes of the shape variant


@pytest.mark.parametrize("through", THROUGH)
def test_a_request_runs_the_variant_that_takes_its_shapes(through: str, variants: Bundle) -> None:
    weight = onnx.numpy_helper.to_array(onnx.load(variants.path.parent / "m.onnx").graph.initializer[0])
    with opened(through, variants) as each:
        for count in (4, 32, 32, 4, 32):
            inputs = rows(count)
            (answer,) = each.run(None, dict(inputs))
            np.testing.assert_allclose(answer, inputs["x"] @ weight, rtol=0, atol=1e-4)
        with pytest.raises(ValueError, match="the inputs are x=7x64; the bundle was compiled for: x=4x64; x=32x64"):
            each.run(None, rows(7))
        assert all(engine.failure is None for engine in each.engines)


@pytest.mark.parametrize("through", THROUGH)
def test_a_variant_that_fails_closes_all_of_them(through: str, variants: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(through, variants) as each:
        each.run(None, rows(4))
        with monkeypatch.context() as patch:
            patch.setattr(Executor, "run", failing(RunError("the device is lost")))
            with pytest.raises(RunError, match="the device is lost"):
                each.run(None, rows(32))
        assert each.held == 0
        for count in (4, 32):
            with pytest.raises(RunError, match=r"is closed \(its last run failed: the device is lost\)"):
                each.run(None, rows(count))


def test_a_session_whose_variant_cannot_be_bound_is_closed(variants: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened("session", variants) as each:
        each.run(None, rows(4))
        with monkeypatch.context() as patch:
            patch.setattr(Activations, "__init__", failing(RunError("no memory")))
            with pytest.raises(RunError, match="no memory"):
                each.run(None, rows(32))
        assert each.held == 0 and each.engines[0].failure == "its last run failed: no memory"


# Modules that one run uses


def entered(act: Callable[[], object], recorded: list[str | None]) -> set[str]:
    """The modules of flashmem whose functions `act` calls, in any thread."""
    recorded.clear()
    act()
    time.sleep(0.2)  # wait for the threads of a run
    return {name for name in recorded if name is not None and name.startswith("flashmem.")}


MOST_MODULES = {("map", "session"): 26, ("map", "runtime"): 29, ("dma", "session"): 29, ("dma", "runtime"): 36}
"""By transfer mode: the modules of flashmem that one run uses after its model has run twice, if its loads begin within it."""


@pytest.mark.parametrize("mode", ["map", "dma"])
def test_a_run_enters_few_modules(mode: Any, model: MiniModel) -> None:
    recorded: list[str | None] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            recorded.append(frame.f_globals.get("__name__"))

    before, inputs, found = sys.getprofile(), model.inputs(), dict[tuple[str, str], set[str]]()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        with Session(model.path, mode=mode) as session:
            for _ in range(3):
                found[mode, "session"] = entered(lambda: session.run(None, inputs), recorded)
        with Runtime() as runtime:
            opened = runtime.open(model.path, mode=mode)
            for _ in range(3):
                found[mode, "runtime"] = entered(lambda: runtime.submit(opened, inputs).result(30), recorded)
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]
    for which, modules in found.items():
        assert "flashmem.runtime.engine.engine" in modules and "flashmem.runtime.engine.executor" in modules
        assert len(modules) <= MOST_MODULES[which], sorted(modules)
