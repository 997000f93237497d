"""The host tier with compiled models: shape variants and a language model share it by the identity of their slices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import flashmem
from flashmem.base.types import TransferMode
from flashmem.program.tensors import Slice
from flashmem.runtime.generation.generator import Generator
from flashmem.runtime.opencl.discovery import find_device
from flashmem.schedule.host_tier import identity
from tests.support.chain_model import WIDTH, chained, smallest_budget, write_chain
from tests.support.gguf_models import SmallLlama
from tests.support.own_memory import Reads, descriptor_with_own_memory, give_own_memory, reads_of_files, wait_for_tiers

MODES: tuple[TransferMode, ...] = ("dma", "interleave")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return reads_of_files(monkeypatch)


def every_slice(bundle: flashmem.Bundle) -> list[Slice]:
    """The slices of all variants, each once, named by its place in the file."""
    parts = {identity(part): part for each in variants_of(bundle) for part in each.program.slices}
    return list(parts.values())


def variants_of(bundle: flashmem.Bundle) -> Sequence[flashmem.Bundle]:
    return [bundle.variant(index) for index in range(len(bundle.variants))]


@pytest.mark.parametrize("mode", [MODES[0], *(pytest.param(mode, marks=pytest.mark.thorough) for mode in MODES[1:])])
def test_variants_with_other_places_read_a_shared_slice_once(
    mode: TransferMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: Reads
) -> None:
    model, random = tmp_path / "chain.onnx", np.random.default_rng(6)
    weights = write_chain(model)
    cases = [random.standard_normal((rows, WIDTH)).astype(np.float32) for rows in (3, 40)]
    options: dict[str, Any] = {
        "device": descriptor_with_own_memory(tmp_path), "mode": mode, "memory_path": "buffer", "build": False,
        "shapes": [{"x": case.shape} for case in cases],
    }  # fmt: skip
    budget = int(1.1 * smallest_budget(model, tmp_path, **options))
    bundle = flashmem.compile(model, tmp_path / "m.flashmem", budget=budget, **options)
    give_own_memory(monkeypatch, find_device("pocl"))
    wait_for_tiers(monkeypatch)
    every = every_slice(bundle)
    assert len(every) < sum(len(each.program.slices) for each in variants_of(bundle))  # some are shared
    again = [{w.name for w in each.plan.weights if not (w.preload or w.keep)} for each in variants_of(bundle)]
    with flashmem.Session(bundle, mode=mode, host_budget="auto", prepare=False) as session:
        reads.watch(every)
        answers: dict[int, NDArray[np.float32]] = {}
        for run, which in enumerate((0, 1, 0, 1, 1, 0)):
            (got,) = session.run(None, {"x": cases[which]})
            np.testing.assert_allclose(got, chained(cases[which], weights), rtol=0, atol=1e-4)
            np.testing.assert_array_equal(got, answers.setdefault(which, got))
            report = session.last_run
            assert report is not None and report.memory.host is not None
            assert report.memory.peak_bytes <= budget and report.memory.host.peak_bytes <= report.memory.host.budget_bytes
            if run > 1:
                assert report.host_tier_bytes > 0
                copied = {load.name for load in report.loads if "read" not in dict(load.steps)}
                assert copied >= again[which]
        counted = reads.taken()
        parts = {part.name: part for part in every}
        streamed = again[0] | again[1]
        assert streamed & counted.keys() and all(counted[name] == parts[name].file_bytes for name in streamed & counted.keys())
        tier = session._engine.opened.tier
        assert tier is not None
    assert tier.ledger.total == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_language_model_reads_each_slice_once(
    mode: TransferMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: Reads
) -> None:
    """Variants for one token and for several alternate; the tokens are those of a decoder in float64."""
    model = SmallLlama(layers=2, formats=("Q8_0",))
    file = model.write(tmp_path / "m.gguf")
    prompt = [int(each) for each in np.random.default_rng(3).integers(5, 300, 20)]
    wanted = model.greedy(prompt, 5, 1e-4)
    options: dict[str, Any] = {
        "device": descriptor_with_own_memory(tmp_path), "memory_path": "buffer", "mode": mode, "max_length": 64, "build": False,
    }  # fmt: skip
    budget = int(1.1 * smallest_budget(file, tmp_path, **options))
    bundle = flashmem.compile(file, tmp_path / "m.flashmem", budget=budget, **options)
    give_own_memory(monkeypatch, find_device("pocl"))
    wait_for_tiers(monkeypatch)
    with Generator(bundle, mode=mode, host_budget="auto") as generator:
        reads.watch(every_slice(bundle))
        for _ in range(2):
            tokens = generator.tokenizer.encode("".join(generator.generate(prompt, max_new_tokens=len(wanted) + 1)))
            assert len(wanted) > 2 and tokens
        report = generator.last
        assert report is not None and report.token_bytes > 0  # weights are loaded for each token
        run = generator._model.session.last_run
        assert run is not None and run.memory.host is not None and run.memory.peak_bytes <= budget
        assert run.host_tier_bytes == sum(load.nbytes for load in run.loads) > 0
        generator._model.session._engine.stop_ahead()
        streamed = {w.name for each in variants_of(bundle) for w in each.plan.weights if not (w.preload or w.keep)}
        sizes = {part.name: part.file_bytes for part in every_slice(bundle)}
        counted = reads.taken()
        assert all(counted[name] == sizes[name] for name in streamed & counted.keys()) and streamed & counted.keys()
        assert generator._cached[: len(prompt) + len(wanted)] == prompt + wanted
