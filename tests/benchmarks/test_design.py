"""The benchmark of designs: RASS compared with an independent exhaustive search, and the whole command on tiny models."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.serving import design
from benchmarks.serving import design_exhaustive as plain
from benchmarks.serving.design_pressure import _HOLD, LEFT, MadeUp, states
from flashmem.base.errors import UserError
from flashmem.runtime.application.designs import DeviceState
from flashmem.runtime.memory.pressure import sample
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.tools.design.application import Application, BroadObjective, Constraint, Measure, Processor, Task, Variant
from flashmem.tools.design.metrics import Candidate, Profile, is_allowed
from flashmem.tools.design.writer import Solved, describe, solved
from tests.support.paths import DATA


def drawn(seed: int) -> tuple[Application, list[Candidate]]:
    """An application of one to three tasks on one to four processors, and profiles of its candidates."""
    rng = random.Random(seed)
    tasks = [Task(f"t{number}", ()) for number in range(rng.randint(1, 3))]
    processors = [Processor(name, name) for name in ("cpu", "gpu", "npu", "dsp")[: rng.randint(1, 4)]]
    candidates = []
    for task in tasks:
        for model in range(rng.randint(1, 3)):
            variant = Variant(Path(f"{model}.onnx"), "fp32", {}, rng.random())
            size, work = rng.randint(1, 9), rng.randint(1, 9)
            for processor in processors:
                later = tuple(rng.uniform(0.01, 0.02) * work for _ in range(3))
                profile = Profile(2 * later[0], later, rng.randint(1, 9), size, work)
                candidates.append(Candidate(task.name, variant, processor, None, profile))
    metrics = ("latency", "accuracy", "memory", "throughput", "size", "workload", "first")
    measures = [
        Measure(metric, rng.choice(("average", "p90", "deviation", "maximum")), task.name)
        for task in tasks
        for metric in rng.sample(metrics, 3)
    ]
    measures += [Measure(metric, "average", None) for metric in ("turnaround", "system-throughput", "fairness")]
    objectives = tuple(BroadObjective(one, one.metric in plain.BETTER_HIGH, rng.uniform(0.5, 3)) for one in measures)
    limit = Constraint(Measure("latency", "average", "t0"), at_most=True, bound=rng.uniform(0.05, 0.4))
    return Application(tuple(tasks), tuple(processors), (None,), objectives, (limit,)), candidates


def answers() -> list[tuple[Application, list[Candidate], Solved]]:
    found = []
    for seed in range(40):
        application, candidates = drawn(seed)
        try:
            found.append((application, candidates, solved(application, candidates)))
        except UserError:
            assert all(
                not is_allowed(one, application)
                for one in itertools.product(*([c for c in candidates if c.task == t.name] for t in application.tasks))
            )
    assert len(found) > 20
    return found


def test_rass_agrees_with_an_exhaustive_search_that_shares_no_formula() -> None:
    noticed = 0
    for application, candidates, answer in answers():
        found = plain.exhaustive(application, candidates)
        assert plain.disagreements(answer, found) == []
        worst = min(
            (row for row, score in enumerate(found.optimality) if score is not None), key=lambda row: found.optimality[row] or 0
        )
        designs = (worst, *answer.solution.designs[1:])
        wrong = replace(answer, solution=replace(answer.solution, designs=designs))
        noticed += bool(plain.disagreements(wrong, found))
    assert noticed > 15, "a worse design is noticed, but where there is one decision alone"


def test_no_simpler_way_is_better_and_every_rule_has_a_state() -> None:
    for application, candidates, answer in answers():
        found = plain.exhaustive(application, candidates)
        ours = plain.best_of(found, candidates)
        assert ours == max(score for score in found.optimality if score is not None)
        for way in (plain.best_accuracy, plain.smallest_model):
            theirs = plain.best_of(found, way(application, candidates))
            assert theirs is None or theirs <= ours
        for weighted_sum in (False, True):
            theirs = plain.unaware(application, candidates, found, weighted_sum=weighted_sum)
            assert theirs is None or theirs <= ours
        designs = describe(answer)
        ruled = {rule.design for rule in designs.policy}
        assert ruled == set(range(len(designs.designs))) == {designs.choose(DeviceState()), *states(designs)}


def test_a_made_up_system_says_what_is_taken(tmp_path: Path) -> None:
    system = MadeUp(tmp_path, 64 << 20)
    assert sample(system.clock(), 0, tmp_path).available == 128 << 20
    system.press("memory", 0)
    system.passes()
    assert sample(system.clock(), 0, tmp_path).available == LEFT * (64 << 20)


def test_the_process_that_takes_memory_has_taken_it_when_it_says_so_and_ends_with_its_pipe() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _HOLD], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def resident() -> int:
            return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4096

        for _ in range(2):
            process.stdin.write(f"{16 << 20}\n")
            process.stdin.flush()
            process.stdout.readline()
        assert resident() >= 32 << 20
        process.stdin.close()
        assert process.wait(10) == 0


@pytest.mark.thorough
def test_the_benchmark_runs_on_tiny_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "design", "--zoo", str(DATA), "--tasks", "see=resnet-tiny:0.6,vit-tiny:0.9", "read=resnet-tiny", "--precisions", "fp32",
        "--device", list_devices()[0].descriptor_name, "--budgets", "64MB", "--describe", "adreno750", "generic-cpu",
        "--described-budgets", "64MB", "--within", "60s", "--runs", "1", "--repeats", "1", "--made-up",
        "--json", str(tmp_path / "d.json"), "--plot", str(tmp_path / "d.png"),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    design.main()
    found, said = json.loads((tmp_path / "d.json").read_text()), capsys.readouterr().out
    assert (found["here"]["decisions"], found["described"]["decisions"]) == (2, 8)
    for kind in ("core", "memory"):
        story = found["pressure"][kind]
        assert story["answered_after_runs"] == 2 and story["reverted_after_seconds"] < 10
        assert {run["phase"] for run in story["runs"]} == {"before", "during", "after"}
    assert {run["design"] for run in found["pressure"]["core"]["runs"]} == {0, 1}, "the lighter design answers"
    assert all(set(row["opening"]) == {"see"} for row in found["switches"]), "the other task's session stays"
    assert [row["to"] for row in found["switches"]] == [1, 0]
    assert set(found["together"]) == {"see", "read"}
    assert "agrees" in said
    assert re.search(r"\| F \| (- \| )+F \| d0 \|", said), (
        "nothing is overloaded: the best design, whatever the other sets of engines"
    )
    for name in ("d.png", "d-ratios.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
