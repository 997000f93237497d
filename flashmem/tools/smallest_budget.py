"""The smallest budget of a model: what `compile` names where a budget is too small, and what it would be without its means."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashmem.base.errors import BudgetError
from flashmem.compile import plan_graph
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.options import Options


@dataclass(frozen=True)
class SmallestBudget:
    """Budgets in bytes. `nbytes` works, with all that makes activations smaller; `without_patches` is the smallest without
    chains of operators in patches, `in_model_order` without these and with launches in the order of the model's file.
    """

    nbytes: int
    without_patches: int
    in_model_order: int


def smallest_budget(graph: Graph, options: Options) -> SmallestBudget:
    """What planning `graph` (as `compile.read_graph` gives it) names when it is asked for nothing.

    Limits on memory among `options` do not count.
    """
    asked = replace(options, limits=replace(options.limits, budget=1, m_peak=None))
    refused = _refused(graph, asked, lowest_order=True)
    before = _refused(graph, asked, lowest_order=False)
    return SmallestBudget(refused.smallest_bytes, refused.without_patches, before.without_patches)


def _refused(graph: Graph, options: Options, *, lowest_order: bool) -> BudgetError:
    try:
        plan_graph(graph, options, lowest_order=lowest_order, patches=lowest_order)
    except BudgetError as refused:
        return refused
    raise AssertionError("a session holds more than a byte")
