"""A runtime's host budget, on an imitated device with memory of its own: shared by its models, kept, and given back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashmem import Runtime, Session
from flashmem.base.errors import BudgetError, UserError
from flashmem.program.program import host_bytes, pinned_output_bytes
from flashmem.runtime.opencl.discovery import find_device
from flashmem.schedule.host_tier import tier_bytes
from flashmem.schedule.residency import host_ring_bytes
from tests.support.mini_bundle import MiniModel, write_mini_bundle
from tests.support.own_memory import give_own_memory, reads_of_files


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[MiniModel]]:
    give_own_memory(monkeypatch, find_device("pocl"))
    monkeypatch.setattr("flashmem.runtime.opencl.device.Device.uses_host_memory", False)
    yield [write_mini_bundle(tmp_path / f"{name}.flashmem") for name in ("one", "two")]


def needed(model: MiniModel) -> int:
    """Bytes of host memory without slices in a tier."""
    program = model.open().program
    return host_ring_bytes(program, model.open().plan.loader_threads) + host_bytes(program) + pinned_output_bytes(program)


def in_tier(model: MiniModel) -> int:
    return sum(tier_bytes(part) for part in model.open().program.slices)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("mode", ["dma", "interleave"])
def test_models_share_a_host_budget_and_have_the_same_bits(
    share: float, mode: Any, models: list[MiniModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = reads_of_files(monkeypatch)
    inputs = [model.inputs() for model in models]
    expected = []
    for model, given in zip(models, inputs, strict=True):
        with Session(model.path, mode=mode) as session:
            expected.append(session.run(None, given))
    budget = sum(map(needed, models)) + int(share * sum(map(in_tier, models)))
    with Runtime(host_budget=budget) as runtime:
        opened = [runtime.open(model.path, mode=mode) for model in models]
        for _ in range(3):
            for model, given, right in zip(opened, inputs, expected, strict=True):
                for got, wanted in zip(model.run(None, given), right, strict=True):
                    np.testing.assert_array_equal(got, wanted)
                tier = model.variants[0].opened.tier
                assert tier is not None
                tier.wait()
        assert runtime.host_budget == budget and 0 < runtime.host_peak <= budget
        reads.watch(models[0].open().program.slices)
        opened[0].run(None, inputs[0])
        assert share < 1 or not sum(reads.taken().values())


def test_a_model_without_room_is_refused_until_another_one_is_closed(models: list[MiniModel]) -> None:
    budget = needed(models[0]) + needed(models[1]) - 1
    with Runtime(host_budget=budget) as runtime:
        runtime.open(models[0].path, mode="dma")
        with pytest.raises(BudgetError, match=r"raise it to .* bytes, or close a model") as refused:
            runtime.open(models[1].path, mode="dma")
    with Runtime(host_budget=refused.value.smallest_bytes) as runtime:
        first = runtime.open(models[0].path, mode="dma")
        first.run(None, models[0].inputs())  # its tier takes the rest
        first.close()
        runtime.open(models[1].path, mode="dma").run(None, models[1].inputs())


def test_without_a_host_budget_nothing_is_kept_there(models: list[MiniModel]) -> None:
    with Runtime() as runtime:
        model = runtime.open(models[0].path, mode="dma")
        model.run(None, models[0].inputs())
        assert runtime.host_budget is None and 0 < runtime.host_peak <= needed(models[0])


def test_where_memory_is_shared_there_is_one_budget() -> None:
    with pytest.raises(UserError, match="leave the host budget out"):
        Runtime(device="pocl", host_budget="1GB")
    with pytest.raises(UserError, match="host budget 'lots' is not a size"):
        Runtime(device="pocl", host_budget="lots")
    with Runtime(device="pocl", host_budget="auto") as runtime:
        assert runtime.host_budget is None
