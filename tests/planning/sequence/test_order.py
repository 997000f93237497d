"""The launch order with the lowest peak, compared with brute force; answers that do not depend on the order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmem.planning.sequence.order import Held, OrderProblem, lowest_order
from flashmem.planning.sequence.search import WorkLimit


def orders(problem: OrderProblem, done: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """All orders."""
    if len(done) == len(problem.after):
        yield done
    for layer in range(len(problem.after)):
        if layer not in done and set(problem.after[layer]) <= set(done):
            yield from orders(problem, (*done, layer))


def peak(problem: OrderProblem, order: Sequence[int]) -> int:
    """Peak bytes alive, layer by layer, by the definition."""
    most = 0
    for at in range(len(order)):
        until, since = set(order[: at + 1]), set(order[at:])
        most = max(
            most,
            sum(
                t.nbytes
                for t in problem.tensors
                if t.layers and (t.early or until & set(t.layers)) and (t.late or since & set(t.layers))
            ),
        )
    return most


@st.composite
def problems(draw: st.DrawFn, most: int = 7) -> OrderProblem:
    """Layers that write a tensor each and read some earlier ones; views that others write into, inputs and outputs."""
    count = draw(st.integers(1, most))
    touching: list[list[int]] = [[layer] for layer in range(count)]
    after: list[set[int]] = [set() for _ in range(count)]
    for layer in range(1, count):
        for source in draw(st.lists(st.integers(0, layer - 1), max_size=3, unique=True)):
            after[layer].add(source)
            touching[source].append(layer)
    sizes = st.one_of(st.integers(0, 4), st.integers(1, 100))
    tensors = [Held(draw(sizes), tuple(layers), late=draw(st.integers(0, 5)) == 0) for layers in touching]
    for _ in range(draw(st.integers(0, 3))):
        layers = draw(st.lists(st.integers(0, count - 1), max_size=3, unique=True))
        tensors.append(Held(draw(sizes), tuple(layers), early=draw(st.booleans()), late=draw(st.booleans())))
    return OrderProblem(tuple(tuple(sorted(each)) for each in after), tuple(tensors))


@given(problems())
@settings(max_examples=250, deadline=None)
def test_the_peak_is_that_of_the_best_of_all_orders(problem: OrderProblem) -> None:
    found = lowest_order(problem, worth=0)
    same = tuple(range(len(problem.after)))
    assert sorted(found.layers) == list(same)
    for at, layer in enumerate(found.layers):
        assert set(problem.after[layer]) <= set(found.layers[:at])
    best = min(peak(problem, order) for order in orders(problem))
    assert found.before == peak(problem, same) and found.peak == peak(problem, found.layers)
    assert found.peak == best == found.bound and found.gap == 0 and found.status == "optimal"
    assert found.layers == same or found.peak < found.before, "ties keep the given order"
    assert max(problem.live(found.layers), default=0) == found.peak


@given(problems(), st.integers(0, 20))
@settings(max_examples=100, deadline=None)
def test_a_search_that_is_cut_short_proves_no_more_than_is_true(problem: OrderProblem, tries: int) -> None:
    found = lowest_order(problem, tries=tries, cp_seconds=0, worth=0)
    best = min(peak(problem, order) for order in orders(problem))
    assert found.bound <= best <= found.peak <= found.before
    assert (found.status == "optimal") == (found.peak == found.bound)


@given(problems(), st.integers(0, 500), st.sampled_from([0.0, 0.1]))
@settings(max_examples=100, deadline=None)
def test_the_status_of_an_order_is_true(problem: OrderProblem, work: int, worth: float) -> None:
    found = lowest_order(problem, work=work, cp_seconds=0, worth=worth)
    best = min(peak(problem, order) for order in orders(problem))
    assert sorted(found.layers) == list(range(len(problem.after)))
    assert found.bound <= best <= found.peak <= found.before
    if found.status == "optimal":
        assert found.peak == best
    elif found.status == "tolerance":
        assert worth and found.peak <= best * (1 + worth) ** 2
    else:
        assert found.peak > found.bound * (1 + worth)


def wide(chains: int) -> OrderProblem:
    """Independent chains of three layers, between a first layer and a last one."""
    count = 3 * chains + 2
    after: list[tuple[int, ...]] = [()]
    touching: list[list[int]] = [[0]]
    for layer in range(1, count - 1):
        source = layer - chains if layer > chains else 0
        after.append((source,))
        touching[source].append(layer)
        touching.append([layer])
    after.append(tuple(range(count - 1 - chains, count - 1)))
    for source in after[-1]:
        touching[source].append(count - 1)
    touching.append([count - 1])
    sizes = [1 + 7919 * layer * layer % 1009 for layer in range(count)]
    return OrderProblem(tuple(after), tuple(Held(n, tuple(layers)) for n, layers in zip(sizes, touching, strict=True)))


@pytest.mark.parametrize("work", [0, 1, 1000, 100_000])
def test_all_searches_together_end_at_the_limit_of_work(work: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, limits = wide(300), []

    def remembered(left: int) -> WorkLimit:
        limits.append(WorkLimit(left))
        return limits[-1]

    monkeypatch.setattr("flashmem.planning.sequence.order.WorkLimit", remembered)
    lowest_order.cache_clear()
    found = lowest_order(problem, work=work, cp_seconds=0, worth=0)
    [limit] = limits
    count = len(problem.after)
    assert limit.reached and -limit.left <= 10 * count * count, "what was begun when it was reached, and the peaks of orders"
    assert found.status == "limit" and found.bound < found.peak <= found.before
    assert sorted(found.layers) == list(range(count))
    assert max(problem.live(found.layers)) == found.peak
    lowest_order.cache_clear()
    assert found == lowest_order(problem, work=work, cp_seconds=0, worth=0), "the same layers get the same order"


@given(problems(6))
@settings(max_examples=25, deadline=None)
def test_cp_sat_finds_the_same(problem: OrderProblem) -> None:
    found = lowest_order(problem, tries=0, worth=0)
    assert found.peak == found.bound == min(peak(problem, order) for order in orders(problem))
    lowest_order.cache_clear()
    assert found == lowest_order(problem, tries=0, worth=0)
