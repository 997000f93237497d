"""Fuzzing of 200 changed ONNX files from a fixed seed; `python -m tests.fuzz.models` makes more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


def test_changed_files_are_compiled_or_refused_in_one_sentence(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    count = 200 if pytestconfig.getoption("thorough") else 60
    command = [sys.executable, "-m", "tests.fuzz.models", "--count", str(count), "--seed", "0", "--keep", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {kind: int(count) for count, kind in re.findall(r"^ *(\d+) (\w+)$", done.stdout, re.MULTILINE)}
    assert sum(counts.values()) == count and min(counts["compiled"], counts["refused"]) >= count // 10
