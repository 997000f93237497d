"""The designs of an application: what is asked for, optimality, RASS and its policy, what is written, and what switches."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Command, command_line
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from mini_bundle import write_mini_bundle

from flashmem.design import metrics
from flashmem.design.application import Application, Constraint, Measure, Objective, Processor, Task, Variant, read_application
from flashmem.design.metrics import Candidate, Profile
from flashmem.design.rass import optimality, solve
from flashmem.design.written import described, solved
from flashmem.errors import BundleError, UserError
from flashmem.runtime.designs import Design, Designs, Part, State, SwitchingRule
from flashmem.runtime.manager import Manager
from flashmem.runtime.opencl import list_devices
from flashmem.runtime.pressure import Sample
from flashmem.runtime.watch import LONGEST_REST, QUIET_SECONDS, REST_SECONDS, Ticks, Watch, load_of_others, ticks

DATA = Path(__file__).parent / "data"
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
            Objective(Measure("latency", "average", name), maximise=False),
            Objective(Measure("accuracy", "average", name), maximise=True, weight=2.0),
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
    for mapping in answer.solution.mappings:
        on_it = [row for row in allowed if metrics.mapping(answer.decisions[row]) == mapping]
        best = roles[f"best on {' and '.join(dict.fromkeys(mapping))}"]
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
    designs = described(answer)
    for gpu, cpu, memory in itertools.product((False, True), repeat=3):
        troubled = frozenset(name for name, so in (("gpu", gpu), ("cpu", cpu)) if so)
        chosen = designs.designs[designs.choose(State(troubled, memory))]
        if not memory and len(troubled) < 2:
            assert chosen.parts[0].processor not in troubled
        if memory and len(troubled) < 2:
            assert "least memory" in chosen.roles


def test_weights_move_the_choice() -> None:
    def best(weight: float) -> str:
        objectives = (
            Objective(Measure("latency", "average", "see"), maximise=False),
            Objective(Measure("accuracy", "average", "see"), maximise=True, weight=weight),
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
    assert found.processors == (Processor("pocl", "cpu"),)
    assert [(each.precision, each.accuracy) for each in found.tasks[0].variants] == [("fp32", 0.8), ("fp16", 0.79)]
    assert found.objectives == (Objective(Measure("accuracy", "average", "see"), maximise=True, weight=2.0),)
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


def sampled(seconds: float, available: int = 8 * GB, waited: float = 0.0) -> Sample:
    return Sample(seconds, available, waited, GB)


def test_a_slow_processor_is_left_after_two_runs_and_tried_again_after_ever_longer_rests() -> None:
    watch = Watch(best=GB)
    watch.ran("gpu", 0.031, 0.02, 0.0)
    assert watch.state == State()
    watch.ran("gpu", 0.031, 0.02, 1.0)
    assert watch.state == State(frozenset({"gpu"}))
    rest = REST_SECONDS
    now = 1.0
    for _ in range(8):
        watch.sampled(sampled(now + rest - 0.1), None)
        assert watch.state.troubled, "not rested yet"
        now += rest
        watch.sampled(sampled(now), None)
        assert not watch.state.troubled
        watch.ran("gpu", 1.0, 0.02, now)
        watch.ran("gpu", 1.0, 0.02, now)
        assert watch.state.troubled
        rest = min(2 * rest, LONGEST_REST)
    now += rest
    watch.sampled(sampled(now), None)
    watch.ran("gpu", 0.02, 0.02, now)
    watch.ran("gpu", 1.0, 0.02, now)
    assert not watch.state.troubled, "it was quick between"


def test_the_load_of_others_makes_the_cpu_troubled_until_it_is_gone() -> None:
    watch = Watch(best=GB, cpu="cpu")
    watch.sampled(sampled(0.0), 0.2)
    assert watch.state == State()
    watch.sampled(sampled(1.0), 0.5)
    assert watch.state == State(frozenset({"cpu"}))
    watch.sampled(sampled(1.0 + REST_SECONDS), 0.2)
    assert watch.state.troubled, "between the two levels nothing changes"
    watch.sampled(sampled(2.0 + REST_SECONDS), 0.05)
    assert watch.state == State()


def test_little_memory_is_told_by_what_is_left_or_by_waiting_and_forgotten_when_quiet() -> None:
    watch = Watch(best=4 * GB)
    watch.sampled(sampled(0.0, available=GB + 1), None)
    assert not watch.state.memory
    watch.sampled(sampled(1.0, available=GB - 1), None)
    assert watch.state.memory
    watch.sampled(sampled(2.0, available=5 * GB), None)
    watch.sampled(sampled(2.0 + QUIET_SECONDS - 0.1, available=5 * GB), None)
    assert watch.state.memory
    watch.sampled(sampled(2.0 + QUIET_SECONDS, available=5 * GB), None)
    assert not watch.state.memory
    watch.sampled(sampled(9.0, waited=6.0), None)
    assert watch.state.memory
    watch.sampled(Sample(20.0, None, 0.0, 0), None)
    assert watch.state.memory, "nothing is known now"


def test_the_load_of_others_is_read_from_proc(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)

    def write(user: int, idle: int, own: int) -> Ticks:
        (tmp_path / "proc/stat").write_text(f"cpu  {user} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2\n")
        (tmp_path / "proc/self/stat").write_text(f"7 (a ) b) S {' '.join(['0'] * 10)} {own} 0 0\n")
        found = ticks(tmp_path)
        assert found is not None
        return found

    before = write(user=100, idle=300, own=40)
    assert load_of_others(before, write(user=180, idle=320, own=60)) == pytest.approx(0.6)
    assert load_of_others(before, before) is None
    assert ticks(tmp_path / "nowhere") is None


def designs_of(folder: Path) -> Designs:
    """The same task on each device that is here, as if they were two processors, and once more in little memory."""
    names = [device.descriptor_name for device in list_devices()]
    parts = [Part("see", f"m{seed}.flashmem", names[seed % len(names)], f"p{seed}", 1000 - seed, 60.0) for seed in range(3)]
    for seed in range(3):
        write_mini_bundle(folder / f"m{seed}.flashmem", seed=seed)
    rules = (
        SwitchingRule((False, None), False, 0),
        SwitchingRule((True, False), False, 1),
        SwitchingRule((True, True), False, 1),
        SwitchingRule((True, True), True, 1),
        SwitchingRule((None, None), True, 2),
    )
    designs = Designs((("p0",), ("p1",)), tuple(Design((part.bundle,), (part,)) for part in parts), rules)
    (folder / "design.json").write_text(json.dumps(designs.to_json()))
    return designs


def write_system(root: Path, *, available: int, busy: int, ticks: int) -> None:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(f"MemAvailable: {available // 1024} kB\n")
    (root / "proc/stat").write_text(f"cpu  {busy} 0 0 {ticks - busy} 0 0 0 0\n")
    (root / "proc/self/stat").write_text("7 (a) S " + "0 " * 20)


def test_a_manager_answers_by_the_design_in_force_and_goes_back(tmp_path: Path) -> None:
    designs = designs_of(tmp_path)
    assert Designs.read(tmp_path) == designs
    models = [write_mini_bundle(tmp_path / f"again{seed}.flashmem", seed=seed) for seed in range(3)]
    inputs = models[0].inputs()
    now, root = [0.0], tmp_path / "system"
    write_system(root, available=GB, busy=0, ticks=0)

    def answers(manager: Manager) -> int:
        now[0] += 1.0
        found = manager.run("see", inputs)[0]
        matching = [seed for seed, model in enumerate(models) if np.allclose(found, model.reference(inputs)[0], atol=2e-5)]
        assert matching == [manager.current]
        return manager.current

    with Manager(tmp_path, clock=lambda: now[0], root=root) as manager:
        assert answers(manager) == 0
        for _ in range(2):
            manager._watch.ran("p0", 120.0, 60.0, now[0])
        assert answers(manager) == 1
        write_system(root, available=100, busy=0, ticks=100)
        assert answers(manager) == 2
        write_system(root, available=GB, busy=0, ticks=200)
        assert [answers(manager) for _ in range(6)][-1] == 0, "memory is back, and the processor has rested"
        assert [chosen for _, chosen, _ in manager.switches][:3] == [0, 1, 2]
        with pytest.raises(UserError, match="no task 'hear' in these designs; there are: see"):
            manager.run("hear", inputs)
    assert not manager._sessions


def test_the_load_of_the_cpu_switches_the_manager(tmp_path: Path) -> None:
    designs_of(tmp_path)
    now, root = [0.0], tmp_path / "system"
    write_system(root, available=GB, busy=0, ticks=0)
    model = write_mini_bundle(tmp_path / "again.flashmem", seed=0)
    with Manager(tmp_path, clock=lambda: now[0], root=root) as manager:
        manager.run("see", model.inputs())
        now[0] += 1
        write_system(root, available=GB, busy=60, ticks=100)
        manager.run("see", model.inputs())
        assert manager.state.troubled == {"p0"}
        assert manager.current == 1


@pytest.mark.parametrize(
    "change", [{"version": 0}, {"designs": []}, {"policy": [{"sets": [None], "memory": None, "design": 0}]}, {"sets": 5}]
)
def test_designs_that_are_damaged_are_one_sentence(tmp_path: Path, change: dict[str, Any]) -> None:
    designs = designs_of(tmp_path)
    (tmp_path / "design.json").write_text(json.dumps({**designs.to_json(), **change}))
    with pytest.raises(BundleError, match="run `flashmem design` again"):
        Designs.read(tmp_path)


@pytest.fixture
def flashmem(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return command_line(monkeypatch, capfd)


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
    done = flashmem("design", str(tmp_path / "app.toml"), "-o", str(tmp_path / "out"), "--runs", "2", "--json")
    assert done.code == 0
    found = json.loads(done.out)
    assert found["decisions"] == found["allowed"] == 2 * len(list_devices())
    bundles = {part["bundle"] for design in found["designs"] for part in design["parts"]}
    assert {path.name for path in (tmp_path / "out").iterdir()} == bundles | {"design.json"}
    with Manager(tmp_path / "out") as manager:
        (answer,) = manager.run("see", {"pixel_values": np.zeros((1, 3, 32, 32), np.float32)})
    assert np.isfinite(answer).all()
