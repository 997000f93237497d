"""What an objective is given to plan: an instance, the program it was built from, and the user's limits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashmem.base.errors import UserError
from flashmem.base.types import TransferMode
from flashmem.planning.arithmetic.measure import Measure, in_flight_measure, session_measure
from flashmem.program.program import Program, fixed_bytes
from flashmem.request.limits import Limits
from flashmem.schedule.host_tier import spread
from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import OverlapPlan


@dataclass(frozen=True)
class Problem:
    """A program to plan for transfer `mode` within `limits`."""

    instance: Instance
    program: Program
    mode: TransferMode
    limits: Limits

    @property
    def limit(self) -> int | None:
        """The bytes of the limit that was given, M_peak or a budget; None for none."""
        return self.limits.m_peak if self.limits.budget is None else self.limits.budget

    @property
    def measure(self) -> Measure:
        """Measures the bytes that `limit` covers."""
        return self.in_flight if self.limits.budget is None else self.in_all

    @property
    def in_all(self) -> Measure:
        """Measures all bytes that a session's budget limits."""
        return session_measure(self.program, self.mode)

    @property
    def in_flight(self) -> Measure:
        """Measures the bytes that M_peak limits."""
        return in_flight_measure(self.program, self.mode)

    @property
    def fixed(self) -> int:
        """Bytes of a budget that no plan changes."""
        return fixed_bytes(self.program, shares_memory=self.instance.shares_memory)

    @property
    def asked(self) -> frozenset[str]:
        """The slices that the user wants in W; a name in the limits is that of a slice or of a weight.

        Raises:
            UserError: no slice or weight has that name.
        """
        chosen: set[str] = set()
        for name in self.limits.preload:
            meant = {part.name for part in self.program.slices if name in (part.name, part.weight)}
            if not meant:
                what = f"weight {name!r} cannot be preloaded: the model has no weight of that name"
                raise UserError(f"{what}; correct the name")
            chosen |= meant
        return frozenset(chosen | self._asked_share())

    def _asked_share(self) -> set[str]:
        """Slices of about the share of all bytes that the user wants in W, spread evenly over the run."""
        uses = self.program.uses()
        parts = sorted((part for part in self.program.slices if part.name in uses), key=lambda part: uses[part.name])
        sizes = [part.nbytes for part in parts]
        left = (self.limits.preload_ratio or 0.0) * sum(sizes)
        chosen = set()
        for at in spread(sizes, round(left)):
            if left < sizes[at] / 2:
                break
            chosen.add(parts[at].name)
            left -= sizes[at]
        return chosen

    def of(self, instance: Instance) -> Problem:
        """The same program and limits, with another instance."""
        return replace(self, instance=instance)

    def staged_as(self, plan: OverlapPlan) -> Problem:
        """The problem with the staging that `plan` was made with."""
        return self.of(replace(self.instance, piece_bytes=plan.piece_bytes, loader_threads=plan.loader_threads))

    def roomiest(self, plan: OverlapPlan) -> Instance:
        """The instance with the largest M_peak that any plan with the W of `plan` can have within the limits."""
        if self.limits.m_peak is not None:
            return replace(self.instance, m_peak=max(self.limits.m_peak, plan.m_peak))
        return roomiest(self.instance, plan, None if self.limits.budget is None else self.limits.budget - self.fixed)


def roomiest(instance: Instance, plan: OverlapPlan, room: int | None) -> Instance:
    """`instance` with the largest M_peak that any plan with the W of `plan` can use in `room` bytes (None: no limit).

    `room` covers W and the bytes in flight. A bound proven for less memory does not hold for plans with more.
    """
    everything = 2 * sum(w.nbytes for w in instance.weights)  # some modes keep two copies of a slice
    if room is None:
        return replace(instance, m_peak=max(1, everything, plan.m_peak))
    resident = sum(w.nbytes for w in plan.weights if w.preload)
    return replace(instance, m_peak=max(plan.m_peak, min(everything, room - resident)))
