"""Sizes of slices on a device with memory of its own: chosen for later runs, with a first answer near the earliest."""

from __future__ import annotations

from dataclasses import replace

from flashmem.compiler.adaptive.plan_graph import plan_graph
from flashmem.compiler.passes.pipeline import prepare
from flashmem.compiler.stages.pipeline import GroupedGraph, Pipeline
from flashmem.compiler.stages.planned import with_layouts
from flashmem.compiler.weights.slicing import LEAST_BYTES, Slicing
from flashmem.options import resolve
from flashmem.planning.latency.later_runs import OWN_WORTH
from flashmem.program.program import fixed_bytes
from flashmem.request.request import BundleRequest
from flashmem.schedule.residency import session_bytes
from flashmem.tools.zoo.graphs import TiedDecoder


def test_a_large_head_is_cut_so_that_the_rest_of_a_budget_stays_on_the_device() -> None:
    """The head is over half of the weights, and with the others' places in flight more than the budget as one slice."""
    graph = prepare(TiedDecoder(2, 384, 6, 20000, joined=True).graph("decoder", 16))
    options = resolve(BundleRequest(budget="28MB", device="nvidia", mode="dma", memory_path="buffer"))
    budget = 28_000_000
    pipeline = Pipeline.of(GroupedGraph.of(graph, options), options)
    coarse = replace(pipeline, slicing=Slicing(most=12 << 20)).attempt()
    finest = replace(pipeline, slicing=Slicing(most=LEAST_BYTES)).attempt()

    made, plan = plan_graph(graph, options)
    head = [part for part in made.program.slices if part.weight == "embedding"]
    assert len(head) > 1
    assert plan.objective <= (1 + OWN_WORTH) * min(coarse.plan.objective, finest.plan.objective)

    layout = with_layouts(made.program, plan, ["dma"]).layouts["dma"]
    stays = sum(w.nbytes for w in plan.weights if w.preload or w.keep)
    in_flight = layout.home_bytes - stays
    assert session_bytes(made.program, layout, shares_memory=False) <= budget
    assert stays >= 0.9 * (budget - fixed_bytes(made.program, shares_memory=False) - in_flight)
    assert in_flight < sum(part.nbytes for part in head) / 2


def test_kernels_that_copy_keep_weights_too() -> None:
    """In `interleave` weights that stay are in W, and need no staging: the first answer may still be only a little later."""
    graph = prepare(TiedDecoder(6, 512, 8, 10000, joined=True).graph("decoder", 16))
    options = resolve(BundleRequest(budget="64MB", device="nvidia", mode="interleave", memory_path="buffer"))
    pipeline = Pipeline.of(GroupedGraph.of(graph, options), options)
    soonest = min(replace(pipeline, slicing=Slicing(most=most)).attempt().plan.objective for most in (16 << 20, 4 << 20))
    made, plan = plan_graph(graph, options)
    layout = with_layouts(made.program, plan, ["interleave"]).layouts["interleave"]
    assert session_bytes(made.program, layout, shares_memory=False) <= 64_000_000
    assert plan.objective <= (1 + OWN_WORTH) * soonest
    total = sum(w.nbytes for w in plan.weights)
    assert 0.2 * total < sum(w.nbytes for w in plan.weights if w.preload or w.keep) < total
