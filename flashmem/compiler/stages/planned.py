"""Results of the last stages: a program with its plan, and with the programs for other processors and the places of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flashmem.base.types import TransferMode
from flashmem.compiler.lowering.generated import Generated
from flashmem.compiler.memory.allocations import within_allocations
from flashmem.compiler.options import Options
from flashmem.planning.memory.layout import lay_out_pools
from flashmem.planning.planner import plan_instance
from flashmem.program.program import Program
from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import OverlapPlan


@dataclass(frozen=True)
class Attempt:
    """A program for some cuts, its planning instance, and its plan."""

    generated: Generated
    instance: Instance
    plan: OverlapPlan


def plan(generated: Generated, instance: Instance, options: Options) -> Attempt:
    """The checked plan of `instance`, without the steps that only the chosen plan needs (`planning.planner.completed`).

    Raises:
        BudgetError: no plan fits the limits.
    """
    made = plan_instance(instance, generated.program, options.mode, options.request, complete=False)
    return Attempt(generated, instance, made)


@dataclass(frozen=True)
class CompiledVariant:
    """The program of a variant, its plan, and its programs for other instruction sets, by their names."""

    generated: Generated
    plan: OverlapPlan
    elsewhere: Mapping[str, Generated]


def lay_out(made: CompiledVariant, options: Options) -> CompiledVariant:
    """`made` with the layouts of the transfer modes whose memory the device can allocate.

    Raises:
        UserError: that of the plan's own mode is none of them.
    """
    program = made.generated.program
    laid_out = with_layouts(program, made.plan, options.descriptor.modes[program.memory_path])
    return replace(made, plan=within_allocations(program, laid_out, options.descriptor, options.mode))


def with_layouts(program: Program, plan: OverlapPlan, modes: Sequence[TransferMode]) -> OverlapPlan:
    """`plan` with the layouts of `modes`."""
    return replace(plan, layouts=lay_out_pools(program.slices, plan, modes, page_bytes=program.page_bytes))
