"""CARIn's use cases: the applications are valid, and bound what the paper bounds (its section 6.2)."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.paper.use_cases import IMAGES, USE_CASES
from flashmem.tools.design.application import read_application
from tests.support.paths import DATA
from tests.support.trained_inputs import path_of

BOUNDS = {
    "UC1": {("latency", "maximum", 0.04167)},
    "UC2": {("memory", "average", 90e6)},
    "UC3": {("latency", "average", 0.1), ("latency", "deviation", 0.01)},
    "UC4": {("latency", "maximum", 0.01)},
}
TASKS = {"UC1": 1, "UC2": 1, "UC3": 2, "UC4": 3}


@pytest.mark.parametrize("name", USE_CASES)
def test_a_use_case_is_an_application(name: str, tmp_path: Path) -> None:
    case = USE_CASES[name]
    for network in case.tasks.values():
        if network is not None:
            path_of(network)
    file = tmp_path / "app.toml"
    images = {name: DATA / f"{tiny}.onnx" for name, tiny in zip(IMAGES, ("resnet-tiny", "vit-tiny"), strict=True)}
    file.write_text(case.text(["adreno750", "generic-cpu"], images))
    asked = read_application(file)
    assert len(asked.tasks) == TASKS[name]
    found = {(each.measure.metric, each.measure.statistic, each.bound) for each in asked.constraints}
    assert {(*key, round(bound, 9)) for *key, bound in found} == BOUNDS[name]
    assert all(each.at_most for each in asked.constraints)
    measured = {(each.measure.task, each.measure.metric) for each in asked.objectives}
    assert len(measured) >= 2 and {task for task, _ in measured} == {task.name for task in asked.tasks}
