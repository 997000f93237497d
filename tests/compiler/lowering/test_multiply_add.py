"""Multiply-add by device: each form is right, has the same bits in all transfer modes, and leaves exact remainders alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import flashmem
from flashmem.compiler.lowering.templates import _prelude
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.target.descriptor import load_descriptor
from tests.compiler.selection.test_configs import NODES
from tests.support.compared import require_right
from tests.support.paths import ROOT

DEVICES = [device.descriptor_name for device in list_devices()]


def _descriptor(device: str, way: str, folder: Path) -> str:
    """A file with the descriptor of `device` that multiplies and adds by `way`."""
    text = (ROOT / f"devices/{device}.toml").read_text()
    kept = "\n".join(line for line in text.splitlines() if not line.startswith(("tuned", "counted", "capacity_model")))
    file = folder / f"{device}.toml"
    file.write_text(f'{kept}\n[code]\nmultiply_add = "{way}"\n')
    return str(file)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("way", "written"), [("mad", "= mad("), ("expression", "= FM_MAD(")])
def test_forms(device: str, way: str, written: str, tmp_path: Path) -> None:
    file = tmp_path / "m.onnx"
    file.write_bytes(NODES.proto().SerializeToString())
    bundle = flashmem.compile(file, tmp_path / "b", device=_descriptor(device, way, tmp_path), memory_path="buffer")
    assert written in bundle.source.plain and "fma(" not in bundle.source.plain
    assert ("#define FM_MAD" in bundle.source.plain) == (way == "expression")
    answers = []
    for mode in load_descriptor(device).modes["buffer"]:
        with flashmem.Session(bundle, device=device, mode=mode) as session:
            answers.append(session.run(None, NODES.feeds))
    require_right(NODES.proto(), NODES.feeds, answers[0])
    for other in answers[1:]:
        for got, first in zip(other, answers[0], strict=True):
            np.testing.assert_array_equal(got, first)


def test_the_exact_remainder_is_a_true_fma() -> None:
    """Quantisation to integers depends on it, so no device's form replaces it."""
    used = _prelude("fm_quotient(x, y)")
    assert "fma(-(q), (y), (x))" in used and "FM_MAD" not in used
