"""The objective `first`: the plan that answers soonest inside M_peak, and then holds least on average.

W is only what must be there before layer 1 (and what the caller asks for): a preloaded weight delays layer 1 and keeps its
bytes for good. Every other weight is read in use order, as early as memory permits. Among plans that read whole slices in use
order no other is faster but for what moving slows down. Then gates are closed as late as nobody notices. It takes O(n log
n), so
a plan can be made again whenever the budget changes.

lambda weighs latency against memory: from M_peak at 0 (fastest) to the least that works at 1 (smallest), what a plan may hold
shrinks in proportion, and the plan is the fastest that holds no more. So a sweep of lambda traces the Pareto front.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import accumulate

from flashmem.errors import BudgetError
from flashmem.planning.assemble import assemble, moved_chunks
from flashmem.planning.clock import Clock, Moves, fastest_seconds, play
from flashmem.planning.gates import MARGIN, closed_late, earliest_gates, gates_ahead, held_bytes
from flashmem.planning.plan import OverlapPlan
from flashmem.planning.problem import Problem, WeightSpec


def forced_preload(problem: Problem, preload: Collection[str] = ()) -> frozenset[str]:
    """The least W: `preload` and the weights of layer 1, which no earlier layer can load."""
    return frozenset(preload) | {w.name for w in problem.weights if w.first_use == 1}


def smallest_m_peak(problem: Problem, preload: Collection[str] = ()) -> tuple[int, str]:
    """The smallest M_peak (bytes) that some plan with W = `forced_preload` keeps to, and the name of the layer that binds.

    All of a weight is moved before the layer that uses it, so at layer l its own weights are in flight together with those
    first
    used at layer l + 1, which mode `interleave` holds in staging too. Load capacities do not count: they can be relaxed.
    """
    return _in_use(problem, forced_preload(problem, preload), 2 if problem.mode == "interleave" else 1)


def least_in_use(problem: Problem, preload: Collection[str] = ()) -> int:
    """The same without staging: what `earliest_gates` needs."""
    return _in_use(problem, forced_preload(problem, preload), 1)[0]


def _in_use(problem: Problem, chosen: frozenset[str], copies: int) -> tuple[int, str]:
    """`copies`: of a weight at the layer before its first use."""
    change = [0] * (len(problem.layers) + 2)
    for w in problem.weights:
        if w.name not in chosen:
            change[w.first_use - 1] += copies * w.nbytes
            change[w.first_use] -= (copies - 1) * w.nbytes
            change[w.last_use + 1] -= w.nbytes
    needed = list(accumulate(change))[1 : len(problem.layers) + 1]
    if not needed:
        return 0, ""
    layer = max(range(len(needed)), key=needed.__getitem__)
    return needed[layer], problem.layers[layer].name


def require_m_peak(problem: Problem, preload: Collection[str]) -> None:
    """Check that M_peak is enough for some plan.

    Raises:
        BudgetError: it is not.
    """
    smallest, binding = smallest_m_peak(problem, preload)
    if problem.m_peak < smallest:
        raise BudgetError(
            f"M_peak of {problem.m_peak} bytes is too small: layer {binding!r} and the loads for the next layer need "
            f"{smallest} bytes in flight at once; raise the limit to {smallest} bytes or more",
            smallest_bytes=smallest,
            binding=binding,
        )


def late_moves(problem: Problem, gates: Mapping[str, int], clock: Clock) -> dict[str, tuple[tuple[int, int], ...]]:
    """x_{w,l} of the streamed weights: within C_l where that can be, above it where it costs least.

    A chunk is moved between g_w (in mode `interleave`: the layer that first starts with its weight read) and i_w - 1. These
    windows open and close in use order, so serving the latest use first, walking backwards, keeps most chunks within capacity.
    What is left is spread over the window in proportion to the layers' latency, none of it beside hierarchical operators
    unless there is nothing else.
    """
    queue = sorted((w for w in problem.weights if gates[w.name]), key=lambda w: w.first_use)
    waits = problem.mode == "interleave"
    opens = [
        min(w.first_use - 1, max(gates[w.name], bisect_left(clock.started, clock.loaded[w.name]) + 1 if waits else 0))
        for w in queue
    ]
    left = [problem.chunks(w) for w in queue]
    moves: list[dict[int, int]] = [{} for _ in queue]
    waiting: list[int] = []  # latest use first; those before `head` are finished, or their window has closed
    head, unseen = 0, len(queue) - 1
    for layer in range(len(problem.layers), 0, -1):
        while unseen >= 0 and queue[unseen].first_use > layer:
            waiting.append(unseen)
            unseen -= 1
        room = problem.layers[layer - 1].capacity
        while room and head < len(waiting):
            index = waiting[head]
            if layer < opens[index] or not left[index]:
                head += 1
                continue
            taken = min(room, left[index])
            moves[index][layer] = taken
            left[index] -= taken
            room -= taken
    spread = _Spread(problem)
    for index, w in enumerate(queue):
        spread.add(moves[index], left[index], opens[index], w)
    return {w.name: tuple(sorted(parts.items())) for w, parts in zip(queue, moves, strict=True)}


class _Spread:
    """Shares chunks among the layers of a window in proportion to their latency."""

    def __init__(self, problem: Problem) -> None:
        able = [0.0 if spec.operator_class == "hierarchical" else spec.seconds for spec in problem.layers]
        self.able = [0.0, *accumulate(able)]
        self.any = [0.0, *accumulate(spec.seconds for spec in problem.layers)]

    def add(self, moves: dict[int, int], chunks: int, opens: int, w: WeightSpec) -> None:
        """Add `chunks` to `moves`, at layers `opens` to i_w - 1."""
        last = w.first_use - 1
        reach = self.able if self.able[last] > self.able[opens - 1] else self.any
        low, high = reach[opens - 1], reach[last]
        for part in range(chunks):
            at = bisect_left(reach, low + (high - low) * (part + 0.5) / chunks, opens, last)
            moves[at] = moves.get(at, 0) + 1


def read_and_move(problem: Problem, preload: frozenset[str], limit: int) -> tuple[dict[str, int], Moves, Clock]:
    """Gates, moves and their clock for W = `preload`, holding at most `limit` bytes (at least `smallest_m_peak`).

    Gates open as early as whole slices fit. Where staging makes that too much, they open in a smaller part of `limit`.
    """
    least = least_in_use(problem, preload)
    for step in range(_STEPS + 1):
        within = limit - (limit - least) * step // _STEPS
        gates = earliest_gates(problem, preload, within)
        moves = late_moves(problem, gates, play(problem, gates))
        if problem.mode != "interleave" or int(held_bytes(problem, gates, moves).max()) <= limit:
            break
    else:  # every weight in the layer before its use, and read ahead as far as there is room
        moves = {w.name: ((w.first_use - 1, problem.chunks(w)),) for w in problem.weights if w.name not in preload}
        gates = gates_ahead(problem, preload, moves, limit)
    clock = play(problem, gates, moves)
    slow = replace(problem, load_bandwidth=problem.load_bandwidth / MARGIN, host_bandwidth=problem.host_bandwidth / MARGIN)
    slowly = play(slow, gates, moves).seconds
    for queued in (True, False):
        late = closed_late(problem, gates, moves, clock, queued=queued)
        closed = play(problem, late, moves)
        noticed = closed.seconds > clock.seconds * (1 + _NOTICED)
        if not noticed and (not queued or play(slow, late, moves).seconds <= slowly * (1 + _NOTICED)):
            return late, moves, closed
    return gates, moves, clock


_STEPS = 8
"""Parts of the limit that are tried for what stays at home where staging comes on top."""

_NOTICED = 1e-9
"""A share of the latency that closing gates late may cost: rounding."""


def allowance(problem: Problem, preload: Collection[str], lambda_: float) -> int:
    """The most bytes in flight that lambda admits: from M_peak at 0 to `smallest_m_peak` at 1."""
    smallest, _ = smallest_m_peak(problem, preload)
    chosen = forced_preload(problem, preload)
    streamed = sum(w.nbytes for w in problem.weights if w.name not in chosen)
    most = min(problem.m_peak, max(smallest, streamed * (2 if problem.mode == "interleave" else 1)))
    return smallest + int((most - smallest) * (1 - lambda_))


def first_plan(problem: Problem, preload: Collection[str] = (), *, lambda_: float = 0.0) -> OverlapPlan:
    """The fastest plan inside M_peak (or what lambda leaves of it); `objective` and `bound` are seconds of integrated latency.

    The bound holds for every plan with this W that holds no more (see `fastest_seconds`).

    Raises:
        BudgetError: M_peak is below `smallest_m_peak`.
    """
    begun = time.monotonic()
    require_m_peak(problem, preload)
    chosen = forced_preload(problem, preload)
    limit = allowance(problem, preload, lambda_)
    gates, moves, clock = read_and_move(problem, chosen, limit)
    seconds, bound = clock.seconds, fastest_seconds(replace(problem, m_peak=limit), chosen)
    if seconds - bound <= 1e-9 * seconds:
        bound = seconds
    relaxed = any(n > spec.capacity for n, spec in zip(moved_chunks(problem, moves), problem.layers, strict=True))
    return assemble(
        problem, chosen, gates, moves, kind="first", lambda_=lambda_, objective=seconds, bound=bound,
        tier="soft-threshold" if relaxed else "greedy", started=begun, base=chosen, asked=preload,
        notes=("every weight is read in use order, as early as M_peak permits; the bound holds for this W",),
    )  # fmt: skip
