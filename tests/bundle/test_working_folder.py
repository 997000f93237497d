"""Copies of a model that compiling makes are beside the bundle, and leave nothing."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

import flashmem
from flashmem.base.errors import UserError
from flashmem.bundle.version_directories import begin_folder
from flashmem.bundle.working_folder import working_folder

MODEL, SHAPES = Path(__file__).parents[1] / "data" / "gptneo-tiny-dynamic-legacy.onnx", {"input_ids": (2, 11)}


@pytest.mark.parametrize("given", [{"quantize": "int8"}, {}], ids=str)
def test_no_temporary_folder_is_used(given: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODEL if given else MODEL.read_bytes()

    real = tempfile.mkdtemp

    def refuse(suffix: Any = None, prefix: Any = None, dir: Any = None) -> str:
        assert prefix == "flashmem-icd-", "a copy in the temporary folder"
        return real(suffix, prefix, dir)

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    flashmem.compile(model, tmp_path / "new" / "m.flashmem", device="pocl", build=False, shapes=SHAPES, **given)
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["m.flashmem"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    left, lock = begin_folder(tmp_path / "m.flashmem")
    (left / "large").write_bytes(b"x")
    with working_folder(tmp_path / "m.flashmem", "") as first:
        assert left.exists()  # its process holds it
        os.close(lock)
        with working_folder(tmp_path / "m.flashmem", "") as second:
            assert sorted(tmp_path.iterdir()) == sorted([first, second])
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    said = r"m.flashmem cannot be written \(.*\); name another output"
    with pytest.raises(UserError, match=said), working_folder(tmp_path / "file" / "m.flashmem", ""):
        pass
