"""The name of a bundle in the cache: equal for equal requests, another one for every option that changes the bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashmem.compilation import read_compilation
from flashmem.request.request import BundleRequest

ONNX = b"a model that nothing reads"
KNOWN: dict[str, Any] = {"device": "nvidia"}

OTHERS: list[dict[str, Any]] = [
    {"device": "adreno750"},
    {"budget": "64MB"},
    {"budget": "64MB", "host_budget": "1GB"},
    {"m_peak": "8MB"},
    {"lambda_": 0.5},
    {"chunk": "64KiB"},
    {"precision": "fp16"},
    {"precision": "tf32"},
    {"states": "auto"},
    {"states": {"h": "h_next"}},
    {"states": {"h": "h_next"}, "state_precision": "int8"},
    {"quantize": "int4"},
    {"quantize": "int8"},
    {"shapes": {"x": (1, 3)}},
    {"shapes": [{"x": (1, 3)}, {"x": (1, 4)}]},
    {"constants": {"rate": 16000}},
    {"constants": {"rate": 8000}},
    {"preload": ["w"]},
    {"memory_path": "texture"},
    {"mode": "interleave"},
    {"objective": "steady"},
    {"objective": "paper"},
    {"objective": "paper", "units": "printed"},
    {"strategy": "on-demand"},
    {"unfusion": False},
    {"mu": 0.2},
    {"alpha": 0.2},
    {"optimize": "steady"},
]
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"budget": "64MB"}, {"budget": 64_000_000}),
    ({"chunk": "64KiB"}, {"chunk": 65536}),
    ({}, {"chunk": "auto", "precision": "fp32", "mode": "auto", "memory_path": "auto", "batch": 1, "preload": ()}),
    ({}, {"mode": "dma", "memory_path": "buffer", "mu": 0.1, "shapes": {}, "constants": {}, "state_precision": None}),
    ({"shapes": {"x": (1, 3)}}, {"shapes": [{"x": [1, 3]}]}),
    ({"states": {"h": "g"}}, {"states": {"h": "g"}, "state_precision": "fp32", "objective": "steady"}),
    ({"constants": {"k": [1, 2]}}, {"constants": {"k": (1, 2)}}),
]


def key(**options: Any) -> str:
    return read_compilation(ONNX, BundleRequest(**{**KNOWN, **options})).name


def test_every_option_of_a_bundle_is_in_its_name() -> None:
    names = [key(), *(key(**each) for each in OTHERS)]
    assert len({*names}) == len(names)


@pytest.mark.parametrize(("one", "other"), SAME)
def test_the_same_request_in_other_words_has_the_same_name(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert key(**one) == key(**other)


def test_what_a_language_model_holds_is_in_its_name(tmp_path: Path) -> None:
    (model := tmp_path / "m.gguf").write_bytes(b"GGUF")
    asked: list[dict[str, Any]] = [{}, {"max_length": 64}, {"batch": 4}, {"state_precision": "int8"}, {"objective": "first"}]
    names = [read_compilation(model, BundleRequest(**KNOWN, **each)).name for each in asked]
    assert len({*names}) == len(names)
    assert read_compilation(model, BundleRequest(**KNOWN, batch=1, state_precision="fp16")).name == names[0]
