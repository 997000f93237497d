"""Dot products of bytes through the compilers of Adreno and Mali: their instructions are in the code."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest

import flashmem
from flashmem.profiler.phone_compilers.compiling import Compiler, options_of, root_of
from flashmem.profiler.phone_compilers.gpus import gpu_of
from flashmem.profiler.phone_compilers.report import examine
from flashmem.program.kernel_text import kernel_texts
from flashmem.runtime.opencl.dot_products import KHRONOS, KHRONOS_MIXED, with_dot_products
from flashmem.target.descriptor import load_descriptor
from tests.support.integer_products import Case
from tests.support.phone_compilers import need_compilers

CASES = (
    Case("uint8", "int8", sizes=(128, 256, 256), zero=7),
    Case("uint8", "int8", (1, 64, 14, 14), (64, 64, 3, 3), zero=7, attributes=(("pads", (1, 1, 1, 1)),)),
)


@pytest.mark.parametrize(
    ("device", "dots", "instruction"),
    [
        ("adreno750", KHRONOS_MIXED, r"\bdp4acc\.mixed\b"),
        pytest.param("mali-g710", KHRONOS, r"\bIDPADD\b", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize(
    "case", [pytest.param(CASES[0], id="matmul"), pytest.param(CASES[1], id="conv", marks=pytest.mark.thorough)]
)
def test_the_instruction_is_in_the_code(case: Case, device: str, dots: str, instruction: str, tmp_path: Path) -> None:
    gpu, tile = gpu_of(device), load_descriptor(device).tile
    need_compilers(gpu.architecture)
    onnx.save(case.model()[0], tmp_path / "m.onnx")
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "b", device=device, memory_path="buffer", build=False)
    texts = {name: text for file in bundle.path.rglob("*.cl") for name, text in kernel_texts(file.read_text()).items()}
    text = next(text for text in texts.values() if "FM_DOT4(" in text.partition("__kernel")[2])
    by_dots = with_dot_products(text, dots)
    with Compiler(gpu, root_of(gpu)) as compiler:
        made = compiler.compile(by_dots, options_of(by_dots))
    assert not made.error
    assert len(re.findall(instruction, made.printed)) >= tile.rows * tile.columns
    report = examine({"dots": by_dots, "plain": text}, gpu)
    found = {each.kernel: each for each in report.kernels}
    assert not report.failures, report.failures
    loops = [found[name].main_loop for name in ("dots", "plain")]
    assert all(loops), report.table()
    dots_slots, plain_slots = (loop.slots / (16 * tile.rows * tile.columns) for loop in loops if loop is not None)
    assert dots_slots < 0.55 and dots_slots < plain_slots / 4, (
        report.table()
    )  # slots for each multiply-add: 16 of a quad of words
