"""Launches and bytes of whole models equal those of the golden files, and every golden file has a model."""

from __future__ import annotations

import json

import pytest

from tests.golden import HERE, MODELS, summary


@pytest.mark.parametrize("name", MODELS)
def test_launches_and_bytes_are_those_of_the_golden_file(name: str) -> None:
    assert summary(name) == json.loads((HERE / f"{name}.json").read_text())


def test_each_golden_file_is_compared() -> None:
    assert {path.stem for path in HERE.glob("*.json")} == set(MODELS)
