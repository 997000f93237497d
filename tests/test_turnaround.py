"""CARIn's metrics, how several models share a budget, and `flashmem queue`."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path

import pytest
from command_line import Command, command_line
from mini_bundle import write_mini_bundle

from flashmem.commands.queue import Request, read_trace
from flashmem.errors import RunError, UserError
from flashmem.runtime.accounts import Account, Budget
from flashmem.runtime.sharing import Need, latest_needed, left_over
from flashmem.turnaround import fairness, normalised_progress, normalised_turnaround, system_throughput


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
    needs = [Need(10, 30), Need(20, 5)]
    assert left_over(100, needs) == 40
    assert left_over(60, needs) == 0, "they stay placed, and nothing else does"
    assert left_over(40, needs) == 0, "they take turns"
    assert left_over(None, needs) == inf


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
    assert read_trace(path, ["a", "b"], 7) == [Request(0, 0.0, 3), Request(1, 1.5, 7)]
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
