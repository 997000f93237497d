"""Kernel families are found by their folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashmem.compiler import kernels
from flashmem.compiler.configs import kinds
from flashmem.compiler.configs.families import load_families

TOY = """
from flashmem.compiler.configs.kinds import register
from flashmem.compiler.kernels.reduction.configs import RowConfig

@register
class ToyConfig(RowConfig):
    kind = "toy"
"""


def test_a_new_family_is_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "configs.py").write_text(TOY)
    (folder / "others.py").write_text("raise AssertionError")
    assert "toy" not in kinds.kinds()
    monkeypatch.setattr(kernels, "__path__", [*kernels.__path__, str(tmp_path)])
    monkeypatch.setattr(kinds, "_KINDS", dict(kinds.kinds()))
    load_families.__wrapped__("configs")
    assert kinds.kinds()["toy"].__name__ == "ToyConfig"
