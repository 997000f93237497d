"""Plans for another budget than a bundle's own, made on the device."""

from __future__ import annotations

from dataclasses import replace

from flashmem.base.errors import BudgetError
from flashmem.base.types import TransferMode
from flashmem.base.units import format_size
from flashmem.bundle.bundle import Bundle
from flashmem.planning.carried_instance import carried_instance
from flashmem.program.program import Program, fixed_bytes
from flashmem.runtime.engine.opened import PlannedVariant
from flashmem.runtime.opencl.device import Device
from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import OverlapPlan
from flashmem.schedule.residency import streamed_layout


def instance_of(bundle: Bundle, program: Program, device: Device, mode: TransferMode) -> Instance | None:
    """The planning problem of a bundle's selected variant on `device`; None if the bundle has no launch times.

    Raises:
        BundleError: its times are malformed.
    """
    instance = carried_instance(program, bundle.plan, bundle.descriptor, mode, bundle.meta)
    return None if instance is None else replace(instance, shares_memory=device.unified_memory)


def refused(name: str, needed: int, limit: int, mode: TransferMode, why: str) -> BudgetError:
    """The error of a bundle that has only its own plan, which needs `needed` bytes; `why` it cannot be planned again."""
    return BudgetError(
        f"{name} needs {needed} bytes with its plan, the budget is {format_size(limit)}, and {why}: compile the model again, "
        "or raise the budget",
        smallest_bytes=needed,
        binding=f"the layout for transfer mode {mode}",
    )


_PLENTY = 4
"""Times the weights: without a limit, a plan keeps them all and loads through what staging it likes."""

NO_TIMES = "it has no launch times for planning again"


def within(own: PlannedVariant, device: Device, mode: TransferMode, limit: int | None) -> PlannedVariant:
    """A shape variant with a plan for a budget of `limit` bytes, all of which its session may use.

    `own`: the variant with its bundle's plan, which is the one for the bundle's budget.

    Raises:
        BudgetError: no plan fits.
        BundleError: the bundle's launch times are malformed.
    """
    bundle, program = own.bundle, own.program
    if limit == bundle.budget_bytes:
        return own
    instance = instance_of(bundle, program, device, mode)
    if instance is None or own.plan.strategy != "stream":
        if limit is not None and own.needed() > limit:
            why = NO_TIMES if instance is None else f"strategy {own.plan.strategy!r} is not planned again"
            raise refused(bundle.path.name, own.needed(), limit, mode, why)
        return own
    from flashmem.planning.replanning import plan_again

    most = fixed_bytes(program) + _PLENTY * sum(part.nbytes for part in program.slices) if limit is None else limit
    plan: OverlapPlan = plan_again(program, instance, mode, most, own.plan.asked, keep=True)
    layout = streamed_layout(program, plan, mode, shares_memory=device.unified_memory)
    return PlannedVariant(bundle, program, plan, layout, device.unified_memory)
