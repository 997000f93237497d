"""Estimates of language models beside what their bundles take."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

import flashmem
from flashmem.base.errors import BudgetError, UserError
from flashmem.compilation import read_compilation
from flashmem.compile import compile_rehearsal
from flashmem.compiler.frontend.decoder.weights import sketched
from flashmem.compiler.frontend.decoder_files import converted
from flashmem.request.request import BundleRequest
from flashmem.tools.estimate import estimate_generation
from tests.support.command_line import command_line
from tests.support.gguf_models import SmallLlama
from tests.support.language_folders import unpack

MODELS = {
    "halves": SmallLlama(layers=1),
    "products as scales": SmallLlama(layers=1, formats=("Q4_K", "Q6_K", "Q5_K"), table="Q4_K", hidden=256, inner=256),
    "floats": SmallLlama(layers=1, formats=("F16", "F32"), table="F32"),
}


@pytest.mark.parametrize("name", MODELS)
def test_memory_and_loads_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    file = MODELS[name].write(tmp_path / "m.gguf")
    free = estimate_generation(file, BundleRequest(max_length=64))
    assert (free.budget, free.token_bytes, free.max_length, free.filled) == (None, 0, 64, 32)
    assert free.token_seconds > 0 and free.prompt_seconds > 0
    assert free.smallest < free.peak
    made = flashmem.compile(file, tmp_path / "free.flashmem", max_length=64)
    assert made.program.weights_bytes == free.weights
    budget = free.smallest * 11 // 10
    tight = estimate_generation(file, BundleRequest(max_length=64, budget=budget))
    bundle = flashmem.compile(file, tmp_path / "m.flashmem", max_length=64, budget=budget)
    largest = max(part.nbytes for part in bundle.program.slices)
    with flashmem.Generator(bundle) as generator:
        list(generator.generate([3 + 7 * n for n in range(33)], max_new_tokens=4, speculate=False))
        assert generator.last is not None
        assert generator.last.token_bytes == tight.token_bytes > 0
        peaks = generator.last.peak_bytes, tight.peak
        assert max(peaks) <= budget
        assert max(peaks) - min(peaks) <= largest, "one slice may be loaded before another is freed, or after"


def test_the_smallest_budget_is_enough_and_no_smaller_one(tmp_path: Path) -> None:
    file = MODELS["halves"].write(tmp_path / "m.gguf")
    _, smallest = compile_rehearsal(
        read_compilation(file, BundleRequest(max_length=64)), tmp_path / "r.flashmem", lambda stage, fraction: None
    )
    flashmem.compile(file, tmp_path / "m.flashmem", max_length=64, budget=smallest, build=False)
    with pytest.raises(BudgetError):
        flashmem.compile(file, tmp_path / "n.flashmem", max_length=64, budget=smallest - 1, build=False)


@pytest.mark.thorough
def test_a_folder_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = command_line(monkeypatch, capfd)
    folder = unpack(tmp_path) / "genai"
    assert run("generate", folder, "--estimate", "--max-length", "64", "--json").json["max_length"] == 64
    outcome = run("generate", folder, "--estimate", "--max-length", "64", "--budget", "1KB")
    assert outcome.code == 2 and "raise the budget to" in outcome.err
    outcome = run("generate", folder, "--estimate", "--quantize", "int8")
    assert outcome.code == 2 and "--estimate reads no weights, and --quantize needs them" in outcome.err
    bundle = flashmem.compile(folder, tmp_path / "m.flashmem", max_length=64, build=False)
    assert "is compiled already" in run("generate", bundle.path, "--estimate").err


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    model = unpack(tmp_path) / "llama" / "model.onnx"
    with pytest.raises(UserError, match="has no tokenizer; an estimate is of a"):
        estimate_generation(model, BundleRequest())


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the page cache cannot be dropped here")
def test_a_sketch_reads_little_of_the_file(tmp_path: Path) -> None:
    """Of each large tensor no page comes into the page cache, and of small ones not those behind them."""
    file = SmallLlama(layers=3, hidden=256, inner=8192, formats=("Q8_0",)).write(tmp_path / "m.gguf")
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if in_page_cache(file) > 0.1:
        pytest.skip("the file system keeps all files in memory")
    with converted(file, None, sketched):
        pass
    assert in_page_cache(file) < 0.5  # 8 of 20 MB: Linux reads them together with the fields at the beginning
    with converted(file, None):
        pass
    assert in_page_cache(file) > 0.9


def in_page_cache(file: Path) -> float:
    """The share of the file's pages that are in the page cache (mincore)."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        pages = np.frombuffer(mapped, np.uint8)
        found = np.zeros(-(-len(pages) // mmap.PAGESIZE), np.uint8)
        address, size = ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(len(pages))
        assert ctypes.CDLL(None).mincore(address, size, found.ctypes.data_as(ctypes.c_void_p)) == 0
        del pages
        return float((found & 1).mean())
