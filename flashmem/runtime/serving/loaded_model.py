"""Loaded model: an engine with a plan for each budget, and a memory grant for each run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property, partial
from math import inf

from flashmem.base.errors import BudgetError
from flashmem.base.threads import call_each
from flashmem.base.types import TransferMode
from flashmem.bundle.bundle import Bundle
from flashmem.program.program import fixed_bytes
from flashmem.runtime.engine.bound_program import BoundProgram
from flashmem.runtime.engine.device_state import DeviceInUse
from flashmem.runtime.engine.engine import Engine
from flashmem.runtime.engine.opened import OpenedBundle
from flashmem.runtime.engine.replanned import NO_TIMES, fitted, instance_of, refused
from flashmem.runtime.engine.run import Run
from flashmem.runtime.kernels.background_check import BackgroundCheck
from flashmem.runtime.opencl.context import Queue
from flashmem.runtime.request.compatibility import for_processor
from flashmem.runtime.serving.host_memory import SharedHostMemory
from flashmem.runtime.serving.sharing import Need, Turn
from flashmem.runtime.streaming.host_tier import HostTier
from flashmem.schedule.loads import Load, kept_within, pages
from flashmem.schedule.plan import OverlapPlan, PoolLayout
from flashmem.schedule.residency import streamed_layout

_PLANS = 16
"""Number of plans kept in memory, by budget."""


def _never(load: Load) -> bool:
    return False


class LoadedModel:
    """An engine whose plan and memory follow a budget that it shares with other models.

    Any thread may request plans and the smallest budget, and wait for the warm-up. All other methods are called by one thread
    at a time: the runtime's worker, or its load-ahead thread.
    """

    def __init__(
        self,
        bundle: Bundle,
        device: DeviceInUse,
        mode: TransferMode | str,
        host: SharedHostMemory,
        *,
        build_apart: bool,
        prepare: bool,
        verify_weights: bool = False,
        check: BackgroundCheck | None = None,
    ) -> None:
        """Open the bundle and its kernels, without memory on the device. `Session` explains `build_apart` to `verify_weights`.

        `host`: gives the model its share, on a device with memory of its own. `check`: of the bundle's kernels; other shape
        variants of the bundle have the same one.

        Raises:
            UserError: the device lacks the mode, or cannot run the kernels; or the host budget has no room.
            RunError: the driver refuses the kernels.
        """
        bundle = for_processor(bundle, device.device)
        bundle, chosen = fitted(bundle, device.device, mode)
        opened = OpenedBundle(bundle, device.device, chosen, verify_weights=verify_weights)
        self.device = device
        self.check = check
        self.engine = Engine(opened, device, apart=build_apart, warm_up=prepare)
        self._host = host
        self.begun_under: int | None = None  # the budget's limit at the start of `current`
        self.bound_under: int | None = None  # the budget's limit for which the bound program was planned
        self._planning = threading.Lock()
        self._plans: dict[tuple[int | None, bool], OverlapPlan | BudgetError] = {}
        self._last_layout: tuple[OverlapPlan, PoolLayout] | None = None
        try:
            program = opened.program
            if not self._shares_memory:
                host.enter(self, program, bundle.plan)
                opened.tier = HostTier(device.context, host.budget, partial(host.slices_for, self))
            self._instance = instance_of(bundle, program, device.device, chosen)
            self.engine.bindings.kernels_for(bundle.plan)
        except BaseException:
            host.leave(self)
            opened.close()
            raise

    @property
    def opened(self) -> OpenedBundle:
        """The bundle."""
        return self.engine.opened

    @property
    def bound(self) -> BoundProgram | None:
        """The bound program; None if it is not bound."""
        return self.engine.bound

    @property
    def current(self) -> Run | None:
        """The run under way, or the next one, which has begun to load."""
        return self.engine.current

    @property
    def failure(self) -> str | None:
        """Why it is closed."""
        return self.engine.failure

    @property
    def streams_pages(self) -> bool:
        """Whether slices are loaded and freed singly (a mode of pages); in other modes a plan has places for all of them."""
        return self.opened.transfer.by_pages

    @cached_property
    def fixed(self) -> int:
        """Bytes of a bound program under any plan."""
        return fixed_bytes(self.opened.program, shares_memory=self._shares_memory)

    @property
    def _shares_memory(self) -> bool:
        return self.device.device.unified_memory

    def _weights(self, plan: OverlapPlan) -> int:
        """Bytes of a plan's layout that the budget counts."""
        return self._layout(plan).budgeted_bytes(shares_memory=self._shares_memory)

    @cached_property
    def smallest(self) -> int:
        """The smallest budget in which the model runs, in bytes. Any thread may ask."""
        if self._instance is None:
            return self.fixed + self._weights(self.opened.bundle.plan)
        from flashmem.planning.replanning import smallest_budget

        return smallest_budget(self.opened.program, self._instance, self.opened.mode, self.opened.bundle.plan.asked)

    def plan_for(self, limit: int | None, *, alone: bool) -> OverlapPlan:
        """The plan within `limit` bytes. `alone`: no other model uses the rest.

        Raises:
            BudgetError: no plan fits.
        """
        key = (limit, alone and not self.streams_pages)
        with self._planning:
            if key not in self._plans:
                while len(self._plans) >= _PLANS:
                    del self._plans[next(iter(self._plans))]
                try:
                    self._plans[key] = self._plan(limit, keep=key[1])
                except BudgetError as error:
                    self._plans[key] = error
            plan = self._plans[key]
        if isinstance(plan, BudgetError):
            raise plan
        return plan

    def plan_at_once(self, limit: int | None, *, alone: bool) -> OverlapPlan:
        """As `plan_for`, but without a plan yet, the bundle's own if it fits `limit`: the first run need not wait for a plan.

        Only in mode `map`, where the next run may follow another plan in the same places.

        Raises:
            BudgetError: no plan fits.
        """
        return self.opened.bundle.plan if self.awaits_plan(limit) else self.plan_for(limit, alone=alone)

    def awaits_plan(self, limit: int | None) -> bool:
        """Whether it follows its bundle's plan until its first plan is complete."""
        return self.streams_pages and self._instance is not None and not self._plans and self._as_bundled(limit)

    def _as_bundled(self, limit: int | None) -> bool:
        """Whether the bundle's own plan fits `limit` bytes."""
        return self._bundled_bytes < inf and (limit is None or self._bundled_bytes <= limit)

    @cached_property
    def _bundled_bytes(self) -> float:
        plan = self.opened.bundle.plan
        return self.fixed + self._weights(plan) if self.opened.mode in plan.layouts else inf

    def refuse_below(self, limit: int | None) -> None:
        """Raise BudgetError if no plan fits `limit` bytes."""
        if not self._as_bundled(limit):
            self.plan_for(limit, alone=False)

    def runs_in(self, limit: int) -> bool:
        """Whether a plan fits `limit` bytes."""
        return self._as_bundled(limit) or self.smallest <= limit

    def _plan(self, limit: int | None, *, keep: bool) -> OverlapPlan:
        opened = self.opened
        if self._instance is not None:
            from flashmem.planning.replanning import plan_again

            return plan_again(opened.program, self._instance, opened.mode, limit, opened.bundle.plan.asked, keep=keep)
        plan = opened.bundle.plan
        needed = self.fixed + self._weights(plan)
        if limit is not None and needed > limit:
            raise refused(opened.bundle.path.name, needed, limit, opened.mode, NO_TIMES)
        return plan

    def _layout(self, plan: OverlapPlan) -> PoolLayout:
        if (last := self._last_layout) is not None and last[0] is plan:
            return last[1]
        shares = self.device.device.unified_memory
        layout = streamed_layout(self.opened.program, plan, self.opened.mode, shares_memory=shares)
        self._last_layout = plan, layout
        return layout

    def need(self, plan: OverlapPlan) -> Need:
        """Bytes of a bound program under `plan`, and of a run in addition; in mode `map` without resident slices."""
        weights = self._weights(plan)
        return Need(self.fixed, weights) if self.streams_pages else Need(self.fixed + weights, 0)

    def try_bind(self, plan: OverlapPlan, queue: Queue) -> bool:
        """Bind under `plan`; False if the budget has no room for it now. Raises RunError if the device refuses."""
        layout = self._layout(plan)
        ledger = self.device.ledger()
        bindings = self.engine.bindings
        bindings.kernels_for(plan)  # before the memory grant, because it may fail
        if not ledger.promise(self.need(plan).fixed):
            return False
        bindings.bind(plan, layout, ledger, queue)  # closes the ledger after a failure
        return True

    def follows(self, plan: OverlapPlan) -> bool:
        """Whether the bound program can run under `plan`; in mode `map` it then will. No run may be loading."""
        if self.bound is None or self.bound.weights.plan.weights == plan.weights:
            return True
        if self.streams_pages:
            self.bound.weights.follow(plan, self._layout(plan))
        return self.streams_pages

    def release_weights(self) -> None:
        """Keep activations and constants only; `try_rebind` must follow. No run may be loading."""
        self.engine.bindings.release_weights()
        assert self.bound is not None
        self.bound.ledger.promise(0)

    def try_rebind(self, plan: OverlapPlan) -> bool:
        """After `release_weights`, bind the weights under another plan; False if the budget has no room.

        Raises:
            RunError: the device refuses.
        """
        assert self.bound is not None
        kernels = self.engine.bindings.kernels_for(plan)
        layout = self._layout(plan)
        if not self.bound.ledger.promise(self.need(plan).fixed):
            return False
        self.bound.rebind_weights(plan, layout, kernels)
        return True

    def begin_run(self, resident_bytes: float, *, done: int = 0, admit: Callable[[Load], bool] = _never) -> Run:
        """Begin a run after launch `done` that leaves up to `resident_bytes` of weights resident.

        In mode `map`, `admit` decides about each load before `grant`.
        """
        assert self.bound is not None
        weights = self.bound.weights
        self.begun_under = self.device.budget.limit
        if not self.streams_pages:
            return self.engine.begin(weights.schedule(done=done), done=done)
        kept = kept_within(weights.plan, self.opened.slices, weights.resident, resident_bytes)
        weights.drop(weights.resident - kept)
        return self.engine.begin(weights.schedule(kept=kept, done=done), done=done, admit=admit)

    def close(self, why: str) -> None:
        """Free everything and stay closed, also the share of the host memory. Closing again does nothing."""
        checks = None if self.check is None else self.check.close
        call_each(checks, partial(self.engine.close, why), partial(self._host.leave, self))

    def end_grant(self) -> None:
        """Release the unused part of the grant of a run that has ended or halted."""
        if self.bound is not None:
            self.bound.ledger.promise(0)

    def grant(self, run: Run, done: int = 0) -> bool:
        """Grant `run` all its memory, and let its loads continue; False if that would exceed the budget."""
        bound = self.bound
        assert bound is not None
        if self.streams_pages:
            ledger = bound.ledger
            fixed = self.fixed
            peaks = run.schedule.peaks()
            if not ledger.promise(fixed + peaks[done]):
                return False

            def give_back(layer: int) -> None:  # slices are freed after their last use
                ledger.promise(fixed + peaks[layer])

            if run.loader is not None:
                run.loader.when_freed = give_back
        if run.loader is not None:
            run.loader.admit_all()
        return True

    @property
    def committed(self) -> int:
        """Bytes in use or granted."""
        return 0 if self.bound is None else self.bound.ledger.commitment

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights that stay resident between two runs, or after the current one (a mode of pages)."""
        if self.bound is None or not self.streams_pages:
            return 0
        run = self.current
        if run is not None:
            return run.schedule.held[-1]
        return sum(pages(self.opened.slices[name]) for name in self.bound.weights.resident)

    @property
    def bound_bytes(self) -> int:
        """Bytes of the bound program without any loads."""
        return 0 if self.bound is None else self.need(self.bound.weights.plan).fixed

    def turn(self) -> Turn[LoadedModel]:
        """Memory of its next run; 0 if it is not bound."""
        if self.bound is None:
            return Turn(self, 0, 0, 0, 0)
        need = self.need(self.bound.weights.plan)
        rest = need.fixed + self.resident_bytes
        return Turn(self, self.committed, rest + need.room, rest, need.fixed)

    def lacks(self, run: Run, done: int) -> float:
        """Bytes missing in the budget to `grant` `run`."""
        peak = self.fixed + run.schedule.peak(done) if self.streams_pages else self.committed
        return peak - self.committed - self.device.budget.room

    def drop_residents(self, nbytes: float = inf) -> None:
        """Free resident slices, the last ones in use first, until at least `nbytes` are free."""
        bound = self.bound
        if bound is None or not self.streams_pages or self.current is not None:
            return
        uses = {w.name: w.first_use for w in bound.weights.plan.weights}
        for name in sorted(bound.weights.resident, key=lambda name: -uses[name]):
            if nbytes <= 0:
                break
            bound.weights.drop([name])
            nbytes -= pages(self.opened.slices[name])
        bound.ledger.promise(0)
