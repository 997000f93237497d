"""The smallest budget of a model, with and without the techniques that reduce activations."""

from __future__ import annotations

from dataclasses import dataclass

from flashmem.compiler.adaptive.plan_graph import refusal
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.options import Options
from flashmem.compiler.stages.pipeline import GroupedGraph


@dataclass(frozen=True)
class SmallestBudget:
    """Smallest budgets in bytes, with and without techniques that reduce activations.

    `nbytes` is the smallest with all of them, `without_patches` without patch-based tiling (chains of operators in patches).
    `in_model_order` is also without reordering: launches are in the order of the model's file.
    """

    nbytes: int
    without_patches: int
    in_model_order: int


def smallest_budget(graph: Graph, options: Options) -> SmallestBudget:
    """Plan `graph` (from `read_graph`) for a budget that is too small, and return the budgets in the refusal.

    Memory limits in `options` are ignored.
    """
    grouped = GroupedGraph.of(graph, options)
    refused = refusal(grouped, options)
    before = refusal(grouped.as_given(), options, patches=False)
    return SmallestBudget(refused.smallest_bytes, refused.without_patches, before.without_patches)
