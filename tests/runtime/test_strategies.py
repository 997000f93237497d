"""Every strategy on every device, memory path and transfer mode: the same bits, inside the budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

import flashmem
from flashmem.base.errors import BudgetError, UserError
from flashmem.base.types import TransferMode
from flashmem.bundle.replacing import replace_plan
from flashmem.compiler.adaptive.plan_graph import plan_program
from flashmem.compiler.options import Options
from flashmem.planning import planner, portfolio
from flashmem.planning.objectives import paper
from flashmem.planning.why import reasons
from flashmem.request.limits import Limits
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.schedule.plan import OverlapPlan, PlanViolation, Strategy
from tests.support.paths import DATA

MODELS = ["gptneo-tiny", "resnet-tiny"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
PLACES = [(device, path) for device in list_devices() for path in descriptor_for(device).memory_paths]
IDS = [f"{device.descriptor_name}-{path}" for device, path in PLACES]


def _inputs(model: Path) -> dict[str, NDArray[Any]]:
    generator = np.random.default_rng(3)
    return {
        port.name: generator.integers(0, 100, port.shape)
        if "int" in port.type
        else generator.standard_normal(port.shape).astype(np.float32)
        for port in onnxruntime.InferenceSession(model).get_inputs()
    }


def _smallest(make: Callable[..., object], *arguments: Any, **options: Any) -> int:
    with pytest.raises(BudgetError) as refused:
        make(*arguments, budget=1, **options)
    return refused.value.smallest_bytes


def _planned(whole: flashmem.Bundle, *, mode: TransferMode, budget: int, strategy: Strategy) -> flashmem.Bundle:
    """The bundle `whole` with the plan of `strategy`, as `flashmem.compile` makes it for the same program."""
    limits = Limits(budget=budget, chunk=4096, strategy=strategy)
    plan = plan_program(whole.program, Options(whole.descriptor, mode, limits))
    return replace_plan(whole, plan, {**whole.meta, "mode": mode, "budget_bytes": budget}, whole.path.with_name("m.flashmem"))


@pytest.mark.parametrize(
    ("name", "device", "path"),
    [(MODELS[nth % len(MODELS)], *place) for nth, place in enumerate(PLACES)],
    ids=[f"{MODELS[nth % len(MODELS)]}-{name}" for nth, name in enumerate(IDS)],
)
def test_all_strategies_give_the_same_bits_inside_one_budget(name: str, device: Any, path: str, tmp_path: Path) -> None:
    model = DATA / f"{name}.onnx"
    inputs = _inputs(model)
    first: list[NDArray[Any]] | None = None
    common: dict[str, Any] = {"device": device.descriptor_name, "memory_path": path, "chunk": "4KiB"}
    whole = flashmem.compile(model, tmp_path / "whole.flashmem", unfusion=False, **common)
    # In `interleave` the plan determines which kernels copy chunks, so each strategy builds its own program: here one of them
    # besides flashmem's own, a different one for each place and model.
    another = STRATEGIES[1 + (2 * PLACES.index((device, path)) + MODELS.index(name)) % (len(STRATEGIES) - 1)]
    for mode in descriptor_for(device).modes[path]:
        smallest = [_smallest(_planned, whole, mode=mode, strategy=strategy) for strategy in STRATEGIES]
        budget = int(1.2 * max(smallest))
        for strategy in STRATEGIES if mode != "interleave" else ("stream", another):
            if strategy == "stream":  # whose fusion groups may be split
                bundle = flashmem.compile(model, tmp_path / "m.flashmem", budget=budget, mode=mode, **common)
            else:
                bundle = _planned(whole, mode=mode, budget=budget, strategy=strategy)
            assert bundle.plan.strategy == strategy
            with flashmem.Session(bundle, device=device.descriptor_name, mode=mode) as session:
                assert session.strategy == strategy
                for _ in range(3):
                    outputs = session.run(None, inputs)
                    first = first or outputs
                    assert session.last_run is not None and session.last_run.memory.peak_bytes <= budget
                    assert all(np.array_equal(a, b) for a, b in zip(outputs, first, strict=True)), (mode, strategy)
    assert first is not None
    expected = onnxruntime.InferenceSession(model).run(None, inputs)
    assert max(float(np.abs(a - b).max() / np.ptp(b)) for a, b in zip(first, expected, strict=True)) <= 1e-3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_smallest_budget_of_a_strategy_is_exact(strategy: Strategy, tmp_path: Path) -> None:
    model = DATA / "gptneo-tiny.onnx"
    smallest = _smallest(flashmem.compile, model, strategy=strategy, chunk="4KiB")
    with pytest.raises(BudgetError):
        flashmem.compile(model, tmp_path / "m.flashmem", budget=smallest - 1, strategy=strategy, chunk="4KiB")
    bundle = flashmem.compile(model, tmp_path / "m.flashmem", budget=smallest, strategy=strategy, chunk="4KiB")
    with flashmem.Session(bundle) as session:
        session.run(None, _inputs(model))
        assert session.last_run is not None and session.last_run.memory.peak_bytes <= smallest


def test_nothing_is_loaded_on_demand_before_its_layer_is_next(tmp_path: Path) -> None:
    bundle = flashmem.compile(DATA / "resnet-tiny.onnx", tmp_path / "m.flashmem", strategy="on-demand")
    first = bundle.program.uses()
    firsts: dict[str, int] = {}
    for part in bundle.program.slices:
        firsts[part.weight] = min(first[part.name][0], firsts.get(part.weight, 1 << 30))
    of_weight = {part.name: part.weight for part in bundle.program.slices}
    assert all(w.read_layer == firsts[of_weight[w.name]] for w in bundle.plan.weights)
    assert not any(w.preload for w in bundle.plan.weights)


def test_a_bundle_plays_its_own_strategy_or_preloads(tmp_path: Path) -> None:
    model = DATA / "resnet-tiny.onnx"
    bundle = flashmem.compile(model, tmp_path / "m.flashmem", strategy="always-next")
    for accepted in ("auto", "always-next", "preload"):
        flashmem.Session(bundle, strategy=accepted).close()  # type: ignore[arg-type]
    for refused in ("stream", "same-op"):
        with pytest.raises(UserError, match="always-next and preload"):
            flashmem.Session(bundle, strategy=refused)  # type: ignore[arg-type]


def test_strategies_that_cannot_be_compiled(tmp_path: Path) -> None:
    model = DATA / "resnet-tiny.onnx"
    with pytest.raises(UserError, match="fills a budget"):
        flashmem.compile(model, tmp_path / "m.flashmem", strategy="resident-first")
    with pytest.raises(UserError, match="unknown; name one of: stream"):
        flashmem.compile(model, tmp_path / "m.flashmem", strategy="hope")  # type: ignore[arg-type]
    assert not (tmp_path / "m.flashmem").exists()


@pytest.mark.parametrize(
    ("module", "planned_by", "options"),
    [
        (portfolio, "fastest_plan", {}),
        (portfolio, "fastest_within", {"m_peak": "300KB"}),
        (planner, "strategy_plan", {"strategy": "always-next"}),
        (paper, "solve", {"m_peak": "300KB", "objective": "paper"}),
        (paper, "paper_plan_within", {"budget": "300KB", "objective": "paper"}),
    ],
)
def test_no_plan_leaves_the_planner_unchecked(
    module: Any, planned_by: str, options: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """For every way to make a plan: one that moves a weight after its use is rejected."""
    make = getattr(module, planned_by)

    def broken(*given: Any, **named: Any) -> OverlapPlan:
        plan: OverlapPlan = make(*given, **named)
        at = next(i for i, w in enumerate(plan.weights) if not w.preload)
        late = replace(plan.weights[at], moves=((plan.weights[at].first_use, plan.weights[at].chunks),))
        return replace(plan, weights=(*plan.weights[:at], late, *plan.weights[at + 1 :]))

    monkeypatch.setattr(module, planned_by, broken)
    with pytest.raises(PlanViolation, match="C0"):
        flashmem.compile(DATA / "gptneo-tiny.onnx", tmp_path / "m.flashmem", chunk="4KiB", **options)


def test_a_filled_budget_says_so_of_each_weight(tmp_path: Path) -> None:
    bundle = flashmem.compile(
        DATA / "gptneo-tiny.onnx", tmp_path / "m.flashmem", budget="400KB", chunk="4KiB", strategy="resident-first"
    )
    kinds = {reason.kind for reason in reasons(bundle.plan)}
    assert kinds <= {"first-layer", "resident-first"} and "resident-first" in kinds
    assert bundle.plan.bound_scope == "resident-set" or bundle.plan.status == "optimal"
