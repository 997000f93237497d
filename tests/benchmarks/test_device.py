"""The check of a device: what its graphs know about their answers, what it counts as wrong, and its exit codes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.device import check, parts, running
from benchmarks.device.drawing import Drawing, difference, joined
from benchmarks.device.layouts import drawn
from benchmarks.device.running import Batch, Outcome
from flashmem.base.errors import UserError
from flashmem.runtime.opencl.discovery import list_devices
from tests.support.compared import by_runtime

DEVICE = list_devices()[0].descriptor_name


@pytest.fixture(scope="module")
def graphs() -> list[Drawing]:
    return [drawn(3, index, "fp32", large=False) for index in range(16)]


def test_bounds_hold_for_another_implementation(graphs: list[Drawing]) -> None:
    model = joined(graphs)
    feeds = {name: array for graph in graphs for name, array in graph.feeds.items()}
    outputs = [output for graph in graphs for output in graph.outputs]
    assert [difference(*pair) for pair in zip(outputs, by_runtime(model, feeds), strict=True)] == [None] * len(outputs)
    used = {node.op_type for node in model.graph.node}
    assert used >= {"Transpose", "Reshape", "Slice", "Concat", "Split", "MatMul", "Conv"}


def test_graphs_are_those_of_their_seed(graphs: list[Drawing]) -> None:
    again, other = joined([drawn(3, 5, "fp32", large=False)]), joined([drawn(4, 5, "fp32", large=False)])
    assert joined([graphs[5]]) == again != other


def test_a_wrong_element_is_outside_the_bounds(graphs: list[Drawing]) -> None:
    for graph in graphs:
        for output in graph.outputs:
            right = output.known.exact.astype(np.float32)
            largest = np.unravel_index(np.abs(right).argmax(), right.shape)
            for wrong in (np.nan, 0, right[largest] - right.std()):
                answer = right.copy()
                answer[largest] = wrong
                assert "1 of" in str(difference(output, answer)), output.name
            assert difference(output, right) is None and difference(output, right[None]) is not None


def _batch(folder: Path) -> Batch:
    return Batch(DEVICE, 3, 0, 3, "fp32", "buffer", "dma", False, folder)


def test_graphs_are_right_here(tmp_path: Path) -> None:
    outcome = running.play(_batch(tmp_path))
    assert (outcome.counts, outcome.lines) == (Counter(right=3), [])


def _right(graphs: Any) -> list[dict[str, Any]]:
    return [{output.name: output.known.exact for graph in graphs for output in graph.outputs}] * running.RUNS


def test_a_graph_that_is_not_right_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def off(graphs: Any, batch: Batch) -> list[dict[str, Any]]:
        first, second = _right(graphs)
        return [first, {name: array + array.std() if name.startswith("g1_") else array for name, array in second.items()}]

    monkeypatch.setattr(running, "_answers", off)
    outcome = running.play(_batch(tmp_path))
    assert outcome.counts == Counter(right=2, wrong=1)
    assert outcome.lines[0].startswith("wrong: run 2: g1_") and outcome.lines[0].endswith("seed 3, fp32, buffer, dma)")
    (kept,) = tmp_path.iterdir()
    assert kept.name == "3-g1_fp32-buffer-dma"
    assert {file.name for file in kept.iterdir()} == {"model.onnx", "inputs.npz", "expected.npz", "finding.txt"}


@pytest.mark.parametrize("alone", ["right", "refused"])
def test_graphs_of_a_model_that_fails_are_judged_alone(alone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(graphs: Any, batch: Batch) -> list[dict[str, Any]]:
        if len(graphs) > 1:
            raise ZeroDivisionError("in many")
        if alone == "refused" and graphs[0].prefix == "g2_":
            raise UserError("no such kernel")
        return _right(graphs)

    monkeypatch.setattr(running, "_answers", failing)
    outcome = running.play(_batch(tmp_path))
    assert outcome.counts == (Counter(right=2, failed=1) if alone == "right" else Counter(right=2, refused=1))
    assert ("only together with others: ZeroDivisionError: in many" if alone == "right" else "no such kernel") in outcome.lines[
        0
    ]


@pytest.mark.parametrize(
    ("kinds", "code"),
    [(["right"], 0), (["right", "refused"], 0), (["right", "wrong"], 1), (["right", "failed"], 1), (["refused"], 1)],
)
def test_exit_codes(kinds: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = dict(os.environ)

    def outcomes(setting: object, deadline: float) -> Iterator[Outcome]:
        assert os.environ["FLASHMEM_CACHE_DIR"] != before.get("FLASHMEM_CACHE_DIR")
        for kind in kinds:
            made = Outcome()
            made.add(kind, "" if kind == "right" else "the reason")
            yield made

    monkeypatch.setattr(check, "PARTS", {"layouts": parts.Part(1.0, outcomes)})
    with pytest.raises(SystemExit) as ended:
        check.main(["--device", DEVICE])
    printed = capsys.readouterr().out
    assert ended.value.code == code, printed
    assert os.environ == before
    assert list_devices()[0].driver_version in printed
    assert all(f"layouts: {kind}: the reason" in printed for kind in kinds if kind != "right")


def test_every_precision_path_and_mode_is_drawn() -> None:
    setting = parts.Setting(DEVICE, list_devices()[0], 0, 1, 1, 1, Path())
    assert {place[0] for place in setting.places} == {"fp32", "fp16"}
    assert {place[1] for place in setting.places} == {"buffer", "texture"}
    assert {place[2] for place in setting.places} >= {"dma", "interleave"}
