"""Launches, bytes and hashes of whole models equal those of the golden files, and every golden file has a model."""

from __future__ import annotations

import json
from itertools import cycle
from typing import Any

import pytest

from tests.golden import HERE
from tests.golden.models import MODELS
from tests.golden.records import DEVICES, hash_stages, record
from tests.golden.summary import HASHED, summary


def _file(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text())
    return content


@pytest.mark.parametrize("name", MODELS)
def test_launches_and_bytes_are_those_of_the_golden_file(name: str) -> None:
    content = _file(name)
    content.pop("hashes", None)
    assert summary(MODELS[name]) == content


@pytest.mark.parametrize(("device", "name"), [*zip(DEVICES, cycle(HASHED), strict=False)])
def test_kernels_programs_weights_and_plans_are_those_of_the_golden_file(device: str, name: str) -> None:
    found = hash_stages(record(MODELS[name], device))
    assert found == _file(name)["hashes"][device], f"python -m tests.golden {name} --device {device} --compare main"


def test_each_golden_file_is_compared() -> None:
    assert {path.stem for path in HERE.glob("*.json")} == set(MODELS)
    assert all(tuple(_file(name)["hashes"]) == DEVICES for name in HASHED)
