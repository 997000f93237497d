"""Order of layers with the lowest peak memory of activations.

The input is layers 0..n-1 in a valid order, the predecessors of each layer, and tensors. A tensor has a size in bytes, and the
layers that write or read it. It may be alive before the first layer runs (inputs) or after the last one (outputs). Tensors that
share memory (a view and its source) are one tensor. An order runs each layer once, after its predecessors. A tensor is alive
from the first layer that touches it to the last one, both included. The goal is an order with the smallest *peak*, the most
bytes alive during a layer. The problem is NP-hard (register allocation, Sethi 1975), but networks have few valid choices:

1. A layer's *mandatory* tensors are alive while it runs in any order: touched by it or a predecessor, and by it or a successor.
   If the given order's peak equals the mandatory bytes at that layer, the order is optimal.
2. Layers that are comparable with all others divide the rest into segments. Each segment can be ordered alone.
3. The bytes alive after some layers of a segment depend only on the set of these layers. So the best order is a path of least
   maximum through sets. It is found by best-first search, like shortest paths by Dijkstra (`planning/sequence/search.py`). A
   layer or a chain runs at once if it does not exceed the maximum so far and leaves no more bytes alive than before. In any
   order of the rest, it could be moved here. A layer that only adds memory runs right before the layer that consumes its result
   (`LaunchRange.together`). So large tensors that are alive early are found soon. The same search backwards in time finds large
   tensors that are alive late. If there are too many sets, successive searches ignore small tensors; their bounds hold for the
   whole problem.
4. CP-SAT solves the remaining segments of up to `CP_LAYERS` layers (`planning/sequence/cp_sat.py`).

Segments keep the given order if it is as good. Other segments follow it as far as the peak allows, because weights are streamed
in it. Each search has a limit, and all searches of a problem together have another one (`_WORK`, `_CP_SECONDS`). Limits are
counts and CP-SAT's deterministic time, so that the same layers always get the same order. `Order.status` says whether a limit
ended the search.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Literal, get_args

from flashmem.planning.sequence.search import LaunchRange, WorkLimit, beam, near_given, search

Method = Literal["CP-SAT", "beam", "search", "as given"]
"""The method that found an order. If segments differ, the first of these that any segment used."""

Status = Literal["optimal", "tolerance", "limit"]
"""How the search for an order ended.

- "optimal": the peak equals the bound.
- "tolerance": the peak is so near the bound, or the peak of another order, that the search stopped.
- "limit": a search stopped at its limit. The order is the best one found until then, and its gap is unproven.
"""

CP_LAYERS = 60
"""The most layers in a segment that CP-SAT solves if the search proves no optimum."""

_TRIES = 20_000
"""The most extensions of partial orders by a layer in one search."""

_WORK = 50_000_000
"""`WorkLimit` of all searches for one problem together: about ten seconds of a processor core."""

_CP_SECONDS = 20.0
"""CP-SAT's deterministic time for all segments of one problem together."""

_WORTH = 0.005
"""The relative tolerance: a peak within this part of its bound, or of another order's peak, is good enough."""

_FREE = (1 << 6, 0, 1 << 9)
"""Successive searches ignore tensors smaller than the bound divided by one of these numbers (0: ignore none)."""


@dataclass(frozen=True)
class Held:
    """A tensor: the layers that touch it, and whether it is alive before all layers (`early`) or after them (`late`)."""

    nbytes: int
    layers: tuple[int, ...]
    early: bool = False
    late: bool = False


@dataclass(frozen=True)
class OrderProblem:
    """Layers by number, in the given order. `after[i]`: the predecessors of layer i, all of them below i."""

    after: tuple[tuple[int, ...], ...]
    tensors: tuple[Held, ...]

    def live(self, order: Sequence[int]) -> list[int]:
        """Bytes alive during each layer of `order`."""
        position = {layer: at for at, layer in enumerate(order)}
        change = [0] * (len(order) + 1)
        for tensor in self.tensors:
            if tensor.layers:
                places = [position[layer] for layer in tensor.layers]
                change[0 if tensor.early else min(places)] += tensor.nbytes
                change[len(order) if tensor.late else max(places) + 1] -= tensor.nbytes
        return list(accumulate(change))[: len(order)]


@dataclass(frozen=True)
class Order:
    """An order with its peak, the peak of the given order (`before`), and a lower bound for all orders; in bytes.

    `method`: the method that found the order of the moved layers. `status`: how the search ended.
    """

    layers: tuple[int, ...]
    before: int
    peak: int
    bound: int
    status: Status
    method: Method = "as given"

    @property
    def gap(self) -> float:
        """The relative distance of the peak from its lower bound."""
        return self.peak / self.bound - 1 if self.bound else 0.0


@lru_cache(maxsize=16)
def lowest_order(
    problem: OrderProblem,
    *,
    tries: int = _TRIES,
    work: int = _WORK,
    cp_seconds: float = 5.0,
    worth: float = _WORTH,
) -> Order:
    """The order with the lowest peak found within the limits. It keeps the given order in segments where that is as good.

    `tries`, `work`, `worth`: see `_TRIES`, `_WORK` and `_WORTH`. `cp_seconds`: CP-SAT's deterministic time for each segment;
    0 disables CP-SAT.
    """
    given = tuple(range(len(problem.after)))
    live = problem.live(given)
    before = max(live, default=0)
    relatives = _Relatives(problem)
    bound = max((relatives.mandatory(at) for at in given if live[at] == before), default=0)
    if before > bound * (1 + worth):
        bound = max(relatives.mandatory(at) for at in given)
    if before <= bound * (1 + worth):
        return Order(given, before, before, bound, "optimal" if before == bound else "tolerance")
    effort = _Effort(tries, WorkLimit(work), cp_seconds, _CP_SECONDS, worth)
    found: dict[int, tuple[_Found, LaunchRange]] = {}
    peak = bound
    for segment in sorted(_segments(problem, relatives, effort.work), key=lambda segment: -segment.given_peak):
        if segment.given_peak <= peak:
            break
        best = _solve(segment, bound, effort)
        bound = max(bound, best.bound)
        peak = max(peak, best.peak)
        found[segment.first] = best, segment
    stopped = any(best.stopped for best, _ in found.values())
    if before <= peak * (1 + worth):
        bound = min(bound, before)
        return Order(given, before, before, bound, _status(before, bound, worth, stopped=stopped))
    order = list(given)
    methods: set[Method] = set()
    for first, (best, segment) in found.items():
        if segment.given_peak > peak:
            local = near_given(segment, peak, tries) or best.order
            order[first : first + len(local)] = [first + at for at in local]
            methods.add(best.method)
    reached = max(problem.live(order))
    method: Method = next((each for each in get_args(Method) if each in methods), "as given")
    bound = min(bound, reached)
    return Order(tuple(order), before, reached, bound, _status(reached, bound, worth, stopped=stopped), method)


def _status(peak: int, bound: int, worth: float, *, stopped: bool) -> Status:
    """The status of an order. `stopped`: whether a limit ended the search of a segment with a gap."""
    if peak <= bound:
        return "optimal"
    return "limit" if stopped and peak > bound * (1 + worth) else "tolerance"


@dataclass
class _Effort:
    """The limits of the searches for one problem, and the rest of the limits that all segments share."""

    tries: int
    work: WorkLimit
    cp_seconds: float
    cp_seconds_left: float
    worth: float


class _Relatives:
    """The transitive predecessors and successors of each layer, as sets of bits."""

    def __init__(self, problem: OrderProblem) -> None:
        count = len(problem.after)
        self.before = [0] * count
        self.after = [0] * count
        for at, earlier in enumerate(problem.after):
            for each in earlier:
                self.before[at] |= self.before[each] | 1 << each
        for at in reversed(range(count)):
            for each in problem.after[at]:
                self.after[each] |= self.after[at] | 1 << at
        self._tensors = [(tensor, sum(1 << each for each in set(tensor.layers))) for tensor in problem.tensors if tensor.layers]

    def mandatory(self, layer: int) -> int:
        """Bytes alive while `layer` runs, in any order."""
        earlier = self.before[layer] | 1 << layer
        later = self.after[layer] | 1 << layer
        return sum(
            tensor.nbytes
            for tensor, touched in self._tensors
            if (tensor.early or touched & earlier) and (tensor.late or touched & later)
        )

    def separators(self) -> Iterator[int]:
        """The layers that are comparable with every other layer: before or after it in every order."""
        count = len(self.before)
        for at in range(count):
            if self.before[at].bit_count() + self.after[at].bit_count() == count - 1:
                yield at


def _segments(problem: OrderProblem, relatives: _Relatives, limit: WorkLimit) -> list[LaunchRange]:
    """The segments between layers that are comparable with all others. Each of those layers is a segment itself."""
    count = len(problem.after)
    cuts = set(relatives.separators())
    starts = [at for at in range(count) if at == 0 or at in cuts or at - 1 in cuts]
    number = [0] * count
    segments = []
    for index, (first, end) in enumerate(zip(starts, [*starts[1:], count], strict=True)):
        size = end - first
        number[first:end] = [index] * size
        needs = [sum(1 << each - first for each in problem.after[at] if each >= first) for at in range(first, end)]
        followers: list[list[int]] = [[] for _ in range(size)]
        for at in range(first, end):
            for each in set(problem.after[at]):
                if each >= first:
                    followers[each - first].append(at - first)
        segments.append(LaunchRange(first, needs, followers, [[] for _ in range(size)], [], 0, limit=limit))
    through = [0] * (len(segments) + 1)
    for tensor in problem.tensors:
        if not tensor.layers:
            continue
        parts: dict[int, set[int]] = {}
        for layer in tensor.layers:
            parts.setdefault(number[layer], set()).add(layer)
        begin = -1 if tensor.early else min(parts)
        end = len(segments) if tensor.late else max(parts)
        through[max(begin, 0)] += tensor.nbytes
        through[min(end, len(segments) - 1) + 1] -= tensor.nbytes
        for index, layers in parts.items():
            segment = segments[index]
            segment.base -= tensor.nbytes  # the segment counts this tensor individually
            mask = sum(1 << layer - segment.first for layer in layers)
            for layer in layers:
                segment.touched[layer - segment.first].append(len(segment.tensors))
            segment.tensors.append((tensor.nbytes, mask, begin < index, end > index))
    for segment, nbytes in zip(segments, accumulate(through), strict=False):
        segment.base += nbytes
        segment.given_peak = segment.peak(range(segment.count))
    return segments


@dataclass(frozen=True)
class _Found:
    """An order of a segment in its local numbers, its peak, and a bound on the peak of all orders of all layers.

    `stopped`: a limit ended the search, and the peak exceeds the bound by more than the tolerance.
    """

    order: Sequence[int]
    peak: int
    bound: int
    method: Method = "search"
    stopped: bool = False


def _solve(segment: LaunchRange, floor: int, effort: _Effort) -> _Found:
    """The best order found for a segment. `floor`: bytes that some layer of the problem needs in any order."""
    worth = effort.worth
    sizes = segment.true_sizes()
    best = _Found(range(segment.count), segment.given_peak, floor)
    finished = False
    backwards = segment.backwards()
    for divisor, way in itertools.product(_FREE, (segment, backwards)):
        free = best.bound // divisor if divisor else 0
        order, proven = search(way, best.bound, [size if size >= free else 0 for size in sizes], effort.tries)
        best = _better(best, order if order is None or way is segment else order[::-1], proven, segment, "search")
        finished |= order is not None
        if best.peak <= best.bound * (1 + worth) or (order is not None and free == 0):
            break
    if not finished and best.peak > best.bound * (1 + worth):
        best = _better(best, beam(segment, sizes), 0, segment, "beam")
    cp_seconds = min(effort.cp_seconds, effort.cp_seconds_left)
    if best.peak > best.bound * (1 + worth) and segment.count <= CP_LAYERS and cp_seconds > 0:
        from flashmem.planning.sequence.cp_sat import solve  # imports OR-tools only when it is needed

        order, proven, taken = solve(segment.needs, segment.tensors, segment.base, best.order, cp_seconds)
        effort.cp_seconds_left -= taken
        best = _better(best, order, proven, segment, "CP-SAT")
    return replace(best, stopped=best.peak > best.bound * (1 + worth))


def _better(best: _Found, order: Sequence[int] | None, proven: int, segment: LaunchRange, method: Method) -> _Found:
    bound = max(best.bound, proven)
    peak = best.peak if order is None else segment.peak(order)
    if order is None or peak >= best.peak:
        return _Found(best.order, best.peak, bound, best.method)
    return _Found(order, peak, bound, method)
