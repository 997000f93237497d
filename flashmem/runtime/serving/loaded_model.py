"""A bundle open in a runtime: its plans by budget, its placement while it has one, and the run that loads ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from math import inf

from flashmem.base.errors import BudgetError, RunError
from flashmem.base.types import TransferMode
from flashmem.base.units import format_size
from flashmem.bundle.bundle import Bundle
from flashmem.planning.carried_instance import carried_instance
from flashmem.program.program import fixed_bytes
from flashmem.runtime.engine.bound_program import Placement
from flashmem.runtime.engine.compatibility import laid_out, playable
from flashmem.runtime.engine.device_state import DeviceInUse
from flashmem.runtime.engine.opened import Kernels, OpenedBundle
from flashmem.runtime.engine.prefetch import Preparation
from flashmem.runtime.engine.run import Run
from flashmem.runtime.opencl.context import Queue
from flashmem.runtime.options import choose_mode
from flashmem.runtime.serving.sharing import Need, Turn
from flashmem.schedule.loads import Load, kept_within, pages
from flashmem.schedule.plan import OverlapPlan, PoolLayout
from flashmem.schedule.residency import streamed_layout

_PLANS = 16
"""Plans that are remembered, by budget."""


def _never(load: Load) -> bool:
    return False


class Tenant:
    """Any thread may ask for plans, what is the smallest budget, and what is prepared. All else is called by one at a time: the
    runtime's own, or the one that looks ahead for it.
    """

    def __init__(
        self,
        bundle: Bundle,
        device: DeviceInUse,
        mode: TransferMode | str,
        *,
        build_apart: bool,
        prepare: bool,
        verify_weights: bool = False,
    ) -> None:
        """Open the bundle and its kernels; nothing on the device yet. The last three as for `Session`.

        Raises:
            UserError: a mode that the device lacks, kernels that it does not take.
            RunError: the driver refuses the kernels.
        """
        planned = bundle.meta.get("mode")
        descriptor, path = playable(bundle, device.device, mode), bundle.program.memory_path
        chosen = choose_mode(descriptor, mode, path=path, planned=planned, layouts=laid_out(bundle))
        self.device = device
        self.opened = OpenedBundle(bundle, device.device, chosen, verify_weights=verify_weights)
        self.placement: Placement | None = None
        self.run: Run | None = None  # under way, or loading ahead
        self.begun_under: int | None = None  # the limit when `run` began
        self.placed_under: int | None = None  # the limit that the placement's plan is for, when its turn came
        self.failure: str | None = None  # why it was closed
        self.steady = False  # whether the run is played by steady kernels
        self._preparation = Preparation(self.opened, device, apart=build_apart) if prepare else None
        self._apart = build_apart
        self._planning = threading.Lock()
        self._plans: dict[tuple[int | None, bool], OverlapPlan | BudgetError] = {}
        self._kernels: Kernels
        self._planned: OverlapPlan | None = None  # what the kernels are for
        try:
            program = self.opened.program
            instance = carried_instance(program, bundle.plan, bundle.descriptor, chosen, bundle.meta)
            shares = device.device.unified_memory
            self._instance = instance if instance is None else replace(instance, shares_memory=shares)
            self._kernels_for(bundle.plan)
        except BaseException:
            self.opened.close()
            raise

    @property
    def streams_pages(self) -> bool:
        """Whether weights come and go slice by slice (mode `map`); in every other mode a plan has places for all of them."""
        return self.opened.mode == "map"

    @cached_property
    def fixed(self) -> int:
        """Bytes that a placement holds whatever the plan."""
        return fixed_bytes(self.opened.program)

    @cached_property
    def smallest(self) -> int:
        """The least budget in which it runs, in bytes."""
        if self._instance is None:
            return self.fixed + self._layout(self.opened.bundle.plan).total_bytes
        from flashmem.planning.replanning import smallest_budget

        return smallest_budget(self.opened.program, self._instance, self.opened.mode, self.opened.bundle.plan.asked)

    def plan_for(self, limit: int | None, *, alone: bool) -> OverlapPlan:
        """The plan within `limit` bytes. `alone`: no other model wants what it leaves over.

        Raises:
            BudgetError: nothing fits.
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
        """As `plan_for`, but that of the bundle where it is within `limit` and none was ever made: nobody waits for the first.

        Only in mode `map`, where the next run may follow another plan in the same places.

        Raises:
            BudgetError: nothing fits.
        """
        return self.opened.bundle.plan if self.awaits_plan(limit) else self.plan_for(limit, alone=alone)

    def awaits_plan(self, limit: int | None) -> bool:
        """Whether it does with its bundle's plan until a first one of its own is made."""
        return self.streams_pages and self._instance is not None and not self._plans and self._as_bundled(limit)

    def _as_bundled(self, limit: int | None) -> bool:
        """Whether the bundle's own plan is within `limit` bytes."""
        return self._bundled_bytes < inf and (limit is None or self._bundled_bytes <= limit)

    @cached_property
    def _bundled_bytes(self) -> float:
        plan = self.opened.bundle.plan
        return self.fixed + self._layout(plan).total_bytes if self.opened.mode in plan.layouts else inf

    def refuse_below(self, limit: int | None) -> None:
        """Raise BudgetError where nothing fits `limit` bytes."""
        if not self._as_bundled(limit):
            self.plan_for(limit, alone=False)

    def runs_in(self, limit: int) -> bool:
        """Whether there is a plan within `limit` bytes."""
        return self._as_bundled(limit) or self.smallest <= limit

    def _plan(self, limit: int | None, *, keep: bool) -> OverlapPlan:
        opened = self.opened
        if self._instance is not None:
            from flashmem.planning.replanning import plan_again

            return plan_again(opened.program, self._instance, opened.mode, limit, opened.bundle.plan.asked, keep=keep)
        plan = opened.bundle.plan
        needed = self.fixed + self._layout(plan).total_bytes
        if limit is not None and needed > limit:
            raise BudgetError(
                f"{opened.bundle.path.name} needs {needed} bytes as it was planned, the budget is {format_size(limit)}, and it "
                "carries no times of layers to be planned again with: compile the model again, or raise the budget",
                smallest_bytes=needed,
                binding=f"the layout for transfer mode {opened.mode}",
            )
        return plan

    def _layout(self, plan: OverlapPlan) -> PoolLayout:
        opened, device = self.opened, self.device.device
        return streamed_layout(opened.program, plan, opened.mode, shares_memory=device.unified_memory)

    def need(self, plan: OverlapPlan) -> Need:
        """What a placement under `plan` holds, and a run beside it; in mode `map` without what stays resident."""
        weights = self._layout(plan).total_bytes
        return Need(self.fixed, weights) if self.streams_pages else Need(self.fixed + weights, 0)

    def _kernels_for(self, plan: OverlapPlan) -> Kernels:
        """Kernels change with the plan where they move weights."""
        if self._planned is None or (self.opened.mode == "interleave" and self._planned is not plan):
            if self._planned is not None:
                self._kernels.close()  # a thread may still load what only later runs need
            self._kernels, self._planned = Kernels(self.opened, self.device, plan, apart=self._apart), plan
        return self._kernels

    def place(self, plan: OverlapPlan, queue: Queue) -> bool:
        """Take places under `plan`; False where the budget has no room for them now. Raises RunError if the device refuses."""
        kernels, layout, ledger = self._kernels_for(plan), self._layout(plan), self.device.ledger()
        if not ledger.promise(self.need(plan).fixed):
            return False
        self.placement = Placement(self.device, self.opened, kernels, plan, layout, ledger, queue)  # or the ledger is closed
        return True

    def follows(self, plan: OverlapPlan) -> bool:
        """Whether its placement, if it has one, can run under `plan`; in mode `map` it then will. No run may be loading."""
        placement = self.placement
        if placement is None or placement.plan.weights == plan.weights:
            return True
        if self.streams_pages:
            placement.follow(plan, self._layout(plan))
        return self.streams_pages

    def give_weights_back(self) -> None:
        """Hold activations and constants only; `place_again` must follow. No run may be loading."""
        assert self.placement is not None
        self._bind_no_more()
        self.placement.let_weights_go()
        self.placement.ledger.promise(0)

    def place_again(self, plan: OverlapPlan) -> bool:
        """Take places for the weights under another plan; False where there is no room.

        Raises:
            RunError: the device refuses.
        """
        assert self.placement is not None
        kernels, layout = self._kernels_for(plan), self._layout(plan)
        if not self.placement.ledger.promise(self.need(plan).fixed):
            return False
        self.placement.lay_out_again(plan, layout, kernels)
        return True

    def begin(self, resident_bytes: float, *, done: int = 0, admit: Callable[[Load], bool] = _never) -> Run:
        """A run behind layer `done` that leaves up to `resident_bytes` of weights.

        In mode `map`, what is loaded before the run is granted its memory (`grant`) is asked of `admit`.
        """
        placement, self.begun_under = self.placement, self.device.budget.limit
        assert placement is not None
        if not self.streams_pages:
            self.run = Run(placement, placement.schedule(done=done), done=done)
            return self.run
        kept = kept_within(placement.plan, self.opened.slices, placement.resident, resident_bytes)
        placement.drop(placement.resident - kept)
        self.run = Run(placement, placement.schedule(kept=kept, done=done), done=done, admit=admit)
        return self.run

    def end(self) -> None:
        """Its run is over, or halted."""
        self.run = None
        if self.placement is not None:
            self.placement.ledger.promise(0)

    def grant(self, run: Run, done: int = 0) -> bool:
        """Promise `run` all that it will hold, and let it go on; False where that would pass the budget."""
        placement = self.placement
        assert placement is not None
        if self.streams_pages:
            ledger, fixed, peaks = placement.ledger, self.fixed, run.schedule.peaks()
            if not ledger.promise(fixed + peaks[done]):
                return False

            def give_back(layer: int) -> None:  # what the layer used last is no longer held
                ledger.promise(fixed + peaks[layer])

            if run.loader is not None:
                run.loader.when_freed = give_back
        if run.loader is not None:
            run.loader.admit_all()
        return True

    def choose(self, done: int) -> None:
        """The run behind layer `done` is about to begin: play it by steady kernels, if they are ready and may be."""
        assert self.placement is not None
        self.steady = done == 0 and self._preparation is not None and self._preparation.choose(self.placement)

    def prepare(self) -> None:
        """A run is over: steady kernels are made ready for the next one, in a thread."""
        if self._preparation is not None and self.placement is not None:
            self._preparation.begin(self.placement)

    def wait_prepared(self) -> None:
        """Return when what is being made ready is."""
        if self._preparation is not None:
            self._preparation.wait()

    def _bind_no_more(self) -> None:
        if self._preparation is not None:
            self._preparation.leave()

    @property
    def committed(self) -> int:
        """Bytes that it counts on now."""
        return 0 if self.placement is None else self.placement.ledger.commitment

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights that stay where they are between two runs, or will when its run is over (mode `map`)."""
        if self.placement is None or not self.streams_pages:
            return 0
        run = self.run
        if run is not None:
            return run.schedule.held[-1]
        return sum(pages(self.opened.slices[name]) for name in self.placement.resident)

    @property
    def placed_bytes(self) -> int:
        """Bytes that its placement holds whatever is loaded."""
        return 0 if self.placement is None else self.need(self.placement.plan).fixed

    def turn(self) -> Turn[Tenant]:
        """Its next run; nothing yet where it is not placed."""
        if self.placement is None:
            return Turn(self, 0, 0, 0, 0)
        need = self.need(self.placement.plan)
        rest = need.fixed + self.resident_bytes
        return Turn(self, self.committed, rest + need.room, rest, need.fixed)

    def lacks(self, run: Run, done: int) -> float:
        """Bytes that the budget has too few of to `grant` it."""
        peak = self.fixed + run.schedule.peak(done) if self.streams_pages else self.committed
        return peak - self.committed - self.device.budget.room

    def drop_residents(self, nbytes: float = inf) -> None:
        """Let resident slices go, the last ones in use first, until at least `nbytes` are given back."""
        placement = self.placement
        if placement is None or not self.streams_pages or self.run is not None:
            return
        uses = {w.name: w.first_use for w in placement.plan.weights}
        for name in sorted(placement.resident, key=lambda name: -uses[name]):
            if nbytes <= 0:
                break
            placement.drop([name])
            nbytes -= pages(self.opened.slices[name])
        placement.ledger.promise(0)

    def leave(self) -> None:
        """Give all places back; what loads ahead stops."""
        run, placement, self.run, self.placement = self.run, self.placement, None, None
        if run is not None:
            with suppress(RunError):  # nobody waits for those loads any more
                run.stop()
        if placement is not None:
            self._bind_no_more()
            placement.close()

    def close(self, why: str) -> None:
        """Give everything back, for good."""
        if self.failure is None:
            self.failure = why
            self.leave()
            if self._preparation is not None:
                self._preparation.close()
            self._kernels.close()
            self.opened.close()
