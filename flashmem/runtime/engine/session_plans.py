"""The plans of a session: its shape variants within its budgets."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from flashmem.base.errors import BudgetError
from flashmem.base.types import TransferMode
from flashmem.bundle.bundle import Bundle
from flashmem.runtime.engine.opened import HostMemory, PlannedVariant, planned_host_memory, planned_variant, sharing_memory
from flashmem.runtime.engine.replanned import within
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.request.options import choose_budget
from flashmem.runtime.request.process_memory import budget_within, too_small
from flashmem.schedule.residency import Strategy


class SessionPlans:
    """The shape variants of a session, planned: `ready` is the one that is bound. `needed`: bytes that any run requires.

    `budget`: the most bytes to hold (None: no limit). `host`: the host memory, where that counts apart.
    """

    def __init__(self, bundle: Bundle, device: Device, mode: TransferMode, strategy: Strategy) -> None:
        """Take the plans of the bundle. `fit_process` may follow, and `choose` must.

        Raises:
            UserError: the bundle was not compiled for that mode.
        """
        self._bundle = bundle
        self._device = device
        self._mode = mode
        self._strategy = strategy
        bundles = map(bundle.variant, range(len(bundle.variants)))
        self._own = [planned_variant(each, device, mode, strategy) for each in bundles]  # as the bundle has them
        self.budget: int | None = None
        self.host: HostMemory | None = None
        self._take(self._own, bundle.index)

    def _take(self, variants: Sequence[PlannedVariant], ready: int) -> None:
        self.variants = variants
        self.ready = variants[ready]
        self.needed = max(variant.needed() for variant in variants)

    def fit_process(self, limit: int, held: int | None) -> int:
        """The budget that a process memory of `limit` bytes leaves, of which the process has `held`; plans the variants again
        that need more.

        Raises:
            BudgetError: no plan fits.
            UserError: as `budget_within`.
        """
        budget = budget_within(limit, held, self._device)
        try:
            if self._strategy != "preload" and any(each.needed() > budget for each in self.variants):
                self._take([within(each, self._device, self._mode, budget) for each in self._own], self._bundle.index)
            choose_budget(budget, None, self.needed, mode=self._mode, strategy=self._strategy)
        except BudgetError as error:
            raise too_small(limit, held or 0, error) from error
        return budget

    def choose(self, budget: int | str | None, host_budget: int | str | None) -> None:
        """Choose the budgets from those that a user asked for, and memory that the variants share.

        Raises:
            UserError: as `choose_budget` and `choose_host_budget`.
        """
        own_first = sorted(self.variants, key=lambda variant: variant is not self.ready)
        self.host = planned_host_memory(host_budget, own_first, self._device, self._mode)
        self.budget = choose_budget(budget, self._bundle.budget_bytes, self.needed, mode=self._mode, strategy=self._strategy)
        self._take(sharing_memory(self.variants, self._device, self._mode, self.budget), self._bundle.index)

    def with_budget(self, limit: int | None) -> SessionPlans:
        """Plans for a budget of `limit` bytes; these stay as they are.

        Raises:
            BudgetError: no plan fits.
        """
        changed = copy(self)
        changed.budget = limit
        if self._strategy == "preload":
            choose_budget(limit, None, self.needed, mode=self._mode, strategy=self._strategy)
            return changed
        variants = [within(each, self._device, self._mode, limit) for each in self._own]
        changed._take(sharing_memory(variants, self._device, self._mode, limit), self.ready.bundle.index)
        return changed
