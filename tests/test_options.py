"""Options are resolved in one place: the same words mean the same to every command, and errors are one sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import flashmem
from flashmem.base.errors import BudgetError, NoDeviceError, UserError
from flashmem.cli.calls.models import SimulateCommand
from flashmem.cli.commands.plan_zoo import plan_architecture
from flashmem.cli.commands.simulate import simulate_model
from flashmem.request.request import BundleRequest
from flashmem.runtime.request.options import choose_budget, choose_mode, find_descriptor
from flashmem.target.descriptor import load_descriptor
from flashmem.tools.sweep.grid import Grid
from flashmem.tools.sweep.subjects import target_of
from tests.support.mini_bundle import write_mini_bundle
from tests.support.paths import DATA

RESNET = DATA / "resnet-tiny.onnx"
Asker = Callable[[str, str], Any]


def _sweep(model: Path | str, device: str, mode: str) -> None:
    (point,) = Grid(
        [str(model)], [device], ["fp32"], [], [10**9], [0.9], [0.1], "", 1 << 20, ["auto"], [mode], [""], "cached", "simulated"
    ).points()
    target_of(point)


ASKERS: dict[str, Asker] = {
    "compile": lambda device, mode: flashmem.compile(RESNET, device=device, mode=mode),  # type: ignore[arg-type]
    "sweep": lambda device, mode: _sweep(RESNET, device, mode),
    "plan": lambda device, mode: plan_architecture("gptneo-125m", BundleRequest(device=device, mode=mode, m_peak="1GB")),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mini_bundle(tmp_path_factory.mktemp("request") / "m.flashmem").path


@pytest.mark.parametrize(
    ("device", "mode", "sentence"),
    [
        ("nvidia", "teleport", "transfer mode 'teleport' is unknown; name one of: auto, map, alias, dma, interleave"),
        ("adreno540", "map", "device adreno540 cannot do transfer mode 'map' on the texture path, only: alias, interleave"),
        ("adreno9000", "auto", "no OpenCL device is called 'adreno9000'"),
        ("gone.toml", "auto", "no device descriptor 'gone.toml'"),
    ],
)
def test_every_command_refuses_a_request_with_the_same_sentence(device: str, mode: str, sentence: str, bundle: Path) -> None:
    said = set()
    for ask in ASKERS.values():
        with pytest.raises(UserError) as refusal:
            ask(device, mode)
        said.add(str(refusal.value))
    (only,) = said
    assert only.startswith(sentence)
    if mode != "map":  # the memory path of a bundle is fixed
        for play in (
            lambda: simulate_model(SimulateCommand(bundle, device=device, mode=mode)),
            lambda: _sweep(bundle, device, mode),
        ):
            with pytest.raises(UserError) as refusal:
                play()
            assert str(refusal.value) == only


def test_a_device_that_is_neither_here_nor_described_is_told_what_there_is() -> None:
    with pytest.raises(NoDeviceError, match=r"'adreno9000'; name one of these, or 'auto': .*; or describe one: .*adreno540"):
        find_descriptor("adreno9000")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"budget": "1MB", "m_peak": "1MB"}, "budget and M_peak cannot both be given"),
        ({"objective": "beauty"}, "objective 'beauty' is unknown; name one of: auto, first, steady, paper"),
        ({"strategy": "preload"}, "strategy 'preload' is unknown"),
        ({"precision": "int4"}, "precision 'int4' is unknown; name one of: fp32, fp16, tf32"),
        (
            {"precision": "tf32", "device": "adreno750"},
            "tf32 is for NVIDIA.s tensor cores .*, which device adreno750 does not have",
        ),
        ({"lambda_": 1.5}, "lambda 1.5 is not between 0 and 1"),
        ({"lambda_": float("nan")}, "lambda nan is not between"),
        ({"mu": -1.0}, "mu -1.0 is not a number of 0 or more"),
        ({"alpha": float("nan")}, "alpha nan is not a number of 0 or more"),
        ({"chunk": 0}, "chunk 0 is not a positive number of bytes"),
        ({"memory_path": "drum"}, "memory path 'drum' is unknown; name one of: auto, buffer, texture"),
    ],
)
def test_what_compile_is_asked_is_held_against_what_there_is(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        flashmem.compile(RESNET, **options)


def test_a_session_takes_a_descriptor_in_a_file_as_any_device(bundle: Path) -> None:
    with flashmem.Session(bundle, device="mine.toml") as session, flashmem.Session(bundle) as other:
        assert session.device == other.device


def test_auto_is_what_the_bundle_says() -> None:
    nvidia = load_descriptor("nvidia")
    assert find_descriptor("auto", own=nvidia) is nvidia
    assert find_descriptor("auto", "texture", own=nvidia).memory_paths[0] == "texture"
    modes = nvidia.modes["buffer"]
    assert choose_mode(nvidia, path="buffer") == modes[0]
    assert choose_mode(nvidia, path="buffer", planned=modes[-1]) == modes[-1] != modes[0]
    assert choose_mode(nvidia, path="buffer", planned="map") == modes[0], "planned for another device"
    assert choose_mode(nvidia, path="buffer", planned=modes[-1], strategy="preload") == "dma"
    with pytest.raises(UserError, match="has no memory path 'texture', which the bundle uses; compile for it"):
        choose_mode(replace(nvidia, memory_paths=("buffer",)), path="texture")


def test_budgets() -> None:
    assert choose_budget(None, 100, 60, mode="dma", strategy="stream") == 100
    assert choose_budget("80B", 100, 60, mode="dma", strategy="stream") == 80
    assert choose_budget(None, 50, 60, mode="dma", strategy="preload") is None
    with pytest.raises(BudgetError, match="budget 50B is too small: the bundle needs 60 bytes in transfer mode dma"):
        choose_budget(None, 50, 60, mode="dma", strategy="stream")
