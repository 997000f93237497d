"""The host memory of a runtime's models, on a device with memory of its own: one budget for all of them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from flashmem.base.errors import BudgetError
from flashmem.base.units import format_size
from flashmem.program.program import Program, host_bytes, pinned_output_bytes
from flashmem.program.tensors import Slice
from flashmem.runtime.memory.accounts import Budget
from flashmem.runtime.memory.pressure import available
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.request.options import read_host_budget
from flashmem.schedule.host_tier import identity, reloaded, tier_bytes, tier_slices
from flashmem.schedule.plan import OverlapPlan
from flashmem.schedule.residency import host_ring_bytes


@dataclass
class _Share:
    """The share of a model, in bytes: what it needs, and what its host tier holds; None: not decided yet."""

    program: Program
    plan: OverlapPlan
    needed: int
    tier: int | None = None

    @property
    def weights(self) -> int:
        """Bytes that its host tier could hold."""
        return sum(map(tier_bytes, self.program.slices))


class SharedHostMemory:
    """A host budget, of which each model has a share from its opening until it is closed. Thread-safe.

    A share has what the model needs, staging and copied outputs. After its first run it also has a part of the rest, for slices
    in its host tier: those that each of its runs loads, then those that it loads again after other models had its memory. The
    rest is divided by bytes of weights among the open models without such a part.
    """

    def __init__(self, asked: int | str | None, device: Device) -> None:
        """`asked`: as for `Runtime`.

        Raises:
            UserError: not a size, or the device shares its memory with the host.
        """
        wanted = read_host_budget(asked, shares_memory=device.unified_memory)
        if wanted == "auto":
            left = available()
            wanted = None if left is None else left // 2
        self.budget = Budget(wanted, "host budget")
        self._shares: dict[object, _Share] = {}
        self._lock = threading.Lock()

    def _left(self, limit: int) -> int:
        return limit - sum(share.needed + (share.tier or 0) for share in self._shares.values())

    def enter(self, model: object, program: Program, plan: OverlapPlan) -> None:
        """Give `model` what it needs.

        Raises:
            BudgetError: the rest of the budget is less.
        """
        needed = host_ring_bytes(program, plan.loader_threads) + host_bytes(program) + pinned_output_bytes(program)
        with self._lock:
            limit = self.budget.limit
            if limit is not None and needed > (left := self._left(limit)):
                smallest = limit - left + needed
                raise BudgetError(
                    f"staging and outputs need {needed} bytes of host memory, and {format_size(max(0, left))} of the host "
                    f"budget of {format_size(limit)} are left; raise it to {smallest} bytes, or close a model",
                    smallest_bytes=smallest,
                    binding="staging and outputs",
                )
            self._shares[model] = _Share(program, plan, needed)

    def slices_for(self, model: object) -> tuple[Slice, ...]:
        """Give `model` its part of the rest: the slices for its host tier, none without a limit."""
        with self._lock:
            limit = self.budget.limit
            share = self._shares.get(model)
            if limit is None or share is None:
                return ()
            parts = {part.name: part for part in share.program.slices}
            in_use_order = [parts[w.name] for w in sorted(share.plan.weights, key=lambda w: w.first_use)]
            again = frozenset(map(identity, reloaded([(share.plan, share.program.slices)])))
            waiting = sum(each.weights for each in self._shares.values() if each.tier is None)
            room = self._left(limit) * share.weights // max(1, waiting)
            kept = tier_slices(in_use_order, room, again)
            share.tier = sum(map(tier_bytes, kept))
            return kept

    def leave(self, model: object) -> None:
        """End the share of `model`, if it has one."""
        with self._lock:
            self._shares.pop(model, None)
