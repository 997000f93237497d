"""Predictors of GPU families: shipped for every phone, better than the references on what they were trained for."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.paper.lookup import CompiledCode
from benchmarks.planning.boosters import launch_of
from flashmem.base.errors import UserError
from flashmem.base.resources import read_text
from flashmem.planning.capacity.choice import default_model
from flashmem.planning.capacity.family import FAMILY_MODES, SHARES, FamilyPredictor
from flashmem.planning.capacity.roofline import Roofline
from flashmem.profiler.phone_compilers.boosters import gpus_of
from flashmem.profiler.phone_compilers.compiled_dataset import SUFFIX, read_rows
from flashmem.profiler.phone_compilers.families import FAMILIES, Family
from flashmem.profiler.phone_compilers.pairs import Pair, pairs
from flashmem.target.descriptor import descriptor_names, load_descriptor
from tests.support.paths import ROOT

SERVED = [name for name in descriptor_names() if load_descriptor(name).pipelines is not None]


def some_pairs(family: Family) -> list[Pair]:
    """Launches of the dataset in their own shapes, on shipped GPUs."""
    _, rows = read_rows(ROOT / f"devices/{family.name}{SUFFIX}")
    return [pair for pair in pairs(rows[::4], gpus_of(family)) if pair.own and pair.device]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_boosters_are_nearer_to_compiled_code_than_roofline_and_lookup(family: Family) -> None:
    found: dict[str, list[float]] = {"booster": [], "roofline": [], "lookup": []}
    for pair in some_pairs(family):
        descriptor, launch = load_descriptor(pair.device), launch_of(pair.launch)
        models = {"booster": default_model(descriptor, pair.launch.memory_path), "roofline": Roofline(descriptor)}
        if descriptor.counted:
            models["lookup"] = CompiledCode.load(descriptor, pair.launch.memory_path)
        for name, model in models.items():
            found[name].append(abs(model.seconds(launch, pair.launch.weight_bytes) / pair.model.seconds(pair.launch) - 1))
    assert len(found["booster"]) > 15 and np.median(found["booster"]) < 0.08
    for name in ("roofline", "lookup"):
        assert not found[name] or np.mean(found[name]) > 2 * np.mean(found["booster"])


@pytest.mark.parametrize("name", SERVED)
def test_every_phone_and_the_generic_gpu_have_boosters(name: str) -> None:
    descriptor = load_descriptor(name)
    model = default_model(descriptor, "texture")
    assert isinstance(model, FamilyPredictor)
    assert f"{descriptor.capacity_model} trained on compiled code, no phone measured" in model.note
    pairs_of = int(model.note.partition("(")[2].split()[0])
    assert pairs_of >= 2000


def test_streaming_never_makes_a_launch_faster_and_batches_change_nothing() -> None:
    descriptor = load_descriptor("mali-g715")
    launches = [(launch_of(pair.launch), pair.launch.weight_bytes) for pair in some_pairs(FAMILIES["mali-valhall"])[::4]]
    model = default_model(descriptor, "texture")
    for mode in FAMILY_MODES:
        model.prepare(launches, mode)
        for launch, weights in launches:
            alone = model.seconds(launch, weights)
            loaded = [model.loaded_seconds(launch, weights, nbytes, mode) for nbytes in np.linspace(0, 20 * alone * 1e10, 60)]
            assert loaded[0] == alone and all(later >= earlier for earlier, later in pairwise(loaded))
            assert isinstance(model, FamilyPredictor)
            again = FamilyPredictor(*model._trees, model._gpu, "texture")
            assert again.seconds(launch, weights) == alone
            assert again.streamable_bytes(launch, weights, 0.2, mode) == model.streamable_bytes(launch, weights, 0.2, mode)


def test_half_a_gpu_takes_longer() -> None:
    """The GPU's facts decide, for devices that no training pair has."""
    descriptor = load_descriptor("adreno750")
    pipes = descriptor.pipelines
    assert pipes is not None
    narrow = {name: getattr(pipes, name) / 2 for name in ("lanes", "texture_bytes", "load_bytes")}
    half = replace(descriptor, pipelines=replace(pipes, **narrow), parallelism=descriptor.parallelism // 2)
    bound = [pair for pair in some_pairs(FAMILIES["adreno7xx"]) if pair.launch.macs > 1e8 and pair.device == "adreno750"]
    ratios = []
    for pair in bound:
        launch, weights = launch_of(pair.launch), pair.launch.weight_bytes
        ratios.append(
            default_model(half, "texture").seconds(launch, weights)
            / default_model(descriptor, "texture").seconds(launch, weights)
        )
    assert len(bound) >= 5 and 1.6 < np.median(ratios) < 2.2


def test_a_copy_of_a_shipped_descriptor_has_the_shipped_numbers(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(read_text("devices", "adreno750.toml"))
    copy, shipped = (default_model(load_descriptor(name), "texture") for name in (str(tmp_path / "my.toml"), "adreno750"))
    launch = launch_of(some_pairs(FAMILIES["adreno7xx"])[0].launch)
    assert isinstance(copy, FamilyPredictor) and copy.seconds(launch) == shipped.seconds(launch)
    without = replace(load_descriptor("adreno750"), pipelines=None)
    with pytest.raises(UserError, match=r"trained on compiled code, and has no \[pipelines\]"):
        default_model(without, "texture")


def test_curves_begin_at_one() -> None:
    assert SHARES[0] == 0 and (np.diff(SHARES) > 0).all()
