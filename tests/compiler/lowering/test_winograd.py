"""Winograd F(2x2, 3x3): answers compared with ONNX Runtime and float64 sums, and the conditions of its selection."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashmem
from flashmem.base.types import MemoryPath
from flashmem.compiler.configs.config import KernelConfig
from flashmem.compiler.configs.listed import listed_configs, plain_configs, with_configs
from flashmem.compiler.configs.workload import Workload
from flashmem.compiler.kernels.contraction.configs import PlainContraction, StagedWinograd, Winograd
from flashmem.compiler.kernels.convolution.lowering import transformed_weights
from flashmem.compiler.selection.configs import choose
from flashmem.compiler.selection.selector import KernelSelector, packed_bytes
from flashmem.compiler.selection.tuning_database import SUFFIX, Timing, TuningDatabase
from flashmem.profiler.descriptor import write_descriptor
from flashmem.target.descriptor import DeviceDescriptor, load_descriptor
from tests.support.compared import DEVICES, PLACES, Nodes, require_right
from tests.support.inputs import floats

ALONE = Winograd("alone", 2, 16, 8, channels=16)
SHARED = StagedWinograd("shared", 4, 8, (2, 2), channels=4)
BESIDE = Winograd("beside", 2, 32, 8, channels=16, panel_columns=8)
PLAIN = PlainContraction("tile", 2, 16, 8, families=("conv",))


def convolved(x: Any, weight: Any, pads: tuple[int, int, int, int]) -> Any:
    """A 3x3 convolution in double precision."""
    top, left, bottom, right = pads
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (top, bottom), (left, right)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    return np.einsum("nchwij,kcij->nkhw", windows, weight.astype(np.float64))


@pytest.mark.parametrize(
    ("config", "device", "path"),
    [*((config, *place) for config in (ALONE, BESIDE) for place in PLACES), *((SHARED, *place) for place in DEVICES)],
    ids=lambda each: getattr(each, "name", each),
)
def test_answers(config: KernelConfig, device: str, path: MemoryPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd sizes, every padding, images smaller than a tile, channel counts that fill no vector, several images and panels."""

    def wherever_it_can_be(
        self: KernelSelector, workload: Workload, ending: object, widest: int | None, winograd: bool, *others: object
    ) -> KernelConfig:
        return config if winograd else PLAIN

    monkeypatch.setattr(KernelSelector, "config", wherever_it_can_be)
    nodes, random, exact = Nodes(), np.random.default_rng(8), []

    def numbers(*shape: int) -> Any:
        return random.standard_normal(shape).astype(np.float32)

    large, small, tiny = floats(2, 21, 9, 7), floats(1, 3, 5, 4, kind="around 1e3"), floats(3, 33, 3, 4, kind="positive")
    names = {id(each): nodes.input(each) for each in (large, small, tiny)}
    for image, columns, pads in (
        (large, 19, (1, 1, 1, 1)), (large, 33, (0, 2, 1, 0)), (large, 16, (0, 0, 0, 0)),
        (small, 16, (2, 2, 2, 2)), (tiny, 20, (0, 0, 0, 0)),
    ):  # fmt: skip
        weight = numbers(columns, image.shape[1], 3, 3)
        nodes.node("Conv", names[id(image)], nodes.constant(weight), pads=list(pads))
        exact.append(convolved(image, weight, pads))
    # As in residual networks: tensors in between are channels-last, and the kernel includes a bias, a sum and a Relu.
    x = names[id(large)]
    [first] = nodes.node("Conv", x, nodes.constant(numbers(24, 21, 3, 3)), nodes.constant(numbers(24)), pads=[1] * 4)
    [relu] = nodes.node("Relu", first)
    [second] = nodes.node("Conv", relu, nodes.constant(numbers(21, 24, 3, 3)), pads=[1] * 4)
    nodes.node("Relu", *nodes.node("Add", second, x))
    del nodes.outputs[-5:-1]
    # Convolutions that it does not compute.
    nodes.node("Conv", x, nodes.constant(numbers(9, 21, 3, 3)), dilations=[2, 1])
    nodes.node("Conv", x, nodes.constant(numbers(9, 21, 9, 1)))
    nodes.node("Conv", x, nodes.constant(numbers(30, 7, 3, 3)), group=3)
    (tmp_path / "m.onnx").write_bytes(nodes.proto().SerializeToString())
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "b", device=device, memory_path=path)
    by = [launch.kernel.partition("_")[0] for launch in bundle.program.launches]
    assert by.count("winograd") == len(exact) + 2 and by.count("conv") == 3
    answers = []
    # With a lane all kernels are built again: here once on each device, and the other form in test_oclgrind.
    with_lane = config is ALONE and (device, path) in DEVICES
    for mode in [mode for mode in load_descriptor(device).modes[path] if with_lane or mode != "interleave"]:
        with flashmem.Session(bundle, device=device, mode=mode) as session:
            answers.append(session.run(None, nodes.feeds))
    require_right(nodes.proto(), nodes.feeds, answers[0], exact)
    for other in answers[1:]:
        for one, same in zip(other, answers[0], strict=True):
            np.testing.assert_array_equal(one, same)


def test_weights_are_transformed_once_and_rounded_once() -> None:
    weight = np.random.default_rng(0).standard_normal((5, 3, 3, 3)).astype(np.float32)
    made = transformed_weights(weight)
    g = np.array([[2, 0, 0], [1, 1, 1], [1, -1, 1], [0, 0, 2]]) / 2
    np.testing.assert_array_equal(made, np.einsum("ai,kcij,bj->kcab", g, weight.astype(np.float64), g).astype(np.float32))


WORKLOAD = Workload("conv", "buffer", 784, 9 * 128, 128, taps=9)
LARGE = Workload("conv", "buffer", 49, 9 * 512, 512, taps=9)


def tuned(folder: Path, config: KernelConfig) -> DeviceDescriptor:
    """A device on which Winograd takes two thirds of the plain tile's time."""
    plain = plain_configs(load_descriptor("pocl"), "conv")[0]
    lines = [
        Timing(workload, each.name, each.code, seconds, "")
        for workload, base in ((WORKLOAD, 3e-4), (LARGE, 3e-4))
        for each, seconds in ((plain, base), (config, base * 2 / 3))
    ]
    (folder / f"mine{SUFFIX}").write_text(TuningDatabase({"version": 2}, lines).text())
    return replace(with_configs(load_descriptor("pocl"), [config]), tuned=str(folder / "mine"))


def test_where_it_is_chosen(tmp_path: Path) -> None:
    listed, *_ = [each for each in listed_configs(load_descriptor("pocl")) if isinstance(each, Winograd)]
    device = tuned(tmp_path, listed)
    plain = plain_configs(device, "conv")[0]
    ask = {"ending": (), "widest": None, "winograd": True}
    assert KernelSelector(device).config(WORKLOAD, **ask) == listed  # type: ignore[arg-type]
    assert KernelSelector(device).config(WORKLOAD, (), 10 << 20, True) == listed
    # Every run reads 16 numbers instead of 9 from memory; with 49 pixels that costs more than it saves.
    assert packed_bytes(LARGE, listed) == 16 / 9 * packed_bytes(LARGE, plain)
    assert KernelSelector(device).config(LARGE, **ask) == plain  # type: ignore[arg-type]
    # Taps that are not adjacent; limited memory; a first answer, if the config says so.
    assert KernelSelector(device).config(WORKLOAD) == plain
    assert KernelSelector(device, limited=True).config(WORKLOAD, **ask) == plain  # type: ignore[arg-type]
    assert KernelSelector(device, "cold").config(WORKLOAD, **ask) == plain  # type: ignore[arg-type]
    for other in ({"stride": 2}, {"batches": 2}, {"storage": "int8"}, {"storage": "float16"}, {"taps": 25}):
        assert KernelSelector(device).config(replace(WORKLOAD, **other), **ask) == plain  # type: ignore[arg-type]
    # Otherwise, a first answer weighs its bytes against its time.
    anywhere = replace(listed, steady=False)
    there = replace(tuned(tmp_path, anywhere), rates=replace(device.rates, disk_bandwidth=1e10))
    assert KernelSelector(there, "cold").config(WORKLOAD, **ask) == anywhere  # type: ignore[arg-type]
    slow = replace(there, rates=replace(device.rates, disk_bandwidth=1e9))
    assert KernelSelector(slow, "cold").config(WORKLOAD, **ask) == plain  # type: ignore[arg-type]


def test_it_is_not_chosen_where_nothing_near_was_measured(tmp_path: Path) -> None:
    listed, *_ = [each for each in listed_configs(load_descriptor("pocl")) if isinstance(each, Winograd)]
    untuned = replace(load_descriptor("pocl"), tuned="")
    assert choose(untuned, WORKLOAD) == plain_configs(untuned, "conv")[0]
    assert choose(tuned(tmp_path, listed), replace(WORKLOAD, rows=1 << 20)) == plain_configs(untuned, "conv")[0]


def test_what_it_costs_a_model(tmp_path: Path) -> None:
    """16/9 of the weights' bytes, no additional activations, and no use under a memory limit."""
    nodes, random = Nodes(), np.random.default_rng(2)
    weight = nodes.constant(random.standard_normal((128, 128, 3, 3)).astype(np.float32))
    nodes.node("Conv", nodes.input(random.standard_normal((1, 128, 28, 28)).astype(np.float32)), weight, pads=[1] * 4)
    (tmp_path / "m.onnx").write_bytes(nodes.proto().SerializeToString())
    listed, *_ = [each for each in listed_configs(load_descriptor("pocl")) if isinstance(each, Winograd)]
    tuned(tmp_path, listed)
    device = tmp_path / "pocl.toml"
    write_descriptor(
        tmp_path, replace(load_descriptor("pocl"), capacity_model="", tuned=str(tmp_path / "mine")), "a test", "cpu"
    )
    asked: list[dict[str, Any]] = [{}, {"optimize": "cold"}, {"budget": "64MB"}, {"m_peak": "64MB"}]
    common: dict[str, Any] = {
        "device": str(device),
        "memory_path": "buffer",
        "mode": "dma",
        "build": False,
        "optimize": "steady",
    }
    programs = [flashmem.compile(tmp_path / "m.onnx", tmp_path / "b", **common | each).program for each in asked]
    assert [any("winograd" in launch.kernel for launch in each.launches) for each in programs] == [True, False, False, False]
    first, other, *_ = programs
    assert sum(part.raw for part in first.slices) == sum(part.raw for part in other.slices) * 16 / 9
    assert first.arena_bytes == other.arena_bytes
