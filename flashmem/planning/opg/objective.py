"""The paper's objective, and the methods for it that need no solver: costs, local search, the heuristic tiers of C4.

Costs are integers: the objective times the denominator of lambda, so that bounds and plans compare exactly.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate

from flashmem.base.errors import BudgetError
from flashmem.planning.arithmetic.clock import Moves
from flashmem.planning.arithmetic.release_times import held_bytes
from flashmem.planning.opg.greedy import greedy, incremental_preload, soft_ceiling
from flashmem.planning.opg.srpt import SrptPlan, srpt
from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import Tier, Units


@dataclass(frozen=True)
class Decision:
    """A decision: W, x of the streamed weights (whose first layer is z), and their cost."""

    preload: frozenset[str]
    moves: Moves
    cost: int


_MOST = 2**52
"""The approximate largest cost: sums of a few costs stay exact, and far below the infinity of the dynamic program."""


class PaperInstance:
    """A problem with the paper's objective, in `units`: lambda * sum of T(w) over W + (1 - lambda) * sum of i_w - z_w over the
    other weights.

    `forced`: the weights that must be in W. `limit`: the most bytes in W (None: no limit).
    """

    def __init__(
        self,
        instance: Instance,
        forced: frozenset[str],
        lambda_: float,
        preload_limit: int | None,
        units: Units = "printed",
    ) -> None:
        self.instance = instance
        self.forced = forced
        self.sizes = {w.name: w.nbytes for w in instance.weights}
        self.chunks = {w.name: instance.chunks(w) for w in instance.weights}
        self.limit = None if preload_limit is None else preload_limit + self.bytes_of(forced)
        share = Fraction(lambda_).limit_denominator(10**6)
        whole = share.denominator
        a_chunk = share.numerator
        a_layer = share.denominator - share.numerator
        if units == "share":
            chunks = max(1, sum(self.chunks.values()))
            distances = max(1, len(instance.layers) * len(instance.weights))
            whole = whole * chunks * distances
            a_chunk = a_chunk * distances
            a_layer = a_layer * chunks
            common = math.gcd(whole, a_chunk, a_layer)
            whole = whole // common
            a_chunk = a_chunk // common
            a_layer = a_layer // common
        # Large costs are rounded down, so that bounds on them hold for the exact costs.
        divisor = -(-whole // _MOST)
        a_chunk = a_chunk // divisor
        a_layer = a_layer // divisor
        self.scale = whole / divisor
        self.preload_cost = a_chunk  # cost of a chunk in W
        self.distance_cost = a_layer  # cost of a layer between z_w and i_w

    def bytes_of(self, preload: frozenset[str]) -> int:
        """Bytes of the weights in `preload`."""
        return sum(self.sizes[name] for name in preload)

    def distances_alone(self) -> dict[str, int]:
        """i_w - z_w of each weight if it were the only one. Weights that exceed C_l or M_peak even alone are omitted."""
        capacity = [0, *accumulate(spec.capacity for spec in self.instance.layers)]
        alone = {}
        for w in self.instance.weights:
            spare = capacity[w.first_use - 1] - self.chunks[w.name]
            if w.name not in self.forced and spare >= 0 and w.nbytes <= self.instance.m_peak:
                alone[w.name] = w.first_use - bisect_right(capacity, spare, 0, w.first_use)
        return alone

    def decision(self, preload: frozenset[str], plan: SrptPlan) -> Decision:
        """The decision of SRPT for W = `preload`."""
        cost = self.preload_cost * sum(self.chunks[name] for name in preload) + self.distance_cost * plan.distance(
            self.instance
        )
        return Decision(preload, plan.moves, cost)

    def repaired(self, preload: frozenset[str]) -> Decision | None:
        """The decision of SRPT for W = `preload`, grown if it does not fit; None if W may not grow enough."""
        for instance in self._inside():
            grown = incremental_preload(instance, preload, None, self.limit)
            if grown is None or (self.limit is not None and self.bytes_of(grown[0]) > self.limit):
                return None
            if self.holds(*grown):
                return self.decision(*grown)
        return None

    def holds(self, preload: frozenset[str], plan: SrptPlan) -> bool:
        """Whether a feasible plan keeps M_peak in mode `interleave`, with the staging that SRPT does not count."""
        if not self.instance.transfer.by_kernels:
            return True
        releases = {w.name: 0 if w.name in preload else plan.moves[w.name][0][0] for w in self.instance.weights}
        return int(held_bytes(self.instance, releases, plan.moves).max()) <= self.instance.m_peak

    def _inside(self) -> tuple[Instance, ...]:
        """The problem; in `interleave` also with M_peak reduced down to half, because staging can double what SRPT counts."""
        if not self.instance.transfer.by_kernels:
            return (self.instance,)
        return tuple(replace(self.instance, m_peak=self.instance.m_peak * part // 10) for part in range(10, 4, -1))

    def polished(self, best: Decision, until: float) -> Decision:
        """Local search: move weights in and out of W, one at a time, while the cost falls and time is below `until`."""
        fixed = self.sizes.keys() - self.distances_alone().keys()
        improved = True
        while improved:
            improved = False
            for name in self._exchange_order(best, fixed):
                if time.monotonic() > until:
                    return best
                preload = best.preload ^ {name}
                if self.limit is not None and self.bytes_of(preload) > self.limit:
                    continue
                plan = srpt(self.instance, preload)
                if plan.feasible and self.holds(preload, plan) and (candidate := self.decision(preload, plan)).cost < best.cost:
                    best = candidate
                    improved = True
        return best

    def _exchange_order(self, best: Decision, fixed: set[str]) -> list[str]:
        """Weights by the expected gain of an exchange: the present cost of each, less its cost alone on the other side."""
        promise: dict[str, int] = {}
        for w in self.instance.weights:
            if w.name not in fixed:
                inside = self.preload_cost * self.chunks[w.name]
                preloaded = w.name in best.preload
                outside = self.distance_cost * (1 if preloaded else w.first_use - best.moves[w.name][0][0])
                promise[w.name] = inside - outside if preloaded else outside - inside
        return sorted(promise, key=lambda name: -promise[name])

    def fallback(self) -> tuple[Decision, Tier, int]:
        """The tiers of C4 that may relax C_l, in order. Also a bound on the cost with no limit on C_l.

        Raises:
            BudgetError: no W of at most `limit` bytes was found that fits M_peak.
        """
        bound = sum(
            self.preload_cost * chunks if name in self.forced else min(self.preload_cost * chunks, self.distance_cost)
            for name, chunks in self.chunks.items()
        )
        ceiling = soft_ceiling(self.instance)
        for instance in self._inside():
            soft = srpt(instance, self.forced, ceiling)
            if soft.feasible and self.holds(self.forced, soft):
                return self.decision(self.forced, soft), "soft-threshold", bound
        for instance in self._inside():
            grown = incremental_preload(instance, self.forced, ceiling, self.limit)
            if grown is not None and self.holds(*grown):
                return self.decision(*grown), "incremental-preload", bound
        try:
            return self.decision(self.forced, greedy(self.instance, self.forced)), "greedy", bound
        except BudgetError as error:
            if self.limit is None:
                raise
            smallest = error.smallest_bytes
            raise BudgetError(
                f"no resident set of {self.limit} bytes or less was found with which M_peak of {self.instance.m_peak} bytes is "
                f"enough: layer {error.binding!r} binds; raise M_peak to {smallest} bytes or more, or the limit on residents",
                smallest_bytes=smallest,
                binding=error.binding,
            ) from error
