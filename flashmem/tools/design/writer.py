"""Writing of designs for a device: a folder with `design.json` and the bundles of the selected designs (CARIn, Table 10)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import UserError
from flashmem.base.files import written_whole
from flashmem.bundle.replacing import replace_plan
from flashmem.runtime.application.designs import FILE, Design, Designs, TaskAssignment
from flashmem.tools.design import metrics
from flashmem.tools.design.application import Application
from flashmem.tools.design.metrics import Candidate, Decision
from flashmem.tools.design.profiles import compile_candidate
from flashmem.tools.design.rass import Solution, solve


@dataclass(frozen=True)
class Solved:
    """The solution over all decisions, with the values of all objectives [decisions, objectives]."""

    application: Application
    decisions: tuple[Decision, ...]
    values: NDArray[np.float64]
    solution: Solution

    @property
    def allowed(self) -> int:
        """The number of decisions that satisfy all constraints."""
        return int(np.isfinite(1 / self.solution.optimality).sum())


def solved(application: Application, candidates: Sequence[Candidate]) -> Solved:
    """Solve an application for profiled candidates.

    Raises:
        UserError: no decision satisfies all constraints; the message names the constraint that is violated most.
    """
    decisions = tuple(metrics.decisions(application, candidates))
    measures = [objective.measure for objective in application.objectives]
    values = np.array([[metrics.value(decision, measure) for measure in measures] for decision in decisions])
    solution = solve(
        values,
        [objective.maximise for objective in application.objectives],
        [objective.weight for objective in application.objectives],
        np.array([metrics.is_allowed(decision, application) for decision in decisions]),
        [metrics.processors_of(decision) for decision in decisions],
        np.array([metrics.memory(decision) for decision in decisions], np.float64),
        np.array([metrics.workload(decision) for decision in decisions], np.float64),
    )
    if solution is None:
        raise UserError(f"no decision keeps all constraints; {_nearest_constraint(application, decisions)}")
    return Solved(application, decisions, values, solution)


def write(solved: Solved, folder: Path, *, here: bool, progress: Callable[[str], None] = lambda text: None) -> Designs:
    """Write the designs' bundles to `folder`, then `design.json`, and remove the bundles of earlier designs.

    Raises:
        UserError: the folder cannot be written, or has other content.
    """
    if folder.exists() and not (folder / FILE).is_file() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty and has no {FILE}; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    designs = describe(solved)
    before = _bundles_in(folder)
    chosen = {_bundle(each): each for row in solved.solution.designs for each in solved.decisions[row]}
    for name, each in chosen.items():
        progress(f"writing {name}")
        bundle = compile_candidate(each.variant, each.processor, each.budget, here=here)
        replace_plan(bundle, bundle.plan, bundle.meta, folder / name)
    with written_whole(folder / FILE) as file:
        file.write(json.dumps(designs.to_json(), indent=1).encode())
    for name in before - chosen.keys():
        shutil.rmtree(folder / name, ignore_errors=True)
    return designs


def _bundles_in(folder: Path) -> set[str]:
    """The bundles of the designs in the folder."""
    try:
        return {part.bundle for design in Designs.read(folder).designs for part in design.parts}
    except UserError:
        return set()


def describe(solved: Solved) -> Designs:
    """The designs and the policy in the form that the manager reads."""
    solution = solved.solution
    rows = [solved.decisions[row] for row in solution.designs]
    return Designs(
        solution.sets,
        tuple(Design(roles, tuple(map(_part, decision))) for roles, decision in zip(solution.roles, rows, strict=True)),
        solution.policy,
    )


def _part(candidate: Candidate) -> TaskAssignment:
    device = candidate.processor.device
    processor = candidate.processor.name
    usual = float(np.median(candidate.profile.later))
    return TaskAssignment(candidate.task, _bundle(candidate), device, processor, candidate.profile.memory, usual)


def _bundle(candidate: Candidate) -> str:
    budget = "all" if candidate.budget is None else f"{candidate.budget / 1e6:.15g}MB"
    return f"{candidate.task}-{candidate.variant.title}-{candidate.processor.device}-{budget}.flashmem"


def _nearest_constraint(application: Application, decisions: Sequence[Decision]) -> str:
    """The constraint whose best decision is furthest from its bound, relative to the bound."""

    def best(number: int) -> float:
        constraint = application.constraints[number]
        found = [metrics.value(decision, constraint.measure) for decision in decisions]
        return min(found) if constraint.at_most else max(found)

    def missing(number: int) -> float:
        constraint = application.constraints[number]
        lacks = best(number) - constraint.bound if constraint.at_most else constraint.bound - best(number)
        return lacks / max(abs(constraint.bound), 1e-12)

    worst = max(range(len(application.constraints)), key=missing)
    constraint = application.constraints[worst]
    asked = f"{'at most' if constraint.at_most else 'at least'} {constraint.bound:g}"
    return f"{constraint.measure} is to be {asked}, and {best(worst):g} is the best any of them has alone; relax a bound"
