"""The latency objective: the plan that answers soonest inside M_peak.

W is only what must be there before layer 1 (and what the caller asks for): a preloaded weight delays layer 1 and keeps its
bytes for good. Every other weight is loaded in use order, as early as memory permits, whole slices counted from z_w to the last
use, because that is what the runtime allocates. Among plans that load whole slices in use order no other is faster. It takes
O(n log n), so a plan can be made again whenever the budget changes.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Collection
from itertools import accumulate

from flashmem.errors import BudgetError
from flashmem.planning.assemble import assemble, moved_chunks
from flashmem.planning.clock import Clock, fastest_seconds, play
from flashmem.planning.plan import OverlapPlan
from flashmem.planning.problem import Problem, WeightSpec


def forced_preload(problem: Problem, preload: Collection[str] = ()) -> frozenset[str]:
    """The least W: `preload` and the weights of layer 1, which no earlier layer can load."""
    return frozenset(preload) | {w.name for w in problem.weights if w.first_use == 1}


def smallest_m_peak(problem: Problem, preload: Collection[str] = ()) -> tuple[int, str]:
    """The smallest M_peak (bytes) that some plan with W = `forced_preload` keeps to, and the name of the layer that binds.

    All chunks of a weight are moved before the layer that uses it, so at layer l its own weights are in flight together with
    those first used at layer l + 1. Load capacities do not count: they can be relaxed.
    """
    chosen = forced_preload(problem, preload)
    change = [0] * (len(problem.layers) + 2)
    for w in problem.weights:
        if w.name not in chosen:
            change[w.first_use - 1] += w.nbytes
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


def earliest_load_layers(problem: Problem, preload: Collection[str]) -> dict[str, int]:
    """z_w of every weight (0 for W): in use order, each as early as M_peak permits for whole slices.

    Raises:
        BudgetError: M_peak is below `smallest_m_peak`.
    """
    require_m_peak(problem, preload)
    load_layers = {w.name: 0 for w in problem.weights if w.name in preload}
    freed = [0] * (len(problem.layers) + 1)
    layer, resident = 1, 0  # bytes of the weights placed so far whose last use is at `layer` or later
    for w in sorted((w for w in problem.weights if w.name not in preload), key=lambda w: w.first_use):
        while resident + w.nbytes > problem.m_peak:
            resident -= freed[layer]
            layer += 1
        load_layers[w.name] = layer
        resident += w.nbytes
        freed[w.last_use] += w.nbytes
    return load_layers


def late_moves(problem: Problem, load_layers: dict[str, int], clock: Clock) -> dict[str, tuple[tuple[int, int], ...]]:
    """x_{w,l} of the streamed weights: within C_l where that can be, above it where it costs least.

    A chunk is moved between the layer that first starts with its weight loaded (a move waits for its load) and i_w - 1. These
    windows open and close in use order, so serving the latest use first, walking backwards, keeps most chunks within capacity.
    What is left is spread over the window in proportion to the layers' latency, none of it beside hierarchical operators
    unless there is nothing else.
    """
    queue = sorted((w for w in problem.weights if load_layers[w.name]), key=lambda w: w.first_use)
    opens = [
        min(w.first_use - 1, max(load_layers[w.name], bisect_left(clock.started, clock.loaded[w.name]) + 1)) for w in queue
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


def latency_plan(problem: Problem, preload: Collection[str] = (), *, lambda_: float = 0.9) -> OverlapPlan:
    """The fastest plan inside M_peak; `objective` and `bound` are seconds of integrated latency.

    The bound holds for every plan with this W (see `fastest_seconds`). `lambda_` is only written down.

    Raises:
        BudgetError: M_peak is below `smallest_m_peak`.
    """
    begun = time.monotonic()
    chosen = forced_preload(problem, preload)
    load_layers = earliest_load_layers(problem, chosen)
    clock = play(problem, load_layers)
    moves = late_moves(problem, load_layers, clock)
    seconds, bound = clock.seconds, fastest_seconds(problem, chosen)
    if seconds - bound <= 1e-9 * seconds:
        bound = seconds
    relaxed = any(n > spec.capacity for n, spec in zip(moved_chunks(problem, moves), problem.layers, strict=True))
    return assemble(
        problem, chosen, load_layers, moves, kind="latency", lambda_=lambda_, objective=seconds, bound=bound,
        tier="soft-threshold" if relaxed else "greedy", started=begun, base=chosen, asked=preload,
        notes=("every weight is loaded in use order, as early as M_peak permits; the bound holds for this W",),
    )  # fmt: skip
