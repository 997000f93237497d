"""Designs of an application: requests, optimality, RASS and its policy, and the written files."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from flashmem.base.errors import UserError
from flashmem.runtime.application.designs import Design, Designs, DeviceState, SwitchingRule, TaskAssignment
from flashmem.runtime.application.manager import Manager
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.tools.design import metrics
from flashmem.tools.design.application import (
    Application,
    BroadObjective,
    Constraint,
    Measure,
    Processor,
    Task,
    Variant,
    read_application,
)
from flashmem.tools.design.metrics import Candidate, Profile
from flashmem.tools.design.rass import optimality, solve
from flashmem.tools.design.writer import describe, solved
from tests.support.command_line import Command, command_line
from tests.support.paths import DATA

GB = 10**9


def candidate(task: str, name: str, processor: str, ms: float, memory: int, workload: int, accuracy: float) -> Candidate:
    variant = Variant(Path(f"{name}.onnx"), "fp32", {}, accuracy)
    profile = Profile(2e-3 * ms, (0.9e-3 * ms, 1e-3 * ms, 1.1e-3 * ms), memory, 4 * memory, workload)
    return Candidate(task, variant, Processor(processor, processor), None, profile)


def application(tasks: int, constraints: tuple[Constraint, ...] = ()) -> Application:
    names = ["see", "hear"][:tasks]
    objectives = [
        each
        for name in names
        for each in (
            BroadObjective(Measure("latency", "average", name), maximise=False),
            BroadObjective(Measure("accuracy", "average", name), maximise=True, weight=2.0),
        )
    ]
    return Application(tuple(Task(name, ()) for name in names), (), (None,), tuple(objectives), constraints)


SEEING = [
    candidate("see", "large", "gpu", 8, 400, 900, 0.80),
    candidate("see", "large", "cpu", 30, 300, 900, 0.80),
    candidate("see", "small", "gpu", 3, 90, 200, 0.72),
    candidate("see", "small", "cpu", 9, 60, 200, 0.72),
    candidate("see", "tiny", "cpu", 20, 70, 50, 0.60),
]
HEARING = [candidate("hear", "ear", "cpu", 5, 40, 100, 0.4), candidate("hear", "ear", "dsp", 7, 20, 100, 0.4)]


@given(
    arrays(np.float64, st.tuples(st.integers(1, 8), st.integers(1, 4)), elements=st.integers(0, 9)),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.lists(st.integers(1, 5), min_size=4, max_size=4),
)
def test_optimality_is_the_formula_of_each_row(values: Any, maximise: list[bool], weights: list[int]) -> None:
    rows, columns = values.shape
    found = optimality(values, maximise[:columns], weights[:columns])
    for row in range(rows):
        distance = largest = 0.0
        for column in range(columns):
            these = [float(value) for value in values[:, column]]
            mean = sum(these) / rows
            variance = sum((value - mean) ** 2 for value in these) / rows
            if max(these) == min(these):
                continue
            best = max(these) if maximise[column] else min(these)
            distance += weights[column] * (these[row] - best) ** 2 / variance
            largest += weights[column] * (max(these) - min(these)) ** 2 / variance
        assert found[row] == pytest.approx(math.sqrt(largest / distance) if distance else math.inf)
        assert found[row] >= 1 - 1e-9


def test_rass_keeps_what_an_exhaustive_search_finds() -> None:
    limit = Constraint(Measure("latency", "average", "see"), at_most=True, bound=0.034)
    asked = application(2, (limit,))
    answer = solved(asked, [*SEEING, *HEARING])
    everything = list(itertools.product(SEEING, HEARING))
    assert len(answer.decisions) == len(everything) == 10
    kept = [one for one in everything if metrics.value(one, limit.measure) <= 0.034]
    assert len(kept) == answer.allowed == 9, "large on the cpu waits for the other task there"
    scores = answer.solution.optimality
    allowed = [row for row, one in enumerate(answer.decisions) if one in kept]
    designs = answer.solution.designs
    assert designs[0] == max(allowed, key=scores.__getitem__)
    roles = {role: design for design, names in zip(designs, answer.solution.roles, strict=True) for role in names}
    assert metrics.memory(answer.decisions[roles["least memory"]]) == min(map(metrics.memory, kept))
    assert metrics.workload(answer.decisions[roles["lightest"]]) == min(map(metrics.workload, kept))
    for used in answer.solution.sets:
        on_it = [row for row in allowed if set(metrics.processors_of(answer.decisions[row])) == set(used)]
        best = roles[f"best on {' and '.join(used)}"]
        assert scores[best] == max(scores[row] for row in on_it)
    assert len(designs) <= 5


def test_metrics_of_tasks_together_are_those_of_the_paper() -> None:
    apart, beside = (SEEING[2], HEARING[0]), (SEEING[3], HEARING[0])
    assert metrics.value(apart, Measure("turnaround", "average", None)) == pytest.approx(1)
    assert metrics.value(apart, Measure("system-throughput", "average", None)) == pytest.approx(2)
    latency = metrics.value(beside, Measure("latency", "average", "see"))
    assert latency == pytest.approx(9e-3 + 5e-3), "it waits for the other task of its processor"
    ratios = [14 / 9, 14 / 5]
    assert metrics.value(beside, Measure("turnaround", "average", None)) == pytest.approx(sum(ratios) / 2)
    assert metrics.value(beside, Measure("fairness", "average", None)) == pytest.approx(min(ratios) / max(ratios))
    assert metrics.value(apart, Measure("latency", "maximum", "see")) == pytest.approx(3.3e-3)
    assert metrics.value(apart, Measure("latency", "deviation", "see")) == pytest.approx(np.std([2.7e-3, 3e-3, 3.3e-3]))


def test_a_policy_has_the_shape_of_the_papers_and_an_answer_for_every_state() -> None:
    answer = solved(application(1), SEEING)
    rules = [(*rule.sets, rule.memory) for rule in answer.solution.policy]
    assert rules == [(False, None, False), (True, False, False), (True, True, False), (True, True, True), (None, None, True)]
    designs = describe(answer)
    for gpu, cpu, memory in itertools.product((False, True), repeat=3):
        troubled = frozenset(name for name, so in (("gpu", gpu), ("cpu", cpu)) if so)
        chosen = designs.designs[designs.choose(DeviceState(troubled, memory))]
        if not memory and len(troubled) < 2:
            assert chosen.parts[0].processor not in troubled
        if memory and len(troubled) < 2:
            assert "least memory" in chosen.roles


def test_sets_of_processors_are_those_that_can_be_switched_to() -> None:
    """Neither a set that contains another one, nor the same processors in another order."""
    seeing = [candidate("see", "m", where, ms, 100, 100, 0.8) for where, ms in (("gpu", 8), ("cpu", 9), ("npu", 30))]
    hearing = [candidate("hear", "m", where, ms, 100, 100, 0.8) for where, ms in (("gpu", 8), ("cpu", 9), ("npu", 30))]
    answer = solved(application(2), [*seeing, *hearing])
    assert [set(each) for each in answer.solution.sets] == [{"gpu", "cpu"}, {"gpu"}, {"cpu"}]
    designs = describe(answer)
    for troubled in ({"cpu"}, {"gpu"}):
        chosen = designs.designs[designs.choose(DeviceState(frozenset(troubled)))]
        assert not troubled & {part.processor for part in chosen.parts}


def test_an_objective_that_differs_by_rounding_alone_is_the_same_for_all() -> None:
    latency = np.array([1.0, 2.0, 4.0])
    rounded = np.array([0.1 + 0.2, 0.3, 0.3])
    found = optimality(np.stack([latency, rounded], axis=1), [False, True], [1, 1])
    assert found.tolist() == optimality(latency[:, None], [False], [1]).tolist() == [math.inf, 3.0, 1.0]


def test_weights_move_the_choice() -> None:
    def best(weight: float) -> str:
        objectives = (
            BroadObjective(Measure("latency", "average", "see"), maximise=False),
            BroadObjective(Measure("accuracy", "average", "see"), maximise=True, weight=weight),
        )
        answer = solved(Application((Task("see", ()),), (), (None,), objectives, ()), SEEING)
        return answer.decisions[answer.solution.designs[0]][0].variant.path.stem

    assert (best(0.01), best(100)) == ("small", "large")


def test_constraints_that_nothing_keeps_are_one_sentence_that_names_the_worst() -> None:
    limits = (
        Constraint(Measure("latency", "average", "see"), at_most=True, bound=0.001),
        Constraint(Measure("accuracy", "average", "see"), at_most=False, bound=0.79),
    )
    with pytest.raises(UserError, match=r"average latency of see is to be at most 0\.001, and 0\.003 is the best"):
        solved(application(1, limits), SEEING)
    assert solve(np.zeros((1, 1)), [False], [1], np.array([False]), [("a",)], np.zeros(1), np.zeros(1)) is None


TOML = """
budgets = ["64MB", "128MB"]
[[device]]
name = "pocl"
processor = "cpu"
[[task]]
name = "see"
[[task.model]]
path = "a.onnx"
precision = ["fp32", "fp16"]
accuracy = { fp32 = 0.8, fp16 = 0.79 }
shape = { x = [1, 3, 32, 32] }
[[objective]]
maximise = "accuracy"
weight = 2
[[constraint]]
metric = "latency"
statistic = "p90"
at_most = "20ms"
"""


def test_an_application_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").touch()
    (tmp_path / "app.toml").write_text(TOML)
    found = read_application(tmp_path / "app.toml")
    assert found.budgets == (64_000_000, 128_000_000)
    text = TOML.replace('processor = "cpu"\n', '[[device]]\nname = "adreno750"\n')
    (tmp_path / "other.toml").write_text(text)
    assert read_application(tmp_path / "other.toml").processors == (
        Processor("pocl", "cpu"),
        Processor("adreno750", "adreno750"),
    )
    assert found.processors == (Processor("pocl", "cpu"),)
    assert [(each.precision, each.accuracy) for each in found.tasks[0].variants] == [("fp32", 0.8), ("fp16", 0.79)]
    assert found.objectives == (BroadObjective(Measure("accuracy", "average", "see"), maximise=True, weight=2.0),)
    assert found.constraints == (Constraint(Measure("latency", "p90", "see"), at_most=True, bound=0.02),)
    (tmp_path / "app.toml").write_text(TOML.replace('[[objective]]\nmaximise = "accuracy"\nweight = 2\n', ""))
    assert read_application(tmp_path / "app.toml").objectives[0].measure.metric == "latency", "of the constraints"


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('maximise = "accuracy"', 'maximise = "beauty"', "metric 'beauty' of .* is unknown"),
        ('maximise = "accuracy"', 'maximise = "accuracy"\nminimise = "size"', "has one of: minimise"),
        ('statistic = "p90"', 'statistic = "p50.5"', "statistic 'p50.5' of .* is unknown"),
        ('"20ms"', '"20 parsecs"', "'20 parsecs' is no latency; write 100ms"),
        ("at_most", "below", "'below' is not known at"),
        ("a.onnx", "b.onnx", "which is no file"),
        ('"fp16"]', '"fp8"]', "precision 'fp8' of .* is unknown"),
        (", fp16 = 0.79", "", "an objective is accuracy, but a.onnx in fp16"),
        ('"see"', '"see/hear"', "task 'see/hear' is part of files' names"),
        ('["fp32", "fp16"]', '["fp32", "fp32"]', "has two models a-fp32-1x3x32x32; leave one out"),
        ("[[task]]", "[task]", r"write \[\[task\]\]"),
        ('maximise = "accuracy"', 'maximise = "fairness"\ntask = "see"', "it is of all together"),
        ("weight = 2", "weight = 0", "give one above 0"),
        ("budgets", "budgets =", "is not TOML"),
    ],
)
def test_what_is_wrong_in_an_application_is_one_sentence(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    (tmp_path / "a.onnx").touch()
    (tmp_path / "app.toml").write_text(TOML.replace(old, new, 1))
    with pytest.raises(UserError, match=sentence) as refused:
        read_application(tmp_path / "app.toml")
    assert "app.toml" in str(refused.value)


@pytest.fixture
def flashmem(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return command_line(monkeypatch, capfd)


@pytest.mark.thorough
def test_the_command_profiles_solves_and_writes_what_a_manager_runs(tmp_path: Path, flashmem: Command) -> None:
    (tmp_path / "app.toml").write_text(
        f"""
        [[task]]
        name = "see"
        [[task.model]]
        path = "{DATA / "resnet-tiny.onnx"}"
        precision = ["fp32", "fp16"]
        accuracy = {{ fp32 = 0.8, fp16 = 0.7 }}
        [[objective]]
        maximise = "accuracy"
        [[objective]]
        minimise = "memory"
        """
    )
    command = ("design", str(tmp_path / "app.toml"), "-o", str(tmp_path / "out"), "--runs", "2", "--json")
    earlier = Design(("",), (TaskAssignment("see", "earlier.flashmem", "", "", 0, 0.0),))
    (tmp_path / "out/earlier.flashmem").mkdir(parents=True)
    rules = (SwitchingRule((), False, 0), SwitchingRule((), True, 0))
    (tmp_path / "out/design.json").write_text(json.dumps(Designs((), (earlier,), rules).to_json()))
    done = flashmem(*command)
    assert done.code == 0
    found = json.loads(done.out)
    assert found["decisions"] == found["allowed"] == 2 * len(list_devices())
    bundles = {part["bundle"] for design in found["designs"] for part in design["parts"]}
    assert {path.name for path in (tmp_path / "out").iterdir()} == bundles | {"design.json"}
    with Manager(tmp_path / "out") as manager:
        (answer,) = manager.run("see", {"pixel_values": np.zeros((1, 3, 32, 32), np.float32)})
    assert np.isfinite(answer).all()
