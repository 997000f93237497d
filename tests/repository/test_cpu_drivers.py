"""Commands with other drivers than the machine's (`tools/cpu_drivers.py`): what is laid over what, and what is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flashmem.base.errors import UserError
from tests.support.paths import ROOT
from tools import cpu_drivers


def _libraries(folder: Path, version: str) -> Path:
    there = folder / "lib/x86_64-linux-gnu"
    there.mkdir(parents=True)
    (there / "libc.so.6").write_bytes(f"\0GNU C Library (Debian GLIBC) stable release version {version}.\n\0".encode())
    return folder


@pytest.mark.parametrize(
    ("here", "there", "newer"), [("2.36", "2.41", "there"), ("2.41", "2.41", "there"), ("2.43", "2.9", "here")]
)
def test_the_newer_c_library_is_uppermost(here: str, there: str, newer: str, tmp_path: Path) -> None:
    usr, root = _libraries(tmp_path / "usr", here), tmp_path / "root"
    _libraries(root / "usr", there)
    laid = cpu_drivers._laid_over(root, "x86_64-linux-gnu", usr)
    layers = [str(usr / "lib"), str(root / "usr/lib")]
    assert laid[:2] == [layers[0], ":".join(layers if newer == "here" else reversed(layers))]
    assert laid[2] == str(usr / "share")


def test_a_machine_without_namespaces_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unshare").write_text("#!/bin/sh\necho 'unshare: not permitted' >&2; exit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(cpu_drivers.Wanted, "set_up", lambda wanted, architecture: tmp_path)
    with pytest.raises(UserError, match=r"cannot be laid over .* \(unshare: not permitted\); allow user namespaces"):
        cpu_drivers.command_with(cpu_drivers.DRIVERS["rusticl"], ["true"])


def test_an_unknown_driver_is_a_sentence() -> None:
    words = [sys.executable, "-m", "tools.cpu_drivers", "swiftshader", "true"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "flashmem: usage: python -m tools.cpu_drivers rusticl|pocl7 COMMAND...\n"
