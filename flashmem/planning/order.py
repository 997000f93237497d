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
   through sets, found best first (as Dijkstra finds shortest paths). A layer, or a chain of them, that can run without passing
   the maximum so far and leaves no more alive than before is run at once: in any order of the rest, it could be moved here. One
   that only takes more memory runs right before the one that goes on with it (`_Segment.together`). So what is large early is
   found soon, and, by the same search backwards in time, what is large late. Where sets are too many, small tensors are taken
   as free, in one search after the other; what those prove is a bound all the same.
4. CP-SAT takes the segments of up to `CP_LAYERS` layers that this leaves open (`planning/order_cp.py`).

The given order is kept where it is as good, segment by segment, and followed as far as the peak allows elsewhere: weights are
streamed in it. Limits are counts, not seconds, so that the same layers always get the same order.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal, get_args

Method = Literal["CP-SAT", "beam", "search", "as given"]
"""What an order was found by: of several segments, the first of these that any was found by."""

CP_LAYERS = 60
"""Segments of at most as many layers are given to CP-SAT where the search proves no optimum."""

_TRIES = 20_000
"""Layers that one search tries at the ends of orders."""

_WIDTH = 8
"""Sets of one size that are kept where all searches were too long."""

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
    """An order, the peak of the given one (`before`) and its own, and a bound that no order is below; in bytes. `method`: what
    found the order of those layers that are not in the given one.
    """

    layers: tuple[int, ...]
    before: int
    peak: int
    bound: int
    method: Method = "as given"

    @property
    def gap(self) -> float:
        """By what part the peak may be above the best one."""
        return self.peak / self.bound - 1 if self.bound else 0.0


@lru_cache(maxsize=16)
def lowest_order(problem: OrderProblem, *, tries: int = _TRIES, cp_seconds: float = 5.0, worth: float = _WORTH) -> Order:
    """An order of a peak as low as was found, never higher than the given order's, which is kept as far as it is as good.

    `tries`, `worth`: see `_TRIES` and `_WORTH`. `cp_seconds`: of CP-SAT's deterministic time, for each segment; 0: none.
    """
    given = tuple(range(len(problem.after)))
    live = problem.live(given)
    before = max(live, default=0)
    relatives = _Relatives(problem)
    bound = max((relatives.mandatory(at) for at in given if live[at] == before), default=0)
    if before > bound * (1 + worth):
        bound = max(relatives.mandatory(at) for at in given)
    if before <= bound * (1 + worth):
        return Order(given, before, before, bound)
    found: dict[int, tuple[_Found, _Segment]] = {}
    peak = bound
    for segment in sorted(_segments(problem, relatives), key=lambda segment: -segment.given_peak):
        if segment.given_peak <= peak:
            break
        best = _solve(segment, bound, tries, cp_seconds, worth)
        bound, peak = max(bound, best.bound), max(peak, best.peak)
        found[segment.first] = best, segment
    if before <= peak * (1 + worth):
        return Order(given, before, before, min(bound, before))
    order = list(given)
    methods: set[Method] = set()
    for first, (best, segment) in found.items():
        if segment.given_peak > peak:
            local = _near_given(segment, peak, tries) or best.order
            order[first : first + len(local)] = [first + at for at in local]
            methods.add(best.method)
    reached = max(problem.live(order))
    method: Method = next((each for each in get_args(Method) if each in methods), "as given")
    return Order(tuple(order), before, reached, min(bound, reached), method)


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


@dataclass
class _Segment:
    """Layers `first`.. by numbers of their own, from 0 on; `base` bytes are alive during all of them.

    `touched`: the tensors of each layer; tensors are (bytes, layers that touch them as bits, early, late).
    """

    first: int
    needs: list[int]
    followers: list[list[int]]
    touched: list[list[int]]
    tensors: list[tuple[int, int, bool, bool]]
    base: int
    given_peak: int = 0

    @property
    def count(self) -> int:
        return len(self.needs)

    @property
    def all(self) -> int:
        return (1 << self.count) - 1

    def start(self, sizes: Sequence[int]) -> int:
        """Bytes alive before its first layer."""
        return self.base + sum(size for size, (_, _, early, _) in zip(sizes, self.tensors, strict=True) if early)

    def step(self, sizes: Sequence[int], done: int, held: int, layer: int) -> tuple[int, int]:
        """Bytes alive while `layer` runs after `done`, and after it."""
        made = gone = 0
        now = done | 1 << layer
        for index in self.touched[layer]:
            _, layers, early, late = self.tensors[index]
            if not early and not layers & done:
                made += sizes[index]
            if not late and not layers & ~now:
                gone += sizes[index]
        return held + made, held + made - gone

    def ready_after(self, ready: tuple[int, ...], done: int, layer: int) -> tuple[int, ...]:
        """What can run next, in the given order, once `layer` has; `done` has it already."""
        new = [each for each in self.followers[layer] if not self.needs[each] & ~done]
        return tuple(sorted([*(each for each in ready if each != layer), *new])) if new else tuple(
            each for each in ready if each != layer
        )  # fmt: skip

    def backwards(self) -> _Segment:
        """The same segment, with time running backwards: orders of the same peak are each other's reverse."""
        needs = [sum(1 << each for each in after) for after in self.followers]
        followers = [[each for each in range(self.count) if before >> each & 1] for before in self.needs]
        tensors = [(size, layers, late, early) for size, layers, early, late in self.tensors]
        return _Segment(self.first, needs, followers, self.touched, tensors, self.base)

    def together(self, sizes: Sequence[int]) -> list[int | None]:
        """The layer that may as well run right after each layer; None if that could be worse.

        Layer a may wait for the only layer b that goes on with it, and with nothing else, if what a makes in any order is no
        less than what it is the last to need (so that less is alive while it waits), b makes no less either (so that a needs
        no more where it runs then), and a cannot be the last to need what others, in some orders, need later.
        """
        earlier, later = [0] * self.count, [0] * self.count
        for layer in self._in_order():
            for each in self.followers[layer]:
                earlier[each] |= earlier[layer] | 1 << layer
        for layer in reversed(self._in_order()):
            for each in self.followers[layer]:
                later[layer] |= later[each] | 1 << each
        found: list[int | None] = [None] * self.count
        for layer, followers in enumerate(self.followers):
            if len(followers) != 1 or self.needs[followers[0]] != 1 << layer:
                continue
            freed, waits = 0, True
            for index in self.touched[layer]:
                _, layers, _, late = self.tensors[index]
                others = layers & ~(1 << layer)
                if not late and not others & later[layer]:
                    freed += sizes[index]
                    waits &= not others & ~earlier[layer]
            if waits and min(self._made(sizes, layer, later), self._made(sizes, followers[0], later)) >= freed:
                found[layer] = followers[0]
        return found

    def _made(self, sizes: Sequence[int], layer: int, later: Sequence[int]) -> int:
        """Bytes that begin to be alive with `layer` in every order."""
        made = 0
        for index in self.touched[layer]:
            _, layers, early, _ = self.tensors[index]
            if not early and not layers & ~(1 << layer | later[layer]):
                made += sizes[index]
        return made

    def _in_order(self) -> list[int]:
        """The layers, each after those it needs."""
        done, order = 0, []
        ready = list(self.ready_first())
        while ready:
            layer = ready.pop()
            done |= 1 << layer
            order.append(layer)
            ready += [each for each in self.followers[layer] if not self.needs[each] & ~done]
        return order

    def ready_first(self) -> tuple[int, ...]:
        return tuple(each for each in range(self.count) if not self.needs[each])

    def true_sizes(self) -> list[int]:
        return [tensor[0] for tensor in self.tensors]

    def peak(self, order: Sequence[int]) -> int:
        """The most bytes alive in that order."""
        sizes, done, most = self.true_sizes(), 0, 0
        held = self.start(sizes)
        for layer in order:
            during, held = self.step(sizes, done, held, layer)
            most = max(most, during)
            done |= 1 << layer
        return most


def _segments(problem: OrderProblem, relatives: _Relatives) -> list[_Segment]:
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
        segments.append(_Segment(first, needs, followers, [[] for _ in range(size)], [], 0))
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
    """An order of a segment by its own numbers, its peak, and a bound on the peak of all orders of all layers."""

    order: Sequence[int]
    peak: int
    bound: int
    method: Method = "search"


def _solve(segment: _Segment, floor: int, tries: int, cp_seconds: float, worth: float) -> _Found:
    """The best order of a segment that was found. `floor`: what some layer needs in any order, here or elsewhere."""
    sizes = segment.true_sizes()
    best = _Found(range(segment.count), segment.given_peak, floor)
    finished = False
    backwards = segment.backwards()
    for divisor, way in itertools.product(_FREE, (segment, backwards)):
        free = best.bound // divisor if divisor else 0
        order, proven = _search(way, best.bound, [size if size >= free else 0 for size in sizes], tries)
        best = _better(best, order if order is None or way is segment else order[::-1], proven, segment, "search")
        finished |= order is not None
        if best.peak <= best.bound * (1 + worth) or (order is not None and free == 0):
            break
    if not finished and best.peak > best.bound * (1 + worth):
        best = _better(best, _beam(segment, sizes), 0, segment, "beam")
    if best.peak > best.bound * (1 + worth) and segment.count <= CP_LAYERS and cp_seconds > 0:
        from flashmem.planning.order_cp import solve  # OR-tools is imported where it runs

        order, proven = solve(segment.needs, segment.tensors, segment.base, best.order, cp_seconds)
        best = _better(best, order, proven, segment, "CP-SAT")
    return best


def _better(best: _Found, order: Sequence[int] | None, proven: int, segment: _Segment, method: Method) -> _Found:
    bound = max(best.bound, proven)
    peak = best.peak if order is None else segment.peak(order)
    if order is None or peak >= best.peak:
        return _Found(best.order, best.peak, bound, best.method)
    return _Found(order, peak, bound, method)


def _search(segment: _Segment, floor: int, sizes: Sequence[int], tries: int) -> tuple[list[int] | None, int]:
    """The order of the smallest peak, counting none below `floor`, and a bound; None if `tries` are too few for it."""
    together = segment.together(sizes)
    reached: dict[int, int] = {0: floor}
    came: dict[int, tuple[int, list[int]]] = {}
    heap = [(floor, segment.count, 0, segment.start(sizes), segment.ready_first())]
    tried = 0
    while heap:
        key, _, done, held, ready = heapq.heappop(heap)
        if key > reached[done]:
            continue
        if done == segment.all:
            return _path(came, done), key
        if tried >= tries:
            return None, key
        tried += len(ready) ** 2
        for first in ready:
            most, now, then, following, moves = key, done, held, ready, []
            layer: int | None = first
            while layer is not None:
                during, then = segment.step(sizes, now, then, layer)
                most, now = max(most, during), now | 1 << layer
                following = segment.ready_after(following, now, layer)
                moves.append(layer)
                layer = together[layer]
            now, then, following = _run_on(segment, sizes, most, now, then, following, moves)
            if most < reached.get(now, most + 1):
                reached[now] = most
                came[now] = done, moves
                heapq.heappush(heap, (most, segment.count - now.bit_count(), now, then, following))
    raise AssertionError("layers come after each other in a circle")


def _run_on(
    segment: _Segment, sizes: Sequence[int], most: int, done: int, held: int, ready: tuple[int, ...], moves: list[int]
) -> tuple[int, int, tuple[int, ...]]:
    """Run what can run within `most` bytes and leaves no more than before, layers and chains of them; `moves` gets it."""
    at = 0
    while at < len(ready):
        chain = _chain_down(segment, sizes, most, done, held, ready, ready[at])
        if chain is None:
            at += 1
        else:
            layers, done, held, ready = chain
            moves += layers
            at = 0
    return done, held, ready


def _chain_down(
    segment: _Segment, sizes: Sequence[int], most: int, done: int, held: int, ready: tuple[int, ...], layer: int
) -> tuple[list[int], int, int, tuple[int, ...]] | None:
    """From `layer` on, layers of which each alone becomes ready by the one before, up to the first that leaves no more than
    `held`; None if none does, or one passes `most`. More is alive after each of them than after the last, so in any order of
    the rest they can all be moved here.
    """
    layers, now = [], held
    while True:
        during, now = segment.step(sizes, done, now, layer)
        if during > most:
            return None
        before, done = ready, done | 1 << layer
        ready = segment.ready_after(before, done, layer)
        layers.append(layer)
        if now <= held:
            return layers, done, now, ready
        new = [each for each in ready if each not in before]
        if len(new) != 1:
            return None
        layer = new[0]


def _path(came: Mapping[int, tuple[int, list[int]]], done: int) -> list[int]:
    pieces = []
    while done in came:
        done, moves = came[done]
        pieces.append(moves)
    return [layer for moves in reversed(pieces) for layer in moves]


def _beam(segment: _Segment, sizes: Sequence[int]) -> list[int]:
    """An order by keeping only the best few sets of each size: those of the lowest peak, then of the fewest bytes."""
    came: dict[int, tuple[int, list[int]]] = {}
    front = {0: (0, segment.start(sizes), segment.ready_first())}
    for _ in range(segment.count):
        following: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for done, (peak, held, ready) in front.items():
            for layer in ready:
                during, after = segment.step(sizes, done, held, layer)
                now, most = done | 1 << layer, max(peak, during)
                if now not in following or most < following[now][0]:
                    following[now] = most, after, segment.ready_after(ready, now, layer)
                    came[now] = done, [layer]
        kept = sorted(following.items(), key=lambda item: (item[1][:2], item[0]))[:_WIDTH]
        front = dict(kept)
    return _path(came, segment.all)


def _near_given(segment: _Segment, limit: int, tries: int) -> list[int] | None:
    """An order within `limit` bytes that keeps to the given one where it can; None if looking for it takes too long."""
    sizes = segment.true_sizes()
    dead: set[int] = set()
    order: list[int] = []
    stack = [(0, segment.start(sizes), segment.ready_first(), 0)]  # executed, bytes, ready, the next of them to try
    while stack:
        done, held, ready, at = stack.pop()
        if done == segment.all:
            return order
        for index in range(at, len(ready)):
            layer = ready[index]
            during, after = segment.step(sizes, done, held, layer)
            now = done | 1 << layer
            if during <= limit and now not in dead:
                stack.append((done, held, ready, index + 1))
                stack.append((now, after, segment.ready_after(ready, now, layer), 0))
                order.append(layer)
                break
        else:
            dead.add(done)
            if len(dead) > tries or not order:
                return None
            order.pop()
    return None
