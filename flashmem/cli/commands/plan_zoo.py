"""`zoo:NAME` for `flashmem plan` and `simulate`: a checked plan for the graph of a known architecture, without files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from flashmem.base.errors import UserError
from flashmem.base.extras import offline_half
from flashmem.base.garbage import collecting_seldom
from flashmem.base.types import TransferMode
from flashmem.program.program import Program
from flashmem.request.request import BundleRequest
from flashmem.schedule.plan import OverlapPlan
from flashmem.target.descriptor import DeviceDescriptor


@dataclass
class ZooPlan:
    """The plan of a known architecture for transfer `mode`, without layouts.

    `seconds` has the time of each step, and in "total" the time from the graph to the checked plan.
    """

    name: str
    descriptor: DeviceDescriptor
    mode: TransferMode
    program: Program
    plan: OverlapPlan
    budget_bytes: int | None
    seconds: dict[str, float] = field(default_factory=dict)


def plan_architecture(name: str, options: BundleRequest) -> ZooPlan:
    """Plan the architecture `name`. The planner checks the plan before it returns it.

    Raises:
        UserError: no such architecture, or options that do not apply to it.
    """
    if any(options.shapes):
        raise UserError("--shape does not go with zoo: models, whose shapes are fixed; leave it out")
    unfusion = options.given.get("unfusion", False)
    if not unfusion and not options.given.keys().isdisjoint(("mu", "alpha")):
        raise UserError("zoo: models are planned without unfusion; give --unfusion too, or leave --mu and --alpha out")
    with offline_half("planning"):
        from flashmem.compiler.adaptive.plan_graph import plan_graph
        from flashmem.compiler.passes.pipeline import prepare
        from flashmem.options import resolve
        from flashmem.planning.planner import searched
        from flashmem.tools.zoo.graphs import zoo_graph

    graph = zoo_graph(name)
    resolved = resolve(options.replace(unfusion=unfusion))

    seconds = dict.fromkeys(("fuse", "generate", "plan_and_check", "total"), 0.0)

    @contextmanager
    def timed(step: str) -> Iterator[None]:
        begun = time.monotonic()
        yield
        seconds[step] = seconds.get(step, 0.0) + time.monotonic() - begun  # "patches" only for a budget that needs them

    with collecting_seldom(), timed("total"):
        with timed("fuse"):
            graph = prepare(graph)
        generated, plan = plan_graph(graph, resolved, timed)
    with timed("search"):
        plan = searched(generated.program, plan, resolved.descriptor, resolved.request)
    budget = resolved.request.budget
    return ZooPlan(name, resolved.descriptor, resolved.mode, generated.program, plan, budget, seconds)
