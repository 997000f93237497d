"""The results of stages as text files."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashmem.base.errors import BudgetError, UserError
from flashmem.compile import compile as compile_model
from flashmem.compiler.adaptive import tiling
from flashmem.compiler.frontend.importer import import_model
from flashmem.compiler.operators import why_unsupported
from flashmem.compiler.passes import pipeline
from flashmem.compiler.passes.pipeline import PASSES, Pass
from flashmem.compiler.passes.verifier import InvalidResultError
from flashmem.compiler.stages import dump
from flashmem.compiler.stages.dump import StageFolder
from flashmem.compiler.stages.stages import PATCH, STAGES
from tests.support.command_line import Command, command_line
from tests.support.paths import DATA
from tests.test_compile_refusals import chain_of_convolutions

VIT = DATA / "vit-tiny.onnx"


@pytest.fixture
def flashmem(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    return command_line(monkeypatch, capfd)


def test_compile_writes_the_result_of_each_stage(flashmem: Command, tmp_path: Path) -> None:
    folder = tmp_path / "stages"
    for target in (tmp_path / "m.flashmem", tmp_path / "n.flashmem"):  # the second time over the files of the first
        outcome = flashmem("compile", VIT, "-o", target, "--no-build", "--dump-stages", folder)
        assert outcome.code == 0
    names = [f"{number:02}-{stage.name}" for number, stage in enumerate(STAGES, start=1)]
    written = [f"{name}.txt" for name, stage in zip(names, STAGES, strict=True) if stage is not PATCH]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*written, "02-rewrite"])
    passes = sorted((folder / "02-rewrite").iterdir())
    assert [path.name for path in passes] == [f"{at:02}-{step.name}.txt" for at, step in enumerate(PASSES, start=1)]
    assert "LayerNormalization(" in (folder / "01-import.txt").read_text()
    assert "LayerNormalization(" not in passes[0].read_text()
    matched = next(at for at, path in enumerate(passes) if "match-attention" in path.name)
    assert "FusedAttention(" not in passes[matched - 1].read_text() and "FusedAttention(" in passes[matched].read_text()
    groups, launches = (folder / "04-fuse.txt").read_text(), (folder / "08-lower.txt").read_text()
    assert "Normalize node_layer_norm + node_layer_norm.Mul" in groups and "launch 1 " in launches


def test_each_shape_variant_has_a_folder(tmp_path: Path) -> None:
    shapes = [{"input_ids": (1, 8)}, {"input_ids": (1, 16)}]
    model = DATA / "gptneo-tiny-dynamic.onnx"
    compile_model(model, tmp_path / "m.flashmem", shapes=shapes, build=False, dump_stages=tmp_path / "stages")
    texts = [(tmp_path / "stages" / f"variant-{i}" / "01-import.txt").read_text() for i in (1, 2)]
    assert "int64[1,8]" in texts[0] and "int64[1,16]" in texts[1]
    assert (tmp_path / "stages" / "13-pack.txt").exists()


def test_a_graph_in_patches_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "LEAST_PATCH_BYTES", {"cpu": 1})
    model = chain_of_convolutions(tmp_path / "chain.onnx")
    with pytest.raises(BudgetError) as refused:
        compile_model(model, tmp_path / "m.flashmem", budget=1, device="generic-cpu", build=False)
    assert refused.value.smallest_bytes < refused.value.without_patches
    folder, budget = tmp_path / "stages", refused.value.smallest_bytes
    compile_model(model, tmp_path / "m.flashmem", budget=budget, device="generic-cpu", build=False, dump_stages=folder)
    assert ".patches" in (folder / "03-patch.txt").read_text() and ".patches" not in (folder / "02-rewrite.txt").read_text()
    assert ".patches" in (folder / "04-fuse.txt").read_text()


def test_a_pass_that_breaks_a_graph_leaves_its_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps = (*PASSES[:3], Pass("broken", "", lambda graph: graph.__class__(graph.name, [], graph.outputs, graph.nodes)))
    for module in (pipeline, dump):
        monkeypatch.setattr(module, "PASSES", steps)
    with pytest.raises(InvalidResultError, match=r"after pass broken: .* is read before"):
        StageFolder(tmp_path).read(import_model(VIT, {}, why_unsupported))
    assert "input pixel_values" in (tmp_path / "01-import.txt").read_text()
    assert "input pixel_values" not in (tmp_path / "02-rewrite" / "04-broken.txt").read_text()
    assert not (tmp_path / "02-rewrite.txt").exists()


@pytest.mark.parametrize(
    ("folder", "sentence"), [("gone/stages", "create it first"), ("file", "is not a folder"), ("/proc", "cannot be written")]
)
def test_a_folder_that_cannot_be_written_is_refused(folder: str, sentence: str, flashmem: Command, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outcome = flashmem("compile", VIT, "-o", tmp_path / "m.flashmem", "--dump-stages", tmp_path / folder)
    assert outcome.code == 2 and outcome.out == "" and not (tmp_path / "m.flashmem").exists()
    assert sentence in outcome.err.strip().splitlines()[-1]


def test_a_disk_that_is_full_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dump, "written_whole", full)
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        StageFolder(tmp_path).read(import_model(VIT, {}, why_unsupported))
