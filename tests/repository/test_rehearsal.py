"""The commands that `tools/rehearse-arm64` runs in its roots, run here; and its comparison of answers."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from flashmem.runtime.opencl.discovery import list_devices
from tests.support.mini_bundle import write_mini_bundle
from tests.support.paths import ROOT

TOOLS = ROOT / "tools"


@pytest.fixture(scope="module")
def rehearsal() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("rehearse_arm64", str(TOOLS / "rehearse-arm64"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses look into it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        loader.exec_module(module)
    return module


@pytest.mark.thorough
@pytest.mark.skipif(all(device.descriptor_name != "pocl" for device in list_devices()), reason="plays on PoCL")
def test_every_mode_is_played_or_refused(tmp_path: Path) -> None:
    answers = tmp_path / "answers"
    for path in ("buffer", "texture"):
        model = write_mini_bundle(tmp_path / f"{path}.flashmem", path)  # type: ignore[arg-type]
        np.savez(tmp_path / f"{path}.npz", **model.inputs())
    done = subprocess.run(
        [sys.executable, TOOLS / "rehearse_bundles.py", tmp_path, answers], capture_output=True, text=True, check=True
    )
    rows = {(row["bundle"], row["mode"]): row for row in map(json.loads, done.stdout.splitlines())}
    played = {key for key, row in rows.items() if row.get("same")}
    assert played == {("buffer", mode) for mode in ("map", "alias", "dma", "interleave")} | {
        ("texture", mode) for mode in ("dma", "interleave")
    }
    assert {key for key, row in rows.items() if "refused" in row} == {("texture", "map"), ("texture", "alias")}
    for bundle, mode in played:
        with np.load(answers / f"{bundle}-{mode}.npz") as found:
            np.testing.assert_allclose(found["arr_0"], model.reference(model.inputs())[0], rtol=0, atol=2e-5)


def test_only_equal_bits_are_equal(rehearsal: ModuleType) -> None:
    wanted = [np.array([0.0, 2.0, 4.0], np.float32), np.array([1, 2], np.int64)]
    assert rehearsal.difference([each.copy() for each in wanted], wanted) == 0
    assert rehearsal.difference([np.array([-0.0, 2.0, 4.0], np.float32), wanted[1]], wanted) > 0
    assert rehearsal.difference([np.array([0.0, 2.0, 5.0], np.float32), wanted[1]], wanted) == 0.25
    assert rehearsal.difference([np.array([0.0, np.nan, 4.0], np.float32), wanted[1]], wanted) > rehearsal.ALLOWED


def test_a_log_takes_the_place_of_the_last_one(rehearsal: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- log:begin -->\nold\n<!-- log:end -->\nafter\n")
    assert rehearsal.replaced(page, "new\n") == "before\n<!-- log:begin -->\nnew\n<!-- log:end -->\nafter\n"
