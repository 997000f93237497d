"""CARIn's metrics, budgets of several models, and `flashmem queue`."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmem.base.errors import RunError, UserError
from flashmem.cli.commands.queue import TimedRequest, read_trace
from flashmem.runtime.memory.accounts import Account, Budget
from flashmem.runtime.serving.sharing import Need, Turn, latest_needed, may_keep, spare
from flashmem.tools.turnaround import fairness, normalised_progress, normalised_turnaround, system_throughput
from tests.support.command_line import Command, command_line
from tests.support.mini_bundle import write_mini_bundle


@pytest.fixture
def flashmem(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return command_line(monkeypatch, capfd)


def test_the_metrics_are_those_of_the_paper() -> None:
    single, multi = (1.0, 2.0), (2.0, 8.0)
    assert [normalised_turnaround(a, b) for a, b in zip(single, multi, strict=True)] == [2.0, 4.0]
    progress = [normalised_progress(a, b) for a, b in zip(single, multi, strict=True)]
    assert system_throughput(progress) == 0.75
    assert fairness(progress) == 0.5
    assert fairness([0.25, 0.25]) == 1.0


def test_what_is_left_over_is_for_residents() -> None:
    needs = {"a": Need(10, 30), "b": Need(20, 5)}
    assert may_keep(100, needs, {}, {}, "a", []) == 40
    assert may_keep(60, needs, {}, {}, "a", []) == 0, "they stay placed, and nothing else does"
    assert may_keep(40, needs, {}, {}, "a", []) == 0, "they take turns"
    assert may_keep(None, needs, {}, {}, "a", []) == inf


def test_the_queue_says_who_leaves_residents() -> None:
    needs, resident = {"a": Need(10, 30), "b": Need(20, 5), "c": Need(10, 50)}, {"b": 7, "c": 9}
    assert may_keep(120, needs, resident, {}, "a", []) == 14, "whoever comes first"
    assert may_keep(120, needs, resident, {}, "a", ["a", "c"]) == 50, "it is next itself, and the others give way"
    assert may_keep(120, needs, resident, {}, "b", ["b"]) == 75
    assert may_keep(120, needs, resident, {}, "a", ["b", "a", "c"]) == 43, "b is needed before"
    assert may_keep(120, needs, resident, {}, "a", ["b", "c", "a"]) == may_keep(120, needs, resident, {}, "a", [])
    assert may_keep(120, needs, resident, {"c": 20}, "a", ["a", "c"]) == 30, "c has begun to load"


def test_who_loads_ahead_takes_nothing_from_turns_before() -> None:
    a, b, c = Turn("a", 40, 40, 10, 8), Turn("b", 20, 50, 15, 15), Turn("c", 5, 60, 20, 20)
    assert spare(100, 10, [a, b]) == 30, "what nobody counts on"
    assert spare(95, 10, [a, b, c]) == 20, "what nobody counts on"
    assert spare(100, 10, [a, b, c]) == 25
    assert spare(85, 10, [replace(a, committed=20), b, c]) == 12, "a without residents, b at its peak"
    assert spare(85, 10, [replace(a, committed=20), b, a, c]) == 10, "a at rest"
    assert spare(75, 10, [a, b, c]) == 0
    assert spare(60, 10, [a, b, c]) < 0
    assert spare(inf, 0, [a, b, c]) == inf


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_turns_find_their_peaks_whatever_was_loaded_ahead(data: st.DataObject) -> None:
    """Random models and queues: the limit is kept, and no model must free before its turn what it has loaded ahead."""
    sizes = st.integers(0, 50)
    needs = {model: Need(data.draw(sizes), data.draw(sizes)) for model in range(4)}
    fixed = {model: need.fixed for model, need in needs.items()}
    limit = sum(fixed.values()) + max(need.room for need in needs.values()) + data.draw(sizes)
    queue = data.draw(st.lists(st.sampled_from(range(4)), min_size=1, max_size=9))
    counted, kept, begun = dict(fixed), dict.fromkeys(needs, 0), set[int]()  # counted on now, left behind, loading ahead

    def begin(model: int, behind: list[int], ahead: dict[int, int]) -> None:
        left = may_keep(limit, needs, kept, ahead, model, behind)
        kept[model] = min(int(left), data.draw(sizes))
        counted[model] = min(counted[model], fixed[model] + kept[model])

    def turn(model: int) -> Turn[int]:
        rest = fixed[model] + kept[model]
        return Turn(model, counted[model], rest + needs[model].room, rest, fixed[model])

    for number, playing in enumerate(queue):
        behind = queue[number + 1 :]
        if playing not in begun:
            begin(playing, behind, {model: counted[model] - fixed[model] for model in begun})
        begun.discard(playing)
        counted[playing] = turn(playing).peak
        for model in latest_needed(needs.keys() - begun - {playing}, behind):
            given = max(0, min(sum(counted.values()) - limit, kept[model]))
            kept[model] -= given
            counted[model] -= given
        assert sum(counted.values()) <= limit
        line = [playing]
        for place, model in enumerate(behind):
            line.append(model)
            if model == playing:
                continue
            if model not in begun:
                if spare(limit, sum(counted[other] for other in needs if other not in line), [*map(turn, line)]) < 0:
                    break
                begin(model, behind[place + 1 :], {other: counted[other] - fixed[other] for other in begun - {*line}})
                begun.add(model)
            free = spare(limit, sum(counted[other] for other in needs if other not in line), [*map(turn, line)])
            more = max(0, min(int(free), turn(model).peak - counted[model]))
            counted[model] += data.draw(st.integers(0, more))
            assert sum(counted.values()) <= limit
            if not data.draw(st.booleans()):  # it still loads
                break
        counted[playing] = turn(playing).rest


def test_who_is_needed_latest_gives_memory_up_first() -> None:
    assert latest_needed("abcd", ["b", "d", "b"]) == ["a", "c", "d", "b"]


def test_promises_are_kept_and_never_pass_the_limit() -> None:
    budget = Budget(100)
    a, b = Account(budget), Account(budget)
    assert a.promise(60) and budget.room == 40
    with pytest.raises(RunError, match="a slice needs 50B, but 60B of the budget of 100B are in use"):
        b.reserve("weights", 50, "a slice")
    b.reserve("weights", 40, "a slice")
    a.reserve("weights", 60, "a slice")
    assert budget.total == 100 and budget.room == 0
    assert not b.extend(1) and not a.promise(61)
    assert a.promise(10) and budget.committed == 100, "what is held counts, whatever is promised"
    a.release("weights", 55)
    assert budget.committed == 50 and b.extend(50) and not b.extend(1)
    budget.limit = 20
    assert budget.room < 0 and a.promise(5), "less is always granted"
    with pytest.raises(RunError):
        a.reserve("weights", 1, "a slice")
    b.reserve("weights", 50, "what was promised before")
    for account in (a, b):
        account.clear()
    assert (budget.total, budget.committed, budget.peak) == (0, 0, 100)


def test_a_trace_is_read_in_the_order_of_its_times(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('[{"model": "b", "at": 1.5}, {"model": 0, "seed": 3}]')
    assert read_trace(path, ["a", "b"], 7) == [TimedRequest(0, 0.0, 3), TimedRequest(1, 1.5, 7)]
    for text, said in (
        ("{", "is not a trace"),
        ("[]", "holds no requests"),
        ('[{"model": "c"}]', "request 0 is for 'c'; name one of: a, b"),
        ('[{"model": true}]', "name one of"),
        ('[{"model": "a", "at": -1}]', "no sensible time or seed"),
        ('[{"model": "a", "at": NaN}]', "no sensible time or seed"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=said):
            read_trace(path, ["a", "b"], 0)


def test_queue_plays_a_trace_and_draws_memory(flashmem: Command, tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        write_mini_bundle(tmp_path / f"{name}.flashmem", seed=seed)
    (tmp_path / "t.json").write_text('[{"model": "a"}, {"model": "b", "at": 0.01}, {"model": "a"}]')
    done = flashmem(
        "queue", tmp_path / "a.flashmem", tmp_path / "b.flashmem", "--budget", "4MB", "--trace", tmp_path / "t.json",
        "--plot", tmp_path / "m.png", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert [request["model"] for request in report["requests"]] == ["a", "a", "b"]
    assert 0 < report["peak_bytes"] <= report["budget_bytes"] == 4_000_000
    assert report["stp"] == pytest.approx(sum(1 / model["ntt"] for model in report["models"].values()))
    assert 0 < report["fairness"] <= 1
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    done = flashmem("queue", tmp_path / "a.flashmem", "--budget", "1KB", "--iterations", 1)
    assert done.code == 2 and "budget" in done.err
