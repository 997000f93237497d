"""Profile-guided planning: plans made with measured times (FlashMem section 3.2; `run --learn`), and plans for another budget
(`flashmem replan`). Both need only numpy, and no solver.

A layer's measured seconds replace the predicted ones. Its capacity C_l changes in proportion, because the allowed slowdown of a
class of operators is a share of its latency. Measured load rates replace predicted ones too. The bundle keeps what was learned,
and later runs add to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import floor
from pathlib import Path
from statistics import median
from typing import Any

from flashmem.base.errors import UserError
from flashmem.base.types import TransferMode
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.replacing import replace_plan, replace_plans
from flashmem.planning.memory.layout import lay_out_pools
from flashmem.planning.planner import plan_instance, planning_instance
from flashmem.request.limits import Limits
from flashmem.runtime.engine.report import RunReport
from flashmem.schedule.instance import Instance
from flashmem.schedule.loads import TimedInterval
from flashmem.schedule.modes import MODES
from flashmem.schedule.plan import OverlapPlan
from flashmem.target.descriptor import DeviceDescriptor

KEY = "learned"
"""The key of the learned measurements in a bundle's `meta`."""

_MEMORY = 8
"""A new run weighs at least one part in this many, because devices warm up and drivers change."""

_MOST_SCALED = 4.0
"""The largest factor by which C_l follows measured latency: an interrupted run must not give one launch all capacity."""


@dataclass(frozen=True)
class Learned:
    """Means over `runs` runs in transfer `mode`: each launch's seconds without simultaneous copies, and bytes loaded per
    second.
    """

    mode: str
    runs: int
    seconds: tuple[float, ...]
    load_bandwidth: float

    def applied_to(self, instance: Instance) -> Instance:
        """`instance` with measured latencies, the capacities that follow from them, and the measured load rate."""
        layers = []
        for spec, seconds in zip(instance.layers, self.seconds, strict=True):
            scale = min(_MOST_SCALED, seconds / spec.seconds) if spec.seconds > 0 else 1.0
            layers.append(replace(spec, seconds=seconds, capacity=floor(spec.capacity * scale)))
        return replace(instance, layers=tuple(layers), load_bandwidth=self.load_bandwidth)

    def joined_to(self, earlier: Learned | None) -> Learned:
        """The weighted mean of both by their runs. Measurements of another mode or another program are dropped."""
        if earlier is None or earlier.mode != self.mode or len(earlier.seconds) != len(self.seconds):
            return self
        old = min(earlier.runs, _MEMORY - 1)
        new = self.runs
        share = new / (old + new)
        seconds = tuple((1 - share) * a + share * b for a, b in zip(earlier.seconds, self.seconds, strict=True))
        rate = (1 - share) * earlier.load_bandwidth + share * self.load_bandwidth
        return Learned(self.mode, earlier.runs + new, seconds, rate)


def learn(bundle: Bundle, mode: TransferMode, reports: Sequence[RunReport]) -> Bundle:
    """Plan the program of `bundle` again with the measurements in `reports`, and replace its plan on disk.

    `reports` are those of traced runs in `mode`.

    Raises:
        UserError: the bundle has no record of its limits, because an older version compiled it, or it cannot be written.
    """
    limits = limits_of(bundle)
    earlier = _learned_from(bundle)
    learned = observe(bundle, mode, reports).joined_to(earlier)
    instance = learned.applied_to(planning_instance(bundle.program, bundle.descriptor, mode, limits))
    plan = plan_instance(replace(instance, w_may_grow=True), bundle.program, mode, limits)
    program = bundle.program
    modes = bundle.descriptor.modes[program.memory_path]
    layouts = lay_out_pools(program.slices, plan, modes, page_bytes=program.page_bytes)
    note = f"learned from {learned.runs} runs in mode {mode}; loads came in at {learned.load_bandwidth / 1e6:.0f} MB/s"
    plan = replace(plan, layouts=dict(layouts), notes=(*plan.notes, note))
    return replace_plan(bundle, plan, {**bundle.meta, "mode": mode, KEY: asdict(learned)})


def replan(bundle: Bundle, budget: int, path: Path | None = None) -> Bundle:
    """Plan all shape variants of `bundle` again for `budget` bytes, with learned measurements, and write the plans.

    They replace the bundle's plans, or those of a new bundle at `path`. Slices do not change, so a model that is compiled for
    the budget may need less memory.

    Raises:
        BudgetError: no plan fits.
        UserError: the bundle has no record of its limits, or cannot be written.
    """
    variants = [bundle.variant(index) for index in range(len(bundle.variants))]
    made = [_plan_again(variant, budget) for variant in variants]
    plans = {index: plan for index, (plan, _) in enumerate(made)}
    return replace_plans(bundle, plans, {index: meta for index, (_, meta) in enumerate(made)}, path)


def _plan_again(bundle: Bundle, budget: int) -> tuple[OverlapPlan, dict[str, Any]]:
    """A plan for the selected variant, and the new metadata. Raises like `replan`."""
    program = bundle.program
    modes = bundle.descriptor.modes[bundle.program.memory_path]
    limits = limits_of(bundle).replace(budget=budget, m_peak=None)
    mode = next((each for each in modes if each == bundle.meta.get("mode")), modes[0])
    instance = planning_instance(program, bundle.descriptor, mode, limits)
    learned = _learned_from(bundle)
    if learned is not None and learned.mode == mode:
        instance = learned.applied_to(instance)
    plan = plan_instance(replace(instance, w_may_grow=True), program, mode, limits)
    plan = replace(plan, layouts=dict(lay_out_pools(program.slices, plan, modes, page_bytes=program.page_bytes)))
    return plan, {**bundle.meta, "mode": mode, "budget_bytes": budget, "limits": limits.values()}


def observe(bundle: Bundle, mode: TransferMode, reports: Sequence[RunReport]) -> Learned:
    """The measurements of runs: medians of launch times over the runs, minus the known cost of simultaneous copies in this
    mode.
    """
    moved = _moved_bytes(bundle.plan) if MODES[mode].by_kernels else [0] * len(bundle.program.launches)
    seconds = []
    for layer, intervals in enumerate(zip(*(report.layers for report in reports), strict=True)):
        whole = median(interval.end - interval.start for interval in intervals)
        seconds.append(max(whole - _moving_seconds(bundle.descriptor, mode, moved[layer]), whole / 2, 1e-9))
    rates = [rate for report in reports if (rate := _load_rate(bundle, report.loads)) is not None]
    if not rates:  # all weights were resident
        rates = [min(bundle.descriptor.rates.disk_bandwidth, bundle.descriptor.rates.copy_bandwidth)]
    return Learned(mode, len(reports), tuple(seconds), rates[0])


def _moved_bytes(plan: OverlapPlan) -> list[int]:
    moved = [0] * len(plan.capacities)
    for w in plan.weights:
        for layer, chunks in w.moves:
            moved[layer - 1] += chunks * plan.chunk_bytes
    return moved


def _moving_seconds(descriptor: DeviceDescriptor, mode: TransferMode, nbytes: int) -> float:
    rates = descriptor.rates
    return rates.contention_of(mode) * nbytes / rates.copy_bandwidth


def _load_rate(bundle: Bundle, loads: Sequence[TimedInterval]) -> float | None:
    """Bytes per second of the time with at least one load in progress; None without loads."""
    sizes = {part.name: part.nbytes for part in bundle.program.slices}
    busy = 0.0
    until = float("-inf")
    for interval in sorted(loads, key=lambda interval: interval.start):
        busy += max(0.0, interval.end - max(until, interval.start))
        until = max(until, interval.end)
    return sum(sizes[name] for name in {interval.name for interval in loads}) / busy if busy > 0 else None


def limits_of(bundle: Bundle) -> Limits:
    """The limits that `bundle` was planned for. Raises UserError if an older version compiled it without a record of them."""
    written = bundle.meta.get("limits")
    if not isinstance(written, dict) or not written.keys() <= Limits.options.keys():
        raise UserError(f"bundle {bundle.path} does not say what it was planned for; compile the model again")
    return Limits(**written)


def _learned_from(bundle: Bundle) -> Learned | None:
    """The measurements of earlier runs; None without usable ones."""
    written: Any = bundle.meta.get(KEY)
    try:
        learned = Learned(
            str(written["mode"]), int(written["runs"]), tuple(map(float, written["seconds"])), float(written["load_bandwidth"])
        )
    except (KeyError, TypeError, ValueError):
        return None
    usable = learned.runs > 0 and learned.load_bandwidth > 0 and all(seconds > 0 for seconds in learned.seconds)
    return learned if usable else None
