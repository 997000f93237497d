"""Search for orders of one segment's layers through the sets of layers that have run: see `planning/sequence/order.py`."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_WIDTH = 8
"""Beam width: the number of sets of one size to keep if all searches exceeded their limits."""


@dataclass
class WorkLimit:
    """The remaining work of all searches for one problem.

    A unit is one layer: run after a set of layers, or tested for whether it can run next. So work is proportional to time, but
    equal on every machine.
    """

    left: int

    @property
    def reached(self) -> bool:
        """Whether the limit is used up."""
        return self.left <= 0


@dataclass
class LaunchRange:
    """Layers from `first` on, in local numbers from 0. `base` bytes are alive during all of them.

    `touched`: the tensors of each layer; tensors are (bytes, layers that touch them as bits, early, late). `limit` counts the
    work of all searches; several segments share one.
    """

    first: int
    needs: list[int]
    followers: list[list[int]]
    touched: list[list[int]]
    tensors: list[tuple[int, int, bool, bool]]
    base: int
    given_peak: int = 0
    limit: WorkLimit = field(default_factory=lambda: WorkLimit(1 << 62))

    @property
    def count(self) -> int:
        """The number of layers."""
        return len(self.needs)

    @property
    def all(self) -> int:
        """The set of all its layers, as bits."""
        return (1 << self.count) - 1

    def start(self, sizes: Sequence[int]) -> int:
        """Bytes alive before its first layer."""
        return self.base + sum(size for size, (_, _, early, _) in zip(sizes, self.tensors, strict=True) if early)

    def step(self, sizes: Sequence[int], done: int, held: int, layer: int) -> tuple[int, int]:
        """Bytes alive while `layer` runs after the set `done`, and after it."""
        self.limit.left -= 1
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
        """The layers that can run after `layer`, in the given order; `done` already contains `layer`."""
        self.limit.left -= len(ready)
        new = self.newly_ready(done, layer)
        return tuple(sorted([*(each for each in ready if each != layer), *new])) if new else tuple(
            each for each in ready if each != layer
        )  # fmt: skip

    def newly_ready(self, done: int, layer: int) -> list[int]:
        """The layers that waited only for `layer`; `done` already contains it."""
        return [each for each in self.followers[layer] if not self.needs[each] & ~done]

    def backwards(self) -> LaunchRange:
        """The same segment with time reversed. An order of one and its reverse in the other have the same peak."""
        needs = [sum(1 << each for each in after) for after in self.followers]
        followers = [[each for each in range(self.count) if before >> each & 1] for before in self.needs]
        tensors = [(size, layers, late, early) for size, layers, early, late in self.tensors]
        return LaunchRange(self.first, needs, followers, self.touched, tensors, self.base, limit=self.limit)

    def together(self, sizes: Sequence[int]) -> list[int | None]:
        """By layer, the layer that can run directly after it without loss; None if that could be worse.

        Layer a may wait for layer b if b is its only successor, a is b's only predecessor, and three conditions hold. In every
        order, a makes at least as many bytes as it frees, so fewer bytes are alive while it waits. Layer b also makes at least
        as many as a frees, so a needs no more memory where it then runs. And no tensor that a frees has users later in some
        orders.
        """
        earlier = [0] * self.count
        later = [0] * self.count
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
            freed = 0
            waits = True
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
        """Bytes that become alive with `layer` in every order."""
        made = 0
        for index in self.touched[layer]:
            _, layers, early, _ = self.tensors[index]
            if not early and not layers & ~(1 << layer | later[layer]):
                made += sizes[index]
        return made

    def _in_order(self) -> list[int]:
        """The layers in topological order."""
        done = 0
        order = []
        ready = list(self.ready_first())
        while ready:
            layer = ready.pop()
            done |= 1 << layer
            order.append(layer)
            ready += self.newly_ready(done, layer)
        return order

    def ready_first(self) -> tuple[int, ...]:
        """The layers that can run first, in the given order."""
        return tuple(each for each in range(self.count) if not self.needs[each])

    def true_sizes(self) -> list[int]:
        """Bytes of each tensor, with no tensor ignored."""
        return [tensor[0] for tensor in self.tensors]

    def peak(self, order: Sequence[int]) -> int:
        """The most bytes alive in the given order of layers."""
        sizes = self.true_sizes()
        done = 0
        most = 0
        held = self.start(sizes)
        for layer in order:
            during, held = self.step(sizes, done, held, layer)
            most = max(most, during)
            done |= 1 << layer
        return most


def search(segment: LaunchRange, floor: int, sizes: Sequence[int], tries: int) -> tuple[list[int] | None, int]:
    """The order with the lowest peak, and a bound on the peak of all orders. Peaks below `floor` count as `floor`.

    The order is None if the search used up `tries` or the segment's limit. The bound holds even then.
    """
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
            if segment.limit.reached:
                return None, key
            most = key
            now = done
            then = held
            following = ready
            moves = []
            layer: int | None = first
            while layer is not None:
                during, then = segment.step(sizes, now, then, layer)
                most = max(most, during)
                now = now | 1 << layer
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
    segment: LaunchRange, sizes: Sequence[int], most: int, done: int, held: int, ready: tuple[int, ...], moves: list[int]
) -> tuple[int, int, tuple[int, ...]]:
    """Run layers, and chains of them, that fit `most` bytes and leave no more alive than before; append them to `moves`.

    It may stop anywhere: at the limit of work, or where no more layers can run.
    """
    at = 0
    while at < len(ready) and not segment.limit.reached:
        chain = _chain_down(segment, sizes, most, done, held, ready, ready[at])
        if chain is None:
            at += 1
        else:
            layers, done, held, ready = chain
            moves += layers
            at = 0
    return done, held, ready


def _chain_down(
    segment: LaunchRange, sizes: Sequence[int], most: int, done: int, held: int, ready: tuple[int, ...], layer: int
) -> tuple[list[int], int, int, tuple[int, ...]] | None:
    """The chain of layers from `layer` on, each the only one that its predecessor makes ready. It ends with the first that
    leaves at most `held` bytes alive. None if no layer does, or one exceeds `most`. More bytes are alive after each layer of
    the chain than after its last one. So in any order of the rest the whole chain can be moved here.
    """
    layers = []
    now = held
    while True:
        during, now = segment.step(sizes, done, now, layer)
        if during > most:
            return None
        done |= 1 << layer
        layers.append(layer)
        new = segment.newly_ready(done, layer)
        if now <= held:
            return layers, done, now, tuple(sorted({*ready, *new}.difference(layers)))
        if len(new) != 1:
            return None
        layer = new[0]


def _path(came: Mapping[int, tuple[int, list[int]]], done: int) -> list[int]:
    pieces = []
    while done in came:
        done, moves = came[done]
        pieces.append(moves)
    return [layer for moves in reversed(pieces) for layer in moves]


def beam(segment: LaunchRange, sizes: Sequence[int]) -> list[int] | None:
    """An order by beam search: keep only the best few sets of each size, by lowest peak, then by fewest bytes alive.

    None if the segment's limit of work is reached.
    """
    came: dict[int, tuple[int, list[int]]] = {}
    front = {0: (0, segment.start(sizes), segment.ready_first())}
    for _ in range(segment.count):
        following: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        if segment.limit.reached:
            return None
        for done, (peak, held, ready) in front.items():
            for layer in ready:
                during, after = segment.step(sizes, done, held, layer)
                now = done | 1 << layer
                most = max(peak, during)
                if now not in following or most < following[now][0]:
                    following[now] = most, after, segment.ready_after(ready, now, layer)
                    came[now] = done, [layer]
        kept = sorted(following.items(), key=lambda item: (item[1][:2], item[0]))[:_WIDTH]
        front = dict(kept)
    return _path(came, segment.all)


def near_given(segment: LaunchRange, limit: int, tries: int) -> list[int] | None:
    """An order within `limit` bytes that follows the given one as far as possible.

    None after `tries` dead ends, or if the segment's limit of work is reached.
    """
    sizes = segment.true_sizes()
    dead: set[int] = set()
    order: list[int] = []
    stack = [(0, segment.start(sizes), segment.ready_first(), 0)]  # executed, bytes, ready, index of the next one to try
    while stack:
        done, held, ready, at = stack.pop()
        if done == segment.all:
            return order
        if segment.limit.reached:
            return None
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
