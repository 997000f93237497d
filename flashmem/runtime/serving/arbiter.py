"""Who of several models is placed, what each may hold, and who gives memory up for whom."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf

from flashmem.base.errors import BudgetError, RunError, UserError
from flashmem.base.pages import whole_pages
from flashmem.base.units import format_size
from flashmem.runtime.engine.bound_program import Placement
from flashmem.runtime.engine.device_state import DeviceInUse
from flashmem.runtime.engine.run import Run
from flashmem.runtime.serving.loaded_model import Tenant
from flashmem.runtime.serving.sharing import Need, latest_needed, may_keep, spare
from flashmem.schedule.loads import Load
from flashmem.schedule.plan import OverlapPlan

_TURNS_AHEAD = 16
"""Turns among which one is looked for that can load."""


class _Ahead:
    """A model that loads before its turn: how many bytes it still may, and how many it was refused."""

    def __init__(self, tenant: Tenant, running: Run) -> None:
        self.tenant, self.running = tenant, running
        self.left, self.wants = 0.0, 0  # wants: 0 where nothing was refused since


class Occupancy:
    """The models on one device. `queue` says whose turns come next.

    Any thread may call `enter`, `tenants`, `beside_files`, `made_plan` and `unplanned`. All else is for one at a time: the
    runtime's own or, while that plays a run, the one that looks ahead, which calls `load_ahead` only.
    """

    def __init__(self, device: DeviceInUse, queue: Callable[[], Sequence[Tenant]]) -> None:
        self._device, self._queue = device, queue
        self._tenants: list[Tenant] = []  # the one that ran longest ago first
        self._lock = threading.Lock()
        self._ahead: _Ahead | None = None
        self._loading_ahead = threading.Lock()

    def tenants(self) -> list[Tenant]:
        """All models that are open."""
        with self._lock:
            return list(self._tenants)

    def enter(self, tenant: Tenant) -> None:
        """A model is open."""
        with self._lock:
            self._tenants.append(tenant)

    def leave(self, tenant: Tenant) -> None:
        """It is not any more."""
        with self._lock:
            if tenant in self._tenants:
                self._tenants.remove(tenant)

    def has_run(self, tenant: Tenant) -> None:
        """Nobody else ran later."""
        with self._lock:
            if tenant in self._tenants:
                self._tenants.remove(tenant)
                self._tenants.append(tenant)

    def beside_files(self) -> int:
        """Bytes that are held in memory which is not pages of the weight files."""
        held = 0
        for tenant in self.tenants():
            placement = tenant.placement
            if placement is not None:
                ledger = placement.ledger
                held += ledger.total - (ledger.by_category.get("weights", 0) if tenant.streams_pages else 0)
        return held

    def plan(self, tenant: Tenant) -> OverlapPlan:
        """A plan within the budget in force, which leaves room for others; that of its bundle while nobody else is placed and
        no other was made yet.

        Raises:
            BudgetError: there is none.
        """
        if all(other is tenant or other.placement is None for other in self.tenants()):
            return tenant.plan_at_once(self._device.budget.limit, alone=self._alone)
        return self.made_plan(tenant)

    def made_plan(self, tenant: Tenant) -> OverlapPlan:
        """Its plan for the budget in force, made now if it is not there.

        Raises:
            BudgetError: there is none.
        """
        return tenant.plan_for(self._device.budget.limit, alone=self._alone)

    def unplanned(self) -> Tenant | None:
        """The next one in the queue of those that could only run under their bundle's plan; None where all have others."""
        waiting = [tenant for tenant in self.tenants() if tenant.awaits_plan(self._device.budget.limit)]
        return latest_needed(waiting, self._queue())[-1] if waiting else None

    @property
    def _alone(self) -> bool:
        return len(self.tenants()) == 1

    def placed(self, tenant: Tenant) -> Placement:
        """Its placement under that plan, made if there is none.

        Raises:
            BudgetError: the budget is too small.
            RunError: the device refuses.
        """

        def place(plan: OverlapPlan) -> None:
            if tenant.run is not None and tenant.begun_under != self._device.budget.limit:
                tenant.leave()
            if tenant.run is None and not tenant.follows(plan):
                tenant.leave()
            if tenant.placement is None:
                self._make_room(tenant, lambda: tenant.place(plan, self._device.queue))

        self._with_plan(tenant, place)
        assert tenant.placement is not None
        return tenant.placement

    def place_again(self, tenant: Tenant) -> None:
        """New places for its weights, which it has given back, under the plan for the budget in force. Raises as `placed`."""

        def place(plan: OverlapPlan) -> None:
            self._make_room(tenant, lambda: tenant.place_again(plan))

        self._with_plan(tenant, place)

    def _with_plan(self, tenant: Tenant, place: Callable[[OverlapPlan], None]) -> None:
        """`place` it under its plan, and once more if the budget was moved meanwhile."""
        while True:
            limit = self._device.budget.limit
            try:
                place(self.plan(tenant))
                tenant.placed_under = limit
                return
            except BudgetError:
                if limit == self._device.budget.limit:
                    raise

    def begin(self, tenant: Tenant, done: int) -> Run | None:
        """Its run behind layer `done`, with all the memory that it will hold; None where the budget was moved meanwhile.

        Raises:
            BudgetError: the budget is too small.
        """
        with self._loading_ahead:  # a load that is being admitted is counted; none is admitted after that
            self._ahead = None
        run = tenant.run or tenant.begin(self._may_keep(tenant, self._queue(), self._loaded_ahead([tenant])), done=done)
        try:
            self._make_room(tenant, lambda: tenant.grant(run, done), lambda: tenant.lacks(run, done))
        except BudgetError:
            if tenant.placed_under == tenant.begun_under == self._device.budget.limit:
                raise
            with suppress(RunError):  # it begins again
                run.stop()
            tenant.end()
            return None
        return run

    def load_ahead(self, playing: Tenant, running: Run) -> None:
        """While `running` plays and its loads wait: have the first model load, in the order of the queue, that has anything to
        load before a layer of its own is done. It takes nothing from those before it.
        """
        waiting = self._ahead
        if waiting is not None and waiting.running is running and self._device.budget.room < waiting.wants:
            return
        queue, tenants = self._queue()[:_TURNS_AHEAD], self.tenants()
        turns = [playing]
        for number, tenant in enumerate(queue):
            if len({*turns}) == len(tenants):
                break
            turns.append(tenant)
            if tenant is playing:
                continue
            run = tenant.run or self._begin_ahead(turns, queue[number + 1 :])
            if run is None:
                break
            if run.loader is not None and not run.loader.idle:
                with self._loading_ahead:
                    ahead = self._ahead
                    if ahead is None or ahead.tenant is not tenant or ahead.running is not running:
                        ahead = self._ahead = _Ahead(tenant, running)
                    ahead.left = self._spare(turns)
                if ahead.left >= ahead.wants:
                    run.loader.wake()
                return
        self._ahead = None

    def _spare(self, turns: Sequence[Tenant]) -> float:
        """Bytes that the last one of those may take before its turn."""
        limit = self._device.budget.limit
        beside = sum(other.committed for other in self.tenants() if other not in turns)
        return inf if limit is None else spare(limit, beside, [tenant.turn() for tenant in turns])

    def _begin_ahead(self, turns: Sequence[Tenant], queue: Sequence[Tenant]) -> Run | None:
        """Place the model of the last one of `turns` before that, and begin its run; `queue` comes behind it.

        None if there is no room, or no plan yet: the end of the run under way must not wait for one.
        """
        tenant, room = turns[-1], self._spare(turns)
        if tenant.awaits_plan(self._device.budget.limit):
            return None
        with suppress(RunError, UserError):  # its own turn will tell
            plan = self.plan(tenant)
            if (tenant.need(plan).fixed if tenant.placement is None else 0) > room:
                return None
            if tenant.placement is None and not tenant.place(plan, self._device.beside):
                return None
            if tenant.follows(plan):
                return tenant.begin(
                    self._may_keep(tenant, queue, self._loaded_ahead(turns)), admit=partial(self._admits, tenant)
                )
        return None

    def _loaded_ahead(self, but: Sequence[Tenant]) -> dict[Tenant, int]:
        """What others hold that have begun before their turns: they would give it up with their places only."""
        begun = [other for other in self.tenants() if other not in but and other.run is not None]
        return {other: other.committed - other.placed_bytes for other in begun}

    def _admits(self, tenant: Tenant, load: Load) -> bool:
        """Whether it may load that before its turn. Called by its loader's threads."""
        with self._loading_ahead:
            ahead, placement = self._ahead, tenant.placement
            if ahead is None or ahead.tenant is not tenant or placement is None:
                return False
            if ahead.running.loader is not None and not ahead.running.loader.idle:
                return False
            ahead.wants = whole_pages(load.segment.nbytes)
            if ahead.wants > ahead.left or not placement.ledger.extend(ahead.wants):
                return False
            ahead.left -= ahead.wants
            ahead.wants = 0
            return True

    def relieve(self, but: Tenant | None = None) -> None:
        """Have all `but` one give memory up until the budget is kept."""
        budget = self._device.budget
        for other in self._givers(but):
            if budget.room < 0:
                other.drop_residents(-budget.room)
            if budget.room < 0:
                other.leave()

    def _make_room(self, tenant: Tenant, take: Callable[[], bool], lacks: Callable[[], float] = lambda: inf) -> None:
        """Have others give memory up until `tenant` can `take` what it needs, of which the budget `lacks` so many bytes."""
        if take():
            return
        for other in (givers := self._givers(tenant)):
            other.drop_residents(lacks())
            if take():
                return
        for other in givers:
            other.leave()
            if take():
                return
        limit, name = self._device.budget.limit or 0, tenant.opened.bundle.path.name
        raise BudgetError(
            f"the budget of {format_size(limit)} is too small for {name}, which takes {tenant.smallest} bytes; raise it",
            smallest_bytes=tenant.smallest,
            binding=name,
        )

    def _givers(self, but: Tenant | None) -> list[Tenant]:
        """The other models that are placed, the one that is needed latest first."""
        others = [other for other in self.tenants() if other is not but and other.placement is not None]
        return latest_needed(others, self._queue())

    def _may_keep(self, tenant: Tenant, queue: Sequence[Tenant], ahead: Mapping[Tenant, int]) -> float:
        """Bytes of weights that it may leave resident when its turn is over, behind which `queue` comes, and for which others
        have loaded `ahead`; only mode `map` has a choice.
        """
        if not tenant.streams_pages:
            return 0
        limit, needs, tenants = self._device.budget.limit, dict[Tenant, Need](), self.tenants()
        assert tenant.placement is not None
        for other in tenants:
            with suppress(BudgetError):  # it does not run in this budget
                plan = tenant.placement.plan if other is tenant else other.plan_at_once(limit, alone=self._alone)
                needs[other] = other.need(plan)
        return may_keep(limit, needs, {other: other.resident_bytes for other in tenants}, ahead, tenant, queue)
