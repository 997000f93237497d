"""Postponed imports: the module is loaded when an attribute is read, and works as always."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flashmem.base.postponed import postponed


def test_a_module_runs_when_it_is_first_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fm_heavy.py").write_text("import sys\nsys.fm_ran = getattr(sys, 'fm_ran', 0) + 1\nvalue = 7\n")
    (tmp_path / "fm_light.py").write_text("import fm_heavy\n\ndef value():\n    return fm_heavy.value\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "fm_ran", 0, raising=False)
    found = list(sys.meta_path)
    with postponed("fm_heavy"):
        import fm_light  # type: ignore[import-not-found]
    assert sys.meta_path == found
    assert sys.fm_ran == 0  # type: ignore[attr-defined]
    assert fm_light.value() == fm_light.value() == 7
    assert sys.fm_ran == 1  # type: ignore[attr-defined]
    for name in ("fm_heavy", "fm_light"):
        monkeypatch.delitem(sys.modules, name)


def test_the_compiler_imports_no_sympy_until_a_dimension_is_computed() -> None:
    code = """
import sys
import flashmem.compile
assert "sympy.core" not in sys.modules
import onnx_ir
print(onnx_ir.SymbolicDim("N") * 2 + 1, "sympy.core" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "2*N + 1 True\n"
