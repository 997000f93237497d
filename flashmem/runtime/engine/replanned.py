"""Plans for another budget than a bundle's own, or for another device, made on the device."""

from __future__ import annotations

import warnings
from dataclasses import replace

from flashmem.base.errors import BudgetError, FlashmemWarning
from flashmem.base.types import TransferMode
from flashmem.base.units import format_size
from flashmem.bundle.bundle import Bundle
from flashmem.planning.carried_instance import carried_instance
from flashmem.program.program import Program, fixed_bytes
from flashmem.runtime.engine.opened import PlannedVariant, program_on
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.request.compatibility import mode_for, too_large
from flashmem.runtime.request.options import NoLayoutError
from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import OverlapPlan
from flashmem.schedule.residency import Strategy, streamed_layout


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


def fitted(bundle: Bundle, device: Device, mode: str, strategy: Strategy = "stream") -> tuple[Bundle, TransferMode]:
    """The bundle as it runs on `device`, and its transfer mode (`mode_for`).

    A bundle that was planned for another device may have layouts for none of the modes of this one. Then "auto" plans it for
    the first mode that fits, in memory: its files stay. A warning says so.

    Raises:
        UserError: the device cannot run the bundle, or not in that mode; or it has no launch times for planning again.
        BudgetError: no plan fits the bundle's budget.
    """
    try:
        return bundle, mode_for(bundle, device, mode, strategy)
    except NoLayoutError as error:
        for other in error.modes:
            planned = _planned_for(bundle, device, other)
            if planned is not None:
                laid_out = ", ".join(bundle.plan.layouts) or "none"
                here = ", ".join(error.modes)
                text = f"{bundle.path} has layouts for transfer modes {laid_out}, and {device.name} has {here}"
                text += f": it was planned anew for mode {other}, in this process only"
                warnings.warn(FlashmemWarning(text), stacklevel=3)
                return planned, other
        raise


def _planned_for(bundle: Bundle, device: Device, mode: TransferMode) -> Bundle | None:
    """The bundle with plans for `mode` within its budget; None if it cannot be planned again, or the device has no room."""
    from flashmem.planning.replanning import plan_again

    planned = bundle
    for index in range(len(bundle.variants)):
        own = planned.variant(index)
        program = program_on(own.program, device)
        instance = instance_of(own, program, device, mode) if own.plan.strategy == "stream" else None
        if instance is None:
            return None
        plan = plan_again(program, instance, mode, own.budget_bytes, own.plan.asked, keep=True)
        if too_large(streamed_layout(program, plan, mode, shares_memory=device.unified_memory), device):
            return None
        planned = own.with_plan(plan, {**own.meta, "mode": mode})
    return planned.variant(bundle.index)


NO_TIMES = "it has no launch times for planning again"


def within(own: PlannedVariant, device: Device, mode: TransferMode, limit: int | None) -> PlannedVariant:
    """A shape variant with a plan for a budget of `limit` bytes, all of which its session may use.

    `own`: the variant with its bundle's plan, which is the one for the bundle's budget.

    Raises:
        BudgetError: no plan fits.
        BundleError: the bundle's launch times are malformed.
    """
    bundle = own.bundle
    program = own.program
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
