"""`flashmem design`: select models, devices and budgets for an application, and the policy to switch between designs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashmem.base.streams import say
from flashmem.base.units import format_size
from flashmem.cli.calls.devices import DesignCommand
from flashmem.cli.output.console import emit_json, print_facts, print_table
from flashmem.runtime.application.designs import Designs, SwitchingRule
from flashmem.tools.design.application import Application, BroadObjective, read_application
from flashmem.tools.design.profiles import Profiling, candidates
from flashmem.tools.design.writer import Solved, describe, solved, write


def design_application(options: DesignCommand) -> None:
    """Profile the candidates of an application, solve it, and write its designs.

    Raises:
        UserError: the application, a model or a device is wrong, or no decision satisfies all constraints.
        RunError: a run failed.
    """
    application = read_application(options.application)
    found = list(candidates(application, Profiling(options.runs, options.simulated, options.seed), say))
    answer = solved(application, found)
    if options.output is None:
        designs = describe(answer)
    else:
        designs = write(answer, options.output, here=not options.simulated, progress=say)
    if options.json:
        emit_json(_as_json(answer, designs))
    else:
        _print(application, answer, designs)


def _as_json(answer: Solved, designs: Designs) -> dict[str, Any]:
    objectives = [_title(objective) for objective in answer.application.objectives]
    rows = answer.solution.designs
    return {
        "decisions": len(answer.decisions),
        "allowed": answer.allowed,
        "optimality": [float(answer.solution.optimality[row]) for row in rows],
        "objectives": [dict(zip(objectives, map(float, answer.values[row]), strict=True)) for row in rows],
        **designs.to_json(),
    }


def _print(application: Application, answer: Solved, designs: Designs) -> None:
    rows = []
    for number, (design, row) in enumerate(zip(designs.designs, answer.solution.designs, strict=True)):
        for place, (part, candidate) in enumerate(zip(design.parts, answer.decisions[row], strict=True)):
            budget = "no limit" if candidate.budget is None else format_size(candidate.budget)
            first = place == 0
            rows.append(
                (
                    f"d{number}" if first else "",
                    ", ".join(design.roles) if first else "",
                    f"{answer.solution.optimality[row]:.3g}" if first else "",
                    part.task,
                    candidate.variant.title,
                    part.device,
                    budget,
                    f"{part.seconds * 1e3:.1f}",
                    format_size(part.memory),
                )
            )
    print_table(("design", "kept for", "optimality", "task", "model", "device", "budget", "ms", "memory"), rows)
    names = [" and ".join(each) for each in designs.sets]
    print_table((*names, "memory", "design"), [_rule(rule) for rule in designs.policy])
    facts = {"decisions": f"{len(answer.decisions)}, of which {answer.allowed} keep all constraints"}
    best = answer.values[answer.solution.designs[0]]
    facts |= {_title(each): f"{value:g}" for each, value in zip(application.objectives, best, strict=True)}
    print_facts(facts)


def _title(objective: BroadObjective) -> str:
    return f"{'maximise' if objective.maximise else 'minimise'} {objective.measure}"


def _rule(rule: SwitchingRule) -> Sequence[str]:
    states = {None: "any", True: "trouble", False: "fine"}
    short = {None: "any", True: "short", False: "enough"}
    return (*(states[each] for each in rule.sets), short[rule.memory], f"d{rule.design}")
