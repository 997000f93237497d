"""Kernels of models through the compilers of phones: rendering, stored results, and the figures of tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from flashmem.base.errors import UserError
from flashmem.profiler.phone_compilers.compiling import Compiled, Compiler
from flashmem.profiler.phone_compilers.gpus import GPUS
from flashmem.profiler.phone_compilers.model_kernels import ModelKernel, ModelKernels
from flashmem.profiler.phone_compilers.models import Code, ModelReport, summary, tables
from flashmem.profiler.phone_compilers.results import StoredResults
from flashmem.profiler.phone_compilers.roots import Root
from flashmem.target.descriptor import load_descriptor

GPU = GPUS["adreno750"]


def test_kernels_of_a_model_have_all_its_multiply_adds(tmp_path: Path) -> None:
    made = ModelKernels.rendered(["whisper-tiny-encoder"], load_descriptor("adreno750"))
    assert {each.text for each in made.kernels} == set(made.texts)
    # By the sizes of the architecture: two convolutions, and in 4 layers 4 projections, 2 products of attention and the MLP.
    frames, hidden, bins = 1500, 384, 80
    layer = frames * (4 * hidden**2 + 8 * hidden**2) + 2 * frames**2 * hidden
    expected = 2 * frames * 3 * bins * hidden + frames * 3 * hidden**2 + 4 * layer
    for precision in ("fp32", "fp16"):
        assert sum(each.macs for each in made.kernels if each.precision == precision) == expected
    assert sum(each.launches for each in made.kernels if each.precision == "fp32") > len(made.kernels) / 2
    made.write(tmp_path / "kernels.json")
    assert ModelKernels.read(tmp_path / "kernels.json") == made
    with pytest.raises(UserError, match=r"no kernels of models .*--write-kernels"):
        ModelKernels.read(tmp_path / "absent.json")


class _Scripted(Compiler):
    """A compiler that records what it is asked, and ends without an answer for the text "crash"."""

    asked: ClassVar[list[tuple[str, str]]] = []

    def compile(self, text: str, options: Sequence[str]) -> Compiled:
        self.asked.append((self.gpu.name, text))
        if text == "crash":
            return Compiled("", "qemu ended", "")
        return Compiled(f"code of {text}", "", "a GPU", 0.5, {"k": {"group": 64}})


def test_each_text_is_compiled_once(tmp_path: Path) -> None:
    stored, compiler = StoredResults(tmp_path / "results"), _Scripted(GPU, Root(tmp_path, "amd64", "26.1.6"))
    first = [stored.compiled(compiler, text, []) for text in ("a", "b", "a")]
    assert first[0] == first[2] != first[1] and first[0].printed == "code of a"
    stored.compiled(_Scripted(GPUS["adreno740"], compiler.root), "a", [])
    stored.compiled(_Scripted(GPU, Root(tmp_path, "amd64", "26.1.7")), "a", [])
    for _ in range(2):  # a compiler that ended without an answer is asked again
        stored.compiled(compiler, "crash", [])
    a, b, crash = (("adreno750", text) for text in ("a", "b", "crash"))
    asked = compiler.asked
    assert asked == [a, b, ("adreno740", "a"), a, crash, crash]
    for file in (tmp_path / "results").iterdir():
        file.write_bytes(b"damaged")
    assert stored.compiled(compiler, "a", []) == first[0] and asked[-1] == a and len(asked) == 7


def _report(slots: list[float], macs: list[int], spills: int = 0) -> ModelReport:
    kernels = tuple(ModelKernel("m", "fp32", f"k{i}", "matmul", 1, count, f"t{i}") for i, count in enumerate(macs))
    code = {f"t{i}": Code(each, 2, 10 * i, 8 - i, spills, 1, 0) for i, each in enumerate(slots)}
    return ModelReport("adreno750", "26.1", kernels, code, {})


def test_figures_are_weighted_by_multiply_adds() -> None:
    random = np.random.default_rng(5)
    for _ in range(20):
        macs = [int(each) for each in random.integers(1, 9, 6)]
        slots = [float(each) for each in random.uniform(1, 5, 6).round(2)]
        report = _report(slots, macs)
        found = summary(report, report.kernels)
        assert found is not None and found.slots is not None
        repeated = np.sort(np.repeat(slots, macs))  # one for each multiply-add
        least, median, mean, most = found.slots
        assert (least, median, most) == (repeated[0], repeated[(len(repeated) - 1) // 2], repeated[-1])
        assert mean == pytest.approx(repeated.mean())
        assert (found.texts, found.macs, found.registers, found.threads) == (6, sum(macs), 50, 3)
        assert (found.stack, found.emulated) == (12, 6)


def test_texts_without_code_are_left_out_and_named() -> None:
    report = _report([2.0], [5, 7])
    failed = ModelReport("adreno750", "26.1", report.kernels, report.code, {"t1": "no\nsuch type"})
    found = summary(failed, failed.kernels)
    assert found is not None and found.texts == 1 and found.slots == (2.0,) * 4
    assert summary(failed, failed.kernels[1:]) is None
    assert tables(failed).endswith("adreno750: t1: no such type")


def test_a_table_has_both_versions() -> None:
    before, now = _report([4.0, 4.0], [1, 1], spills=3), _report([2.0, 1.0], [1, 1])
    assert ModelReport.of(json.loads(json.dumps(asdict(now)))) == now
    rows = [line.split(" | ") for line in tables(now, before).splitlines() if line.startswith("| matmul, fp32")]
    [[_, kernels, _, slots, registers, _, spills, *_]] = rows
    assert (kernels, registers, spills) == ("2", "10", "6 → 0")
    assert slots == "4.00 (4.00 to 4.00, median 4.00) → 1.50 (1.00 to 2.00, median 1.00)"


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(UserError, match="no architecture 'x'"):
        ModelKernels.rendered(["x"], load_descriptor("adreno750"))
