"""In which order layers run, so that activations take the least memory at once.

Given are layers 0..n-1 in an order that works, which layers each comes after, and tensors: how many bytes, which layers write
or read them, whether they are there before the first layer runs (inputs) or after the last one (outputs). What shares memory (a
view and its source) is one tensor. An order runs each layer once, after those it comes after. A tensor is alive from the first
layer that touches it to the last one, both included. Wanted is an order whose *peak*, the most bytes alive during a layer, is
smallest. That is NP-hard (register allocation, Sethi 1975), but networks leave little choice:

1. A layer's *mandatory* tensors are alive while it runs in any order: touched by it or something before it, and by it or
   something after it. If the given order's peak is what is mandatory there, it is optimal.
2. Layers that are comparable with all others cut the rest into segments, each of which can be ordered alone.
3. What a segment holds after some of its layers is known from their set alone, so the best order is a path of least maximum
   through sets, found best first as Dijkstra finds shortest paths (`planning/sequence/search.py`). A layer, or a chain, that
   can run without passing the maximum so far and leaves no more alive than before is run at once: in any order of the rest, it
   could be moved here. One that only takes more memory runs right before the one that goes on with it (`Segment.together`). So
   what is large early is found soon, and, by the same search backwards in time, what is large late. Where sets are too many,
   small tensors are taken as free, in one search after the other; what those prove is a bound all the same.
4. CP-SAT takes the segments of up to `CP_LAYERS` layers that this leaves open (`planning/sequence/cp_sat.py`).

The given order is kept where it is as good, segment by segment, and followed as far as the peak allows elsewhere: weights are
streamed in it. Each search has a limit, and all searches of a problem together have one (`_WORK`, `_CP_SECONDS`). Limits are
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

from flashmem.planning.sequence.search import Segment, WorkLimit, beam, near_given, search

Method = Literal["CP-SAT", "beam", "search", "as given"]
"""What an order was found by: of several segments, the first of these that any was found by."""

Status = Literal["optimal", "tolerance", "limit"]
"""How the search for an order ended.

- "optimal": the peak equals the bound.
- "tolerance": the peak is so little above the bound, or above the peak of another order, that nothing more was searched.
- "limit": a search stopped at its limit. The order is the best one found until then, and its gap is what is not proven.
"""

CP_LAYERS = 60
"""Segments of at most as many layers are given to CP-SAT where the search proves no optimum."""

_TRIES = 20_000
"""Layers that one search tries at the ends of orders."""

_WORK = 50_000_000
"""`WorkLimit` of all searches for one problem together: some ten seconds of a processor core."""

_CP_SECONDS = 20.0
"""CP-SAT's deterministic time for all segments of one problem together."""

_WORTH = 0.005
"""A peak that is above its bound, or above another order's, by no more than this part is good enough."""

_FREE = (1 << 6, 0, 1 << 9)
"""Tensors of less than a part of the bound (its divisor; 0: none) are taken as free in one search after the other."""


@dataclass(frozen=True)
class Held:
    """A tensor: which layers touch it, and whether it is there before all layers (`early`), or after them (`late`)."""

    nbytes: int
    layers: tuple[int, ...]
    early: bool = False
    late: bool = False


@dataclass(frozen=True)
class OrderProblem:
    """Layers by number, in the given order; `after[i]` are those that layer i comes after, all of them below i."""

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
    """An order, the peak of the given one (`before`) and its own, and a bound that no order is below; in bytes.

    `method`: what found the order of those layers that are not in the given one. `status`: how the search ended.
    """

    layers: tuple[int, ...]
    before: int
    peak: int
    bound: int
    status: Status
    method: Method = "as given"

    @property
    def gap(self) -> float:
        """By what part the peak may be above the best one."""
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
    """The order with the lowest peak that was found within the limits. The given order is kept as far as it is as good.

    `tries`, `work`, `worth`: see `_TRIES`, `_WORK` and `_WORTH`. `cp_seconds`: of CP-SAT's deterministic time, for each
    segment; 0: none.
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
    found: dict[int, tuple[_Found, Segment]] = {}
    peak = bound
    for segment in sorted(_segments(problem, relatives, effort.work), key=lambda segment: -segment.given_peak):
        if segment.given_peak <= peak:
            break
        best = _solve(segment, bound, effort)
        bound, peak = max(bound, best.bound), max(peak, best.peak)
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
    """`stopped`: whether a limit ended the search of a segment with a gap."""
    if peak <= bound:
        return "optimal"
    return "limit" if stopped and peak > bound * (1 + worth) else "tolerance"


@dataclass
class _Effort:
    """The limits of the searches for one problem, and what is left of those that all segments share."""

    tries: int
    work: WorkLimit
    cp_seconds: float
    cp_seconds_left: float
    worth: float


class _Relatives:
    """What comes before and after each layer in every order, as sets of bits."""

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
        """Bytes alive while `layer` runs, whatever the order."""
        earlier, later = self.before[layer] | 1 << layer, self.after[layer] | 1 << layer
        return sum(
            tensor.nbytes
            for tensor, touched in self._tensors
            if (tensor.early or touched & earlier) and (tensor.late or touched & later)
        )

    def separators(self) -> Iterator[int]:
        """The layers that come before or after each other one in every order."""
        count = len(self.before)
        for at in range(count):
            if self.before[at].bit_count() + self.after[at].bit_count() == count - 1:
                yield at


def _segments(problem: OrderProblem, relatives: _Relatives, limit: WorkLimit) -> list[Segment]:
    """The pieces between layers that are comparable with all others; those are pieces of one layer themselves."""
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
        segments.append(Segment(first, needs, followers, [[] for _ in range(size)], [], 0, limit=limit))
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
            segment.base -= tensor.nbytes  # it is counted by itself there
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
    """An order of a segment by its own numbers, its peak, and a bound on the peak of all orders of all layers.

    `stopped`: a limit ended the search, and the peak is above the bound by more than the tolerance.
    """

    order: Sequence[int]
    peak: int
    bound: int
    method: Method = "search"
    stopped: bool = False


def _solve(segment: Segment, floor: int, effort: _Effort) -> _Found:
    """The best order of a segment that was found. `floor`: what some layer needs in any order, here or elsewhere."""
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
        from flashmem.planning.sequence.cp_sat import solve  # OR-tools is imported where it runs

        order, proven, taken = solve(segment.needs, segment.tensors, segment.base, best.order, cp_seconds)
        effort.cp_seconds_left -= taken
        best = _better(best, order, proven, segment, "CP-SAT")
    return replace(best, stopped=best.peak > best.bound * (1 + worth))


def _better(best: _Found, order: Sequence[int] | None, proven: int, segment: Segment, method: Method) -> _Found:
    bound = max(best.bound, proven)
    peak = best.peak if order is None else segment.peak(order)
    if order is None or peak >= best.peak:
        return _Found(best.order, best.peak, bound, best.method)
    return _Found(order, peak, bound, method)
