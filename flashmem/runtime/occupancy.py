"""Who of several models is placed, what each may hold, and who gives memory up for whom."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from flashmem.errors import BudgetError, RunError, UserError
from flashmem.planning.plan import OverlapPlan
from flashmem.runtime.device_in_use import DeviceInUse
from flashmem.runtime.placement import Placement
from flashmem.runtime.run import Run
from flashmem.runtime.sharing import latest_needed, left_over
from flashmem.runtime.tenant import Tenant
from flashmem.units import format_size


class Occupancy:
    """The models on one device. `queue` says whose turns come next.

    All but `enter` and `tenants` is for one thread at a time: the runtime's own or, while that plays a run, the one that looks
    ahead, which calls `begin_ahead` only.
    """

    def __init__(self, device: DeviceInUse, queue: Callable[[], Sequence[Tenant]]) -> None:
        self._device, self._queue = device, queue
        self._tenants: list[Tenant] = []  # the one that ran longest ago first
        self._lock = threading.Lock()

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
        """Its plan for the budget in force, made now if it is not there. May be called by any thread.

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
        run = tenant.run or tenant.begin(self._may_keep(tenant), done=done)
        try:
            self._make_room(tenant, lambda: tenant.grant(run, done))
        except BudgetError:
            if tenant.placed_under == tenant.begun_under == self._device.budget.limit:
                raise
            with suppress(RunError):  # it begins again
                run.stop()
            tenant.end()
            return None
        return run

    def begin_ahead(self, tenant: Tenant, running: Run) -> Run | None:
        """Place a model whose turn is next, and begin its loads, if there is room, its plan is made and it is not the one that
        runs.
        """
        if tenant.placement is running.placement or tenant.failure is not None:
            return None
        if tenant.awaits_plan(self._device.budget.limit):  # the end of this run must not wait for it
            return None
        if tenant.run is not None:
            return tenant.run
        with suppress(RunError, UserError):  # its own turn will tell
            plan = self.plan(tenant)
            if tenant.placement is None and not tenant.place(plan, self._device.beside):
                return None
            if tenant.follows(plan):
                return tenant.begin(self._may_keep(tenant), ahead_of=running)
        return None

    def relieve(self, but: Tenant | None = None) -> None:
        """Have all `but` one give memory up until the budget is kept."""
        budget = self._device.budget
        for other in self._givers(but):
            if budget.room < 0:
                other.drop_residents(-budget.room)
            if budget.room < 0:
                other.leave()

    def _make_room(self, tenant: Tenant, take: Callable[[], bool]) -> None:
        """Have others give memory up until `tenant` can `take` what it needs."""
        if take():
            return
        for other in self._givers(tenant):
            for give in (other.drop_residents, other.leave):
                give()
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

    def _may_keep(self, tenant: Tenant) -> float:
        """Bytes of weights that it may leave resident; only mode `map` has a choice."""
        if not tenant.streams_pages:
            return 0
        limit, needs, tenants = self._device.budget.limit, [], self.tenants()
        assert tenant.placement is not None
        for other in tenants:
            with suppress(BudgetError):  # it does not run in this budget
                plan = tenant.placement.plan if other is tenant else other.plan_at_once(limit, alone=self._alone)
                needs.append(other.need(plan))
        taken = sum(other.resident_bytes for other in tenants if other is not tenant)
        return max(0, left_over(limit, needs) - taken)
