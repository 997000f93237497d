"""The stress command on a small model: every mode and budget gives the resident answer, and it counts wrong answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.streaming import stress
from flashmem.runtime.opencl.copier import Copier, CopyEvent
from flashmem.runtime.opencl.discovery import list_devices
from tests.support.own_memory import give_own_memory
from tests.support.zoo_data import DATA

ARGUMENTS = ("--paths", "buffer", "--jobs", "1", "--each", "3", "--delay", "0.2")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bundles")


def played(device: Any, bundles: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[object, dict[str, Any]]:
    model = ("--models", str(DATA / "vit-tiny.onnx"))
    with pytest.raises(SystemExit) as ended:
        stress.main(["--device", device.descriptor_name, "--bundles", str(bundles), *model, *ARGUMENTS, *more])
    return ended.value.code, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("apart", [False, True], ids=["shared", "apart"])
@pytest.mark.parametrize("device", list_devices()[:1], ids=lambda device: device.descriptor_name)
def test_late_loads_change_no_answer(
    device: Any, apart: bool, bundles: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if apart:
        give_own_memory(monkeypatch, device)
    code, summary = played(device, bundles, capsys, "--runs", "36")
    assert code == 0 and summary["runs"] == 36 and summary["wrong"] == summary["failed"] == 0
    assert {name.split()[1] for name in summary["by_mode"]} >= {"dma", "interleave"}


@pytest.mark.parametrize("device", list_devices()[:1], ids=lambda device: device.descriptor_name)
def test_an_answer_of_other_weights_is_counted(
    device: Any, bundles: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(copier: Copier, *where: Any) -> Callable[..., CopyEvent]:
        return lambda address, behind=None: prepare(copier, *where)(zeros.ctypes.data, behind)

    def losing(*arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Copier, "prepare", lost)
            return play(*arguments)

    prepare, play, zeros = Copier.prepare, stress.play, np.zeros(1 << 24, np.uint8)
    monkeypatch.setattr(stress, "play", losing)
    code, summary = played(device, bundles, capsys, "--runs", "6", "--modes", "dma")
    assert code == 1 and summary["wrong"] == summary["runs"] == 6
