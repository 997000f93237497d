"""Slice granularity under a memory limit: tries sizes of slices from coarse to fine.

Without a memory limit, slices are as large as the device prefers (`compiler/weights/slicing.py`). Under a limit, a slice is in
flight as a whole. Large slices leave no room to load ahead, and the largest ones determine the smallest budget that works. So a
program is planned with slices of any size, then with smaller ones while the objective improves, or until the plan fits. Those
of less than the default are for small budgets.

On a device with memory of its own, slices are chosen for later runs. Large slices take memory in flight that could hold
weights; small ones cost launches and loads. So every size is planned with the weights that stay. Of those with a first answer
near the earliest, the size with the fastest later runs is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from flashmem.base.errors import BudgetError
from flashmem.compiler.stages.pipeline import Pipeline
from flashmem.compiler.stages.planned import Attempt
from flashmem.compiler.weights.slicing import DEFAULT, LEAST_BYTES, STEP, Slicing, finer
from flashmem.planning.latency.later_runs import OWN_WORTH, by_later_runs
from flashmem.planning.latency.tiers import least_expected_seconds
from flashmem.planning.objectives.registry import objective_of
from flashmem.program.program import Program, fixed_bytes
from flashmem.request.limits import Limits
from flashmem.schedule.instance import Instance
from flashmem.schedule.objectives import KINDS

LARGEST_PART = 64
"""Slices of less than `LEAST_BYTES`, and of less than a budget divided by this, are used only if nothing else fits it."""

UNPROVEN = 0.02
"""The gap above which W may have larger slices."""

WORTH = 0.01
"""The least relative improvement of the objective for which smaller slices are used."""


def first_attempt(pipeline: Pipeline, limits: Limits) -> tuple[Pipeline, Attempt]:
    """`pipeline` with the best sizes of slices under `limits`, and its attempt with no group split.

    Raises:
        BudgetError: even the smallest slices do not fit; the error names the smallest budget of all attempts.
    """
    attempts = _Attempts(pipeline, limits)
    objective = objective_of(limits.resolved_objective)
    if _later_runs_count(pipeline, limits):
        if (found := _for_later_runs(attempts, limits)) is not None:
            return found
    else:
        best: tuple[Pipeline, Attempt] | None = None
        worse = 0
        for sized, tried in attempts:
            if best is None or objective.is_better(tried.plan, best[1].plan, WORTH):
                best = (sized, tried)
                worse = 0
                continue
            worse += 1
            if worse > objective.patience:
                break
        if best is not None:
            return _with_w_larger(*best, limits)
    assert attempts.refused is not None
    if limits.m_peak is None:
        raise attempts.refused
    pipeline = replace(pipeline, slicing=DEFAULT)  # M_peak does not limit W
    generated = pipeline.generate()
    return pipeline, pipeline.plan(replace(pipeline.instance(generated.program), w_may_grow=True), generated)


class _Attempts:
    """The attempts that fit the limits, with slices from coarse to fine, each made when it is asked for.

    `refused` is the error with the smallest budget of those that did not fit. With `best`, the seconds of a later run, those
    that cannot have a faster one are left out.
    """

    def __init__(self, pipeline: Pipeline, limits: Limits) -> None:
        self._pipeline = pipeline
        self._limits = limits
        self.refused: BudgetError | None = None
        self.best: float | None = None

    def __iter__(self) -> Iterator[tuple[Pipeline, Attempt]]:
        before = Slicing(most=None)
        largest = 0
        weights_bytes = 0
        fits = False

        def attempts(sizes: Iterable[Slicing]) -> Iterator[tuple[Pipeline, Attempt]]:
            nonlocal before, largest, weights_bytes, fits
            for slicing in sizes:
                if largest and _is_same(slicing, before, largest):
                    continue
                before = slicing
                pipeline = replace(self._pipeline, slicing=slicing)
                generated = pipeline.generate()
                largest = _largest(generated.program)
                weights_bytes = generated.program.weights_bytes
                if self.best is not None:
                    instance = pipeline.instance(generated.program)
                    if not _may_be_faster(instance, generated.program, self._limits, self.best):
                        continue
                try:
                    attempt = pipeline.attempt(generated=generated)
                except BudgetError as error:
                    if self.refused is None or error.smallest_bytes < self.refused.smallest_bytes:
                        self.refused = error
                else:
                    fits = True
                    yield pipeline, attempt

        yield from attempts(_sizes(self._limits))
        if (budget := self._limits.budget) is not None:
            yield from attempts(size for size in finer(weights_bytes) if not fits or size.least >= budget // LARGEST_PART)


def _later_runs_count(pipeline: Pipeline, limits: Limits) -> bool:
    """Whether slices are chosen for later runs: a budget on a device with memory of its own."""
    if pipeline.options.descriptor.shares_memory or limits.budget is None or limits.strategy != "stream":
        return False
    return objective_of(limits.resolved_objective).serves_later_runs


def _for_later_runs(attempts: _Attempts, limits: Limits) -> tuple[Pipeline, Attempt] | None:
    """Of `attempts`, from coarse to fine, the one with the fastest later runs whose first answer is near the earliest.

    Where the objective is later runs, every first answer will do. Finer slices must be faster by `WORTH`; those that cannot be
    are not planned to the end. None without attempts.
    """
    made = list(attempts) if KINDS[limits.resolved_objective].value == "first run" else attempts
    soonest = None if isinstance(made, _Attempts) else min((tried.plan.objective for _, tried in made), default=0.0)
    best: tuple[float, Pipeline, Attempt] | None = None
    for pipeline, tried in made:
        if soonest is not None and tried.plan.objective > soonest * (1 + OWN_WORTH):
            continue
        if best is not None and not _may_be_faster(tried.instance, tried.generated.program, limits, best[0]):
            continue
        pipeline = replace(pipeline, soonest=soonest)
        seconds = by_later_runs(tried.instance, pipeline.completed(tried))[0]
        if best is None or seconds < (1 - WORTH) * best[0]:
            best = seconds, pipeline, tried
            attempts.best = seconds
    return None if best is None else best[1:]


def _may_be_faster(instance: Instance, program: Program, limits: Limits, best: float) -> bool:
    """Whether later runs of a plan for `instance`, within the budget, may be faster than `best` seconds by `WORTH`."""
    assert limits.budget is not None
    return least_expected_seconds(instance, limits.budget - fixed_bytes(program, shares_memory=False)) < (1 - WORTH) * best


def _with_w_larger(pipeline: Pipeline, made: Attempt, limits: Limits) -> tuple[Pipeline, Attempt]:
    """`made`, with large slices in W if that is much faster: M_peak does not limit W."""
    if limits.m_peak is None or not objective_of(limits.resolved_objective).grows_w or made.plan.gap <= UNPROVEN:
        return pipeline, made
    instance = replace(made.instance, w_may_grow=True)
    larger = pipeline.plan(instance, made.generated)
    return pipeline, larger if larger.plan.objective < made.plan.objective else made


def _is_same(slicing: Slicing, before: Slicing, largest: int) -> bool:
    """Whether `slicing` gives the same program as `before`, whose largest slice has `largest` bytes."""
    if largest <= slicing.least:
        return True
    return before.most is not None and slicing.most is not None and largest <= slicing.most


def _sizes(limits: Limits) -> Iterator[Slicing]:
    limit = limits.budget or limits.m_peak
    yield from (Slicing(most=most) for most in objective_of(limits.resolved_objective).sizes(limit, LEAST_BYTES, STEP))
    if limit is not None:
        yield DEFAULT


def _largest(program: Program) -> int:
    """Bytes of the largest slice, which a smaller `Slicing` may divide."""
    return max((part.nbytes for part in program.slices), default=0)
