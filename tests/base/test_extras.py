"""A command that needs an absent extra names it in one sentence and exits with 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from flashmem.base.extras import EXTRAS
from tests.support.paths import ROOT

MODEL = str(ROOT / "tests/data/resnet-tiny.onnx")

_COMMANDS = """
import json, sys
from flashmem.__main__ import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["flashmem", *words]
    try:
        main()
    except SystemExit as left:
        print(left.code, file=sys.stderr)
"""
"""Runs commands in sequence, and prints the exit code of each."""

_COMPILING = [
    ["compile", MODEL, "-o", "m.flashmem"],
    ["plan", MODEL],
    ["plan", "zoo:gptneo-125m"],
    ["run", MODEL],
    ["simulate", MODEL, "--device", "nvidia"],
    ["sweep", MODEL, "--m-peak", "8MB", "-o", "s.csv", "--device", "nvidia"],
    ["design", "app.toml", "-o", "x"],
    ["tune", "-o", "t"],
    ["profile", "-o", "p"],
]
COMMANDS = {
    "onnx": _COMPILING,
    "onnx_ir": _COMPILING[:1],
    "onnxscript": _COMPILING[:1],
    "jinja2": _COMPILING,
    "ortools": [["profile", "-o", "p"]],
    "xgboost": [["profile", "-o", "p"], ["profile", "--dataset", str(ROOT / "devices/pocl.profile.csv.gz"), "--report"]],
    "bokeh": [["simulate", MODEL, "--timeline", "t.html"], ["run", MODEL, "--timeline", "t.html"]],
    "matplotlib": [
        ["sweep", MODEL, "--m-peak", "8MB", "-o", "s.csv", "--plot", "s.png"],
        ["queue", "a.flashmem", "--plot", "q.png"],
        ["profile", "--dataset", str(ROOT / "devices/pocl.profile.csv.gz"), "--report", "--figures", "f"],
    ],
    "rapidocr": [["demo"]],
    "cv2": [["demo"]],
    "PIL": [["demo"], ["run", MODEL, "--image", MODEL]],
    "scipy": [["run", MODEL, "--audio", MODEL]],
    "tokenizers": [["run", MODEL, "--text", "a"]],
}
"""The extra that each module belongs to."""


def without(module: str, commands: list[list[str]], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run commands in an interpreter, and in its children, that cannot import `module`; they may write to `folder`/here."""
    site, here = folder / "site", folder / "here"
    for each in (site, here):
        each.mkdir()
    (site / "sitecustomize.py").write_text(f"import sys\nsys.modules[{module!r}] = None\n")
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "XDG_CACHE_HOME": str(folder / "cache")}
    words = [sys.executable, "-c", _COMMANDS, json.dumps(commands)]
    return subprocess.run(words, cwd=here, capture_output=True, text=True, check=True, env=environment)


@pytest.mark.parametrize("module", COMMANDS)
def test_a_command_without_a_module_names_its_extra(module: str, tmp_path: Path) -> None:
    done = without(module, COMMANDS[module], tmp_path)
    assert "Traceback" not in done.stderr and done.stdout == "", done.stderr
    lines = done.stderr.splitlines()
    said, codes = lines[::2], lines[1::2]
    assert codes == ["2"] * len(COMMANDS[module]), done.stderr
    for sentence in said:
        assert sentence.startswith("flashmem: ") and module in sentence and f"`{EXTRAS[module]}`" in sentence, sentence
    assert {path.name for path in (tmp_path / "here").iterdir()} <= {"s.csv"}, "only a sweep's table was begun"


@pytest.mark.parametrize(
    ("module", "words", "said"),
    [
        ("onnxruntime", ["run", MODEL, "--verify"], "--verify needs ONNX Runtime; install it with: pip install onnxruntime"),
    ],
)
def test_a_peer_that_is_missing_is_named(module: str, words: list[str], said: str, tmp_path: Path) -> None:
    assert without(module, [words], tmp_path).stderr.splitlines() == [f"flashmem: {said}", "2"]


def test_the_library_names_the_extra_too(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["onnx"] = None
import flashmem
try:
    flashmem.compile
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    said = (
        "flashmem.compile needs onnx; install flashmem with its `compile` or `desktop` extra: pip install 'flashmem[compile]'"
    )
    assert done.stdout.strip() == said


def test_every_module_is_in_the_extra_that_is_named() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    distributions = packages_distributions()
    for module, extra in EXTRAS.items():
        names = distributions.get(module, [module])
        assert any(each.startswith(name.lower()) for each in declared[extra] for name in names), (module, extra, names)
