"""Random planning problems, and reference solutions of small ones by exhaustive search."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, product

from hypothesis import strategies as st

from flashmem.planning.latency.first_answer import first_plan
from flashmem.planning.latency.front import leaner
from flashmem.planning.why import in_flight_bytes
from flashmem.program.launches import Arg, Launch
from flashmem.program.program import Program
from flashmem.program.tensors import Slice
from flashmem.schedule.instance import Instance, LayerSpec, WeightSpec
from flashmem.schedule.plan import OverlapPlan

CLASSES = ("elemental", "reusable", "hierarchical")


def layers_of(capacities: list[int], seconds: float = 1.0) -> tuple[LayerSpec, ...]:
    return tuple(LayerSpec(f"layer{n}", "reusable", c, seconds) for n, c in enumerate(capacities, start=1))


@st.composite
def instances(
    draw: st.DrawFn,
    *,
    most_layers: int = 12,
    most_weights: int = 12,
    most_chunks: int = 6,
    whole_chunks: bool = False,
    shared: bool = True,
) -> Instance:
    """Layers of every class, weights of any size (in whole chunks if requested), some used again later."""
    count = draw(st.integers(1, most_layers))
    chunk = draw(st.sampled_from([1, 4, 7, 16]))
    layers = tuple(
        LayerSpec(f"layer{n}", draw(st.sampled_from(CLASSES)), draw(st.integers(0, 4)), draw(st.integers(1, 20)) / 8)
        for n in range(1, count + 1)
    )
    weights = []
    for n in range(draw(st.integers(0, most_weights))):
        nbytes = draw(st.integers(1, most_chunks)) * chunk - (0 if whole_chunks else draw(st.integers(0, chunk - 1)))
        first = draw(st.integers(1, count))
        last = draw(st.integers(first, count)) if shared and draw(st.booleans()) else first
        weights.append(WeightSpec(f"w{n}", nbytes, first, last))
    m_peak = draw(st.integers(1, max(1, 3 * most_chunks * chunk)))
    return Instance(layers, tuple(weights), chunk, m_peak, draw(st.sampled_from([1.0, 4.0, 64.0])))


def least_distance(instance: Instance, preload: Collection[str]) -> int | None:
    """The least sum of i_w - z_w for W = `preload`, by trying every move at every layer; None if no moves are possible."""
    streamed = [w for w in instance.weights if w.name not in preload]

    @cache
    def best(layer: int, left: tuple[int, ...]) -> int | None:
        """From `layer` back to layer 1, with `left[n]` chunks of weight n to be moved at `layer` or before."""
        if layer == 0:
            return 0 if not any(left) else None
        in_flight = sum(
            w.nbytes for n, w in enumerate(streamed) if w.last_use >= layer and left[n]
        )  # whole slices of which a part is moved at this layer or before, and which are still needed
        if in_flight > instance.m_peak:
            return None
        options = [range(left[n] + 1) if w.first_use > layer else (0,) for n, w in enumerate(streamed)]
        costs = []
        for moved in product(*options):
            if sum(moved) <= instance.layers[layer - 1].capacity:
                rest = best(layer - 1, tuple(a - b for a, b in zip(left, moved, strict=True)))
                if rest is not None:
                    costs.append(rest)
        waiting = sum(1 for n, w in enumerate(streamed) if w.first_use > layer and left[n])
        return min(costs) + waiting if costs else None

    return best(len(instance.layers), tuple(instance.chunks(w) for w in streamed))


def least_objective(instance: Instance, lambda_: float, forced: Collection[str]) -> float:
    """The optimum of the paper's objective over every W that contains `forced`."""
    free = [w.name for w in instance.weights if w.name not in forced]
    values = []
    for size in range(len(free) + 1):
        for chosen in combinations(free, size):
            preload = {*forced, *chosen}
            distance = least_distance(instance, preload)
            if distance is not None:
                chunks = sum(instance.chunks(w) for w in instance.weights if w.name in preload)
                values.append(lambda_ * chunks + (1 - lambda_) * distance)
    return min(values)


def in_flight(instance: Instance, moves: Mapping[str, Sequence[tuple[int, int]]]) -> list[int]:
    """Bytes of streamed weights at each layer: whole weights whose first chunk has been moved and whose use is still ahead."""
    weights = [w for w in instance.weights if w.name in moves]

    def held(w: WeightSpec, layer: int) -> int:
        return w.nbytes if moves[w.name][0][0] <= layer <= w.last_use else 0

    return [sum(held(w, layer) for w in weights) for layer in range(1, len(instance.layers) + 1)]


def keeps_the_rules(plan: OverlapPlan, instance: Instance) -> bool:
    """C0-C3 of a plan for the problem's own weights and capacities, layer by layer (docs/reference/internals/planner.md).

    C3 applies to the paper's objective only.
    """
    for w in plan.weights:
        if w.preload:
            if w.moves or not 0 <= w.read_layer <= w.first_use:
                return False
        elif (
            sum(chunks for _, chunks in w.moves) != w.chunks
            or any(chunks < 1 or not 1 <= layer < w.first_use or layer < w.read_layer for layer, chunks in w.moves)
            or not 1 <= w.read_layer < w.first_use
            or [layer for layer, _ in w.moves] != sorted({layer for layer, _ in w.moves})
        ):
            return False
    streamed = [w for w in plan.weights if not w.preload]
    for layer in range(1, len(instance.layers) + 1):
        in_flight = 0
        for w in streamed:
            if instance.mode != "interleave":
                in_flight += w.nbytes * (w.read_layer <= layer <= w.last_use)
            else:
                in_flight += w.nbytes * (w.read_layer <= layer <= w.moves[-1][0])
                in_flight += w.nbytes * (w.moves[0][0] <= layer <= w.last_use)
        here = sum(chunks for w in streamed for at, chunks in w.moves if at == layer)
        if in_flight > instance.m_peak:
            return False
        if plan.objective_kind == "paper" and here > plan.kept_capacities[layer - 1]:
            return False
    return True


def slices_for(instance: Instance, *, images: bool) -> list[Slice]:
    """A slice for each weight: buffers, or images of one row a byte-pair so that widths and heights differ."""
    made = []
    for n, w in enumerate(instance.weights):
        if images and n % 3:
            height = 1 + n % 2 if w.nbytes % (1 + n % 2) == 0 else 1
            width = max(1, w.nbytes // height // 16)
            made.append(Slice(w.name, w.name, 0, w.nbytes, width, height, w.nbytes // height))
        else:
            made.append(Slice(w.name, w.name, 0, w.nbytes))
    return made


def program_of(instance: Instance, *, images: bool = False, fixed: int = 0) -> Program:
    """A program whose launches are the layers of `instance` and read its weights; `fixed` bytes of activations."""
    reads: list[list[Arg]] = [[] for _ in instance.layers]
    for w in instance.weights:
        for layer in sorted({w.first_use, w.last_use}):
            reads[layer - 1].append(Arg("slice", w.name))
    launches = tuple(
        Launch(spec.name, spec.name, (1,), None, tuple(args), spec.operator_class, (), 0, 0)
        for spec, args in zip(instance.layers, reads, strict=True)
    )
    total = sum(w.nbytes for w in instance.weights)
    return Program(
        "buffer", "fp32", (), (), (), tuple(slices_for(instance, images=images)), launches, (), fixed, 0, 0, total, page_bytes=1
    )


def plan_at(instance: Instance, preload: Collection[str], lambda_: float) -> OverlapPlan:
    """The plan for the first answer at `lambda_` inside M_peak, without a layout."""
    plan = first_plan(instance, preload)
    if lambda_:
        plan = leaner(
            instance, plan, lambda_, lambda each: max(in_flight_bytes(each), default=0) <= instance.m_peak, lambda _: instance
        )
    return replace(plan, m_peak=instance.m_peak)
