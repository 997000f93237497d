"""Adaptive unfusion: splits fusion groups if the plan lacks load capacity (FlashMem section 4.3).

The plan shows which weights found no capacity. Fusion groups are ranked by their penalty (`planning.penalty`). Groups whose
parts stream more than the whole, C_v1 + C_v2 >= (1 + alpha) C_v, are split, worst first, and the program is generated and
planned again. A split stays only if the objective improves. Hierarchical groups are never split.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from flashmem.base.errors import BudgetError
from flashmem.base.types import TransferMode
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.stages.pipeline import Cuts, Pipeline
from flashmem.compiler.stages.planned import Attempt
from flashmem.planning.objectives.registry import objective_of
from flashmem.planning.penalty import Penalties
from flashmem.program.program import Program
from flashmem.request.limits import Limits
from flashmem.schedule.instance import Instance
from flashmem.schedule.modes import MODES

BATCH = 8
"""Groups split in the first round; twice as many after an improvement, half as many after none."""

SECONDS = 12.0
"""Time in seconds after which no further split is tried."""

WORTH = 0.01
"""The share of an objective in seconds that a round of splits has to gain: each split costs a launch and a pass over memory."""

_ROUNDING = 1e-6

LAUNCHES = 12_000
"""The most launches of programs that are generated to try splits. A try makes two programs, the second for its parts' capacity.
"""


@dataclass(frozen=True)
class Split:
    """A fusion group that may be cut before `node`. `launch`: its first (1-based); `gain`: chunks that its parts add."""

    name: str
    node: Node
    launch: int
    gain: int


def refine(pipeline: Pipeline, first: Attempt, limits: Limits, mode: TransferMode) -> Attempt:
    """The attempt with the splits that improved the plan; its notes name them.

    `first`: the attempt of `pipeline` without splits. Every objective counts the cost of moves to a launch, in every transfer
    mode.
    """

    cuts: Cuts = frozenset()
    best = first
    if not may_refine(limits, mode):
        return best
    deadline = time.monotonic() + SECONDS
    done: list[Split] = []
    tried_groups = 0
    one_try = 2 * len(first.generated.program.launches)
    ranked = []
    batch = BATCH
    generated = one_try
    if generated <= LAUNCHES:
        ranked = _ranked(best, cuts, pipeline, limits)
    while ranked and batch and generated <= LAUNCHES and time.monotonic() < deadline:
        chosen = ranked[:batch]
        try:
            tried: Attempt | None = pipeline.attempt(cuts | {split.node for split in chosen})
        except BudgetError:  # the parts need more activations than the whole, and exceed the budget
            tried = None
        # Under a budget, latency may have replaced the paper's objective; chunks and seconds cannot be compared.
        same_kind = tried is not None and tried.plan.objective_kind == best.plan.objective_kind
        worth = WORTH if best.plan.kind.in_seconds else _ROUNDING
        if tried is not None and same_kind and tried.plan.objective < best.plan.objective * (1 - worth):
            best, cuts = tried, cuts | {split.node for split in chosen}
            done += chosen
            ranked = _ranked(best, cuts, pipeline, limits)
            batch = 2 * batch
        else:
            batch = min(batch, len(ranked)) // 2
        tried_groups += len(chosen)
        generated += one_try
    told = tried_groups or MODES[mode].by_kernels
    return _noted(first, best, done, tried_groups) if told else best


def _noted(first: Attempt, best: Attempt, done: Sequence[Split], tried: int) -> Attempt:
    """`best` with the ledger of splits since `first`: how many were `tried`, which were `done`, and what they gained."""
    if not done:
        return replace(
            best, plan=replace(best.plan, notes=(*best.plan.notes, f"adaptive unfusion tried {tried} splits, took none"))
        )
    names = ", ".join(f"{split.name} before {split.node.op} (+{split.gain} chunks)" for split in done[:_NAMED])
    more = f" and {len(done) - _NAMED} more" if len(done) > _NAMED else ""
    gain = 1 - best.plan.objective / first.plan.objective
    better = f"objective {first.plan.objective:.6g} to {best.plan.objective:.6g} ({gain:.2%})"
    note = f"adaptive unfusion tried {tried} splits, took {len(done)}, {better}: {names}{more}"
    return replace(best, plan=replace(best.plan, notes=(*best.plan.notes, note)))


def may_refine(limits: Limits, mode: TransferMode) -> bool:
    """Whether `refine` can split anything under these limits, for any plan.

    Without a limit on memory, only kernels that move weights, and objectives that C_l limits, need capacity.
    """
    limited = limits.budget is not None or limits.m_peak is not None
    matters = limited or objective_of(limits.resolved_objective).needs_capacity or MODES[mode].by_kernels
    return limits.unfusion and limits.strategy == "stream" and matters


def _ranked(best: Attempt, cuts: Cuts, pipeline: Pipeline, limits: Limits) -> list[Split]:
    """The splits worth trying in addition to `cuts`, highest penalty first; none if nothing lacks capacity."""
    penalties = Penalties(best.instance, best.plan, frozenset(best.plan.asked), limits.resolved_lambda, limits.mu)
    if not penalties.shortage and not (limits.mu and objective_of(best.plan.objective_kind).needs_capacity):
        return []
    found = splits(best, cuts, pipeline, limits.alpha)
    scored = [(penalties.of(split.launch, split.gain), split) for split in found]
    return [split for score, split in sorted(scored, key=lambda pair: (-pair[0], pair[1].launch)) if score > 0]


def splits(best: Attempt, cuts: Cuts, pipeline: Pipeline, alpha: float) -> list[Split]:
    """The fusion groups of a program (made with `cuts`) that can be split, and the growth of their capacity.

    Capacities of the parts are those of a program in which all of them are split at once.
    """
    fused = best.generated.placed.fused
    consumers = fused.graph.consumers()
    outputs = {port.value for port in fused.graph.outputs}
    candidates = {cut: group for group in fused.groups if (cut := cut_point(group, consumers, outputs)) is not None}
    if not candidates:
        return []
    program = best.generated.program
    apart = pipeline.generate(cuts.union(candidates)).program
    whole = _capacities(program, best.instance)
    parts = _capacities(apart, pipeline.instance(apart))
    first = {launch.operators: at for at, launch in reversed(list(enumerate(program.launches, start=1)))}
    found = []
    for cut, group in candidates.items():
        names = tuple(node.name for node in group.nodes)
        if names not in first or "" in names:
            continue
        at = first[names]
        if best.instance.layers[at - 1].operator_class == "hierarchical":  # by the predicted response, where there is one
            continue
        before = whole[names]
        after = sum(nbytes for operators, nbytes in parts.items() if set(operators) <= set(names))
        gain = (after - before) // best.instance.chunk_bytes
        if gain > 0 and after >= (1 + alpha) * before:
            found.append(Split(program.launches[at - 1].name, cut, at, gain))
    return found


def cut_point(group: FusionGroup, consumers: Mapping[Value, Sequence[Node]], outputs: Collection[Value]) -> Node | None:
    """The node before which a fusion group is cut: after its first elementwise operator (a bias), or before its only one.

    None if it cannot be cut. The part before the cut must leave a single value, like every group. A group with a stored
    Transpose is not cut: its parts would need the memory of an output of the model twice.
    """
    if group.moved is not None:
        return None
    for at in (*range(1, len(group.epilogue)), 0) if group.epilogue else ():
        before: Sequence[Node] = (group.main, *group.epilogue)[: at + 1]
        inside = [node.outputs[0] for node in before[:-1]]
        if not any(value in outputs or any(user not in before for user in consumers.get(value, ())) for value in inside):
            cut: Node = group.epilogue[at]
            return cut
    return None


def _capacities(program: Program, instance: Instance) -> dict[tuple[str, ...], int]:
    """C_v in bytes by the operators of each group, its slices together."""
    total: dict[tuple[str, ...], int] = {}
    for launch, spec in zip(program.launches, instance.layers, strict=True):
        total[launch.operators] = total.get(launch.operators, 0) + spec.capacity * instance.chunk_bytes
    return total


_NAMED = 6
"""The most splits that a plan's note names one by one."""
