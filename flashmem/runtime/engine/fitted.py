"""A shape variant of a bundle as a session plays it: its plan and where weights lie, in one mode and strategy."""

from __future__ import annotations

from dataclasses import dataclass

from flashmem.base.types import TransferMode
from flashmem.bundle.bundle import Bundle
from flashmem.program.program import Program, fixed_bytes
from flashmem.runtime.engine.opened import program_on
from flashmem.runtime.opencl.devices import Device
from flashmem.schedule.plan import OverlapPlan, PoolLayout
from flashmem.schedule.residency import Strategy, preloaded, preloaded_layout, streamed_layout


@dataclass(frozen=True)
class Fitted:
    """`bundle` stands for the variant; `program` is what the device runs of it."""

    bundle: Bundle
    program: Program
    plan: OverlapPlan
    layout: PoolLayout

    @property
    def needed(self) -> int:
        """Bytes that a session holds while it plays this variant."""
        return fixed_bytes(self.program) + self.layout.total_bytes


def fit(bundle: Bundle, device: Device, mode: TransferMode, strategy: Strategy) -> Fitted:
    """The variant that `bundle` stands for.

    Raises:
        UserError: the bundle was not compiled for that mode.
    """
    program, plan, shares = program_on(bundle.program, device), bundle.plan, device.unified_memory
    if strategy == "preload":
        layout = preloaded_layout(program, mode, plan.loader_threads)
        return Fitted(bundle, program, preloaded(plan), layout)
    return Fitted(bundle, program, plan, streamed_layout(program, plan, mode, shares_memory=shares))
