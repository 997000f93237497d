"""A session's budget that changes, and loads that begin before the first run."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

import flashmem
from flashmem import Bundle, Session
from flashmem.base.errors import BudgetError, RunError, UserError
from flashmem.base.units import parse_size
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.streaming.loader import LoaderRun
from tests.support.mini_bundle import write_mini_bundle
from tests.support.state_models import recurrence

Array = NDArray[Any]
PLACES = [(device, mode) for device in range(len(list_devices())) for mode in ("map", "alias", "dma", "interleave")]
LAYERS, WIDTH = 8, 128
WEIGHTS = LAYERS * WIDTH * WIDTH * 4


def products(rows: int | str = 4) -> onnx.ModelProto:
    """Eight products, one after the other: 512 KiB of weights."""
    rng = np.random.default_rng(1)
    weights = [rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 11 for _ in range(LAYERS)]
    nodes, values = [], ["x"]
    for number in range(LAYERS):
        nodes.append(onnx.helper.make_node("MatMul", [values[-1], f"w{number}"], [f"p{number}"]))
        nodes.append(onnx.helper.make_node("Tanh", [f"p{number}"], [f"y{number}"]))
        values.append(f"y{number}")
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [rows, WIDTH]) for name in ("x", values[-1]))
    constants = [onnx.numpy_helper.from_array(weight, f"w{number}") for number, weight in enumerate(weights)]
    graph = onnx.helper.make_graph(nodes, "g", [x], [y], constants)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)


def feeds(rows: int = 4) -> dict[str, Array]:
    return {"x": np.random.default_rng(rows).standard_normal((rows, WIDTH)).astype(np.float32)}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return flashmem.compile(products(), tmp_path_factory.mktemp("b") / "m.flashmem", budget="600KB", chunk="16KB", build=False)


@pytest.mark.parametrize(("device", "mode"), PLACES)
def test_the_budget_moves_between_runs(device: int, mode: Any, bundle: Bundle) -> None:
    with Session(bundle, device=str(device), mode=mode) as session:
        [wanted], first = session.run(None, feeds()), session._plans.ready.plan
        for budget in ("1.5MB", "450KB", "600KB", None, "400KB"):
            session.set_budget(budget)
            limit = None if budget is None else parse_size(budget, what="budget")
            assert session.budget == limit == session._engine.device.budget.limit
            assert f"budget {budget}" in repr(session) or budget is None
            for _ in range(3):
                np.testing.assert_allclose(session.run(None, feeds())[0], wanted, rtol=1e-5, atol=1e-6)
                assert session.last_run is not None
                memory = session.last_run.memory
                assert memory.budget_bytes == limit and (limit is None or memory.peak_bytes <= limit)
            assert (session._plans.ready.plan is first) == (budget == "600KB")
            if budget in ("1.5MB", None):
                session.prepared()
                assert session.last_run.memory.by_category["weights"] >= WEIGHTS, "the room is not used"
                assert not session.last_run.loads


def test_a_budget_that_is_too_small_changes_nothing(bundle: Bundle) -> None:
    with Session(bundle) as session:
        [wanted] = session.run(None, feeds())
        plan = session._plans.ready.plan
        with pytest.raises(BudgetError) as refused:
            session.set_budget("20KB")
        with pytest.raises(UserError, match="budget 'much' is not a size"):
            session.set_budget("much")
        assert session.budget == 600_000 and session._plans.ready.plan is plan
        np.testing.assert_array_equal(session.run(None, feeds())[0], wanted)
        session.set_budget(refused.value.smallest_bytes)
        np.testing.assert_allclose(session.run(None, feeds())[0], wanted, rtol=1e-5, atol=1e-6)
        session.close()
        with pytest.raises(RunError, match="the session is closed"):
            session.set_budget("1MB")


def test_a_preloaded_session_only_checks_its_budget(bundle: Bundle) -> None:
    with Session(bundle, strategy="preload") as session:
        [wanted] = session.run(None, feeds())
        with pytest.raises(BudgetError, match="budget 400KB is too small: the bundle needs"):
            session.set_budget("400KB")
        session.set_budget("2MB")
        np.testing.assert_array_equal(session.run(None, feeds())[0], wanted)
        assert session.budget == 2_000_000 and not session.last_run.loads  # type: ignore[union-attr]


def test_a_bundle_without_launch_times_keeps_its_plan(tmp_path: Path) -> None:
    model = write_mini_bundle(tmp_path / "m.flashmem")
    with Session(model.path) as session:
        first = session.run(None, model.inputs())
        session.set_budget("1GB")
        assert all(np.array_equal(one, other) for one, other in zip(session.run(None, model.inputs()), first, strict=True))
        with pytest.raises(BudgetError, match="it has no launch times for planning again: compile the model again"):
            session.set_budget("1KB")


def test_shape_variants_move_together(tmp_path: Path) -> None:
    shapes = [{"x": (rows, WIDTH)} for rows in (2, 6)]
    bundle = flashmem.compile(products("n"), tmp_path / "m.flashmem", shapes=shapes, budget="500KB", chunk="16KB", build=False)
    with Session(bundle) as session:
        wanted = {rows: session.run(None, feeds(rows))[0] for rows in (2, 6)}
        for budget in ("1MB", "300KB"):
            session.set_budget(budget)
            for rows in (6, 2, 6):
                np.testing.assert_allclose(session.run(None, feeds(rows))[0], wanted[rows], rtol=1e-5, atol=1e-6)


def test_states_survive_a_change_of_budget() -> None:
    model = recurrence()
    bundle = flashmem.compile(model.proto, states=model.states, build=False)
    with Session(bundle) as one, Session(bundle) as other:
        for number in range(4):
            other.set_budget(f"{10 + number}MB")
            for mine, right in zip(other.run(None, model.inputs(number)), one.run(None, model.inputs(number)), strict=True):
                np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-6)


def test_outputs_on_the_device_count(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashmem.runtime.opencl.device.Device.uses_host_memory", False)
    with Session(bundle) as session:
        session.set_budget("1MB")
        binding = session.io_binding()
        binding.bind_cpu_input("x", feeds()["x"])
        binding.bind_output(f"y{LAYERS - 1}", "opencl")
        session.run_with_iobinding(binding)
        with pytest.raises(BudgetError) as smallest:
            session.set_budget("20KB")
        with pytest.raises(BudgetError, match=r"outputs on the device hold 2\d{3} bytes, which leaves too little of"):
            session.set_budget(smallest.value.smallest_bytes)
        binding.clear_binding_outputs()
        session.set_budget(smallest.value.smallest_bytes)


def test_a_prefetch_begins_the_loads_of_the_first_run(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[int]()
    real = LoaderRun.__init__

    def noted(self: LoaderRun, transfer: Any, loads: Any, *rest: Any, **named: Any) -> None:
        begun.append(len(loads))
        real(self, transfer, loads, *rest, **named)

    monkeypatch.setattr(LoaderRun, "__init__", noted)
    with Session(bundle, prepare=False) as session:
        assert not begun
        session.prefetch()
        session.prefetch()
        assert len(begun) == 1
        loader = session._engine.current.loader  # type: ignore[union-attr]
        assert loader is not None
        deadline = time.perf_counter() + 60
        while not any(loader.loaded.values()) and time.perf_counter() < deadline:
            time.sleep(0.001)
        assert any(loader.loaded.values())
        session.run(None, feeds())
        assert len(begun) == 1
        session.close()
        with pytest.raises(RunError, match="the session is closed"):
            session.prefetch()
    assert not any(thread.name.startswith("flashmem-loader") for thread in threading.enumerate())
