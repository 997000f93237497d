"""Models that `benchmarks.exports` wrote, and their bundles, for several benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import flashmem
from flashmem.base.errors import BudgetError
from flashmem.bundle.replacing import replace_plan
from flashmem.compiler.adaptive.plan_graph import plan_program
from flashmem.compiler.options import Options
from flashmem.request.limits import Limits
from flashmem.request.request import BundleRequest
from flashmem.runtime.request.options import choose_mode
from flashmem.tools.learn import limits_of

MODELS = ("resnet50", "vit-b16", "gptneo-125m", "gptneo-1.3b")


def within(budget: int, bundle: Callable[..., flashmem.Bundle]) -> flashmem.Bundle:
    """`bundle(budget=...)` within the budget, or within the smallest budget that works."""
    try:
        return bundle(budget=budget)
    except BudgetError as error:
        return bundle(budget=error.smallest_bytes)


def planned_again(bundle: flashmem.Bundle, output: Path, *, mode: str | None = None, **limits: Any) -> flashmem.Bundle:
    """The program of `bundle` under other `limits` (fields of `Limits`), in a bundle that shares its file of weights.

    Raises:
        BudgetError: the budget is too small; it names the smallest that works.
    """
    changed = limits_of(bundle).replace(**limits).given_as(BundleRequest)
    options = Options(bundle.descriptor, choose_mode(bundle.descriptor, mode or bundle.meta["mode"]), changed)
    meta = {"limits": changed.values(Limits), "budget_bytes": changed.budget, "mode": options.mode}
    return replace_plan(bundle, plan_program(bundle.program, options), {**bundle.meta, **meta}, output)
