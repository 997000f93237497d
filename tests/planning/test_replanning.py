"""Planning again from a bundle for another budget: the same problem, within every budget, none below the smallest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import flashmem
from flashmem import Bundle
from flashmem.base.errors import BudgetError, BundleError
from flashmem.bundle.replacing import replace_plan
from flashmem.planning.carried_instance import KEY, carried_instance
from flashmem.planning.planner import planning_instance
from flashmem.planning.replanning import plan_again, smallest_budget
from flashmem.schedule.instance import Instance
from flashmem.schedule.residency import session_bytes
from flashmem.tools.learn import limits_of
from tests.support.paths import DATA

MODES = ("map", "alias", "dma", "interleave")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    path = tmp_path_factory.mktemp("again") / "m.flashmem"
    model = DATA / "gptneo-tiny.onnx"
    return flashmem.compile(model, path, device="generic-gpu", memory_path="buffer", build=False)


def instance_of(bundle: Bundle, mode: str) -> Instance:
    instance = carried_instance(bundle.program, bundle.plan, bundle.descriptor, mode, bundle.meta)  # type: ignore[arg-type]
    assert instance is not None
    return instance


def test_a_bundle_carries_the_instance_that_it_was_planned_for(bundle: Bundle) -> None:
    mode = bundle.meta["mode"]
    limits = limits_of(bundle).replace(chunk=bundle.plan.chunk_bytes)
    posed = planning_instance(bundle.program, bundle.descriptor, mode, limits)
    assert replace(instance_of(bundle, mode), notes=posed.notes) == posed


@pytest.mark.parametrize("mode", MODES)
def test_every_budget_from_the_smallest_on_is_kept(bundle: Bundle, mode: str) -> None:
    instance = instance_of(bundle, mode)
    smallest = smallest_budget(bundle.program, instance, mode, ())  # type: ignore[arg-type]
    for part in (1.0, 1.05, 1.3, 2.0, 5.0):
        for keep in (False, True):
            plan = plan_again(bundle.program, instance, mode, int(smallest * part), (), keep=keep)  # type: ignore[arg-type]
            needed = session_bytes(bundle.program, plan.layouts[mode], shares_memory=instance.shares_memory)
            assert needed <= int(smallest * part)
    with pytest.raises(BudgetError) as refused:
        plan_again(bundle.program, instance, mode, smallest - 1, (), keep=False)  # type: ignore[arg-type]
    assert refused.value.smallest_bytes == smallest
    preload = (bundle.plan.weights[-1].name,)
    unlimited = plan_again(bundle.program, instance, mode, None, preload, keep=False)  # type: ignore[arg-type]
    assert {w.name for w in unlimited.weights if w.preload} >= set(preload)


def test_what_runs_measured_takes_the_place_of_what_was_predicted(bundle: Bundle, tmp_path: Path) -> None:
    mode = bundle.meta["mode"]
    seconds = [0.5 + layer for layer in range(len(bundle.program.launches))]
    meta = {**bundle.meta, "learned": {"mode": mode, "runs": 1, "seconds": seconds, "load_bandwidth": 1e9}}
    learned = replace_plan(bundle, bundle.plan, meta, tmp_path / "learned.flashmem")
    assert [layer.seconds for layer in instance_of(learned, mode).layers] == seconds


def test_times_that_are_damaged_are_one_sentence_and_none_are_none(bundle: Bundle) -> None:
    mode = bundle.meta["mode"]
    for times in ({"times": []}, {"times": [[1.0, []]], "of": [0]}, 7, {"times": [["x", []]], "of": [0]}):
        with pytest.raises(BundleError, match="times of layers are damaged"):
            carried_instance(bundle.program, bundle.plan, bundle.descriptor, mode, {KEY: times})
    assert carried_instance(bundle.program, bundle.plan, bundle.descriptor, mode, {}) is None
