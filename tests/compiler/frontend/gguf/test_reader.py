"""What converting a GGUF file takes: a place on the disk, and room there."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from gguf import GGUFReader

import flashmem
from flashmem.base.errors import UserError
from flashmem.compiler.frontend.decoder.weights import sketched
from flashmem.compiler.frontend.decoder_files import converted
from flashmem.compiler.frontend.gguf.reader import GGUFFile
from flashmem.compiler.frontend.importer import import_model
from flashmem.compiler.ir.blocks.constant import BlockConstant
from flashmem.compiler.ir.graph import FileConstant
from tests.support.gguf_models import SmallLlama


def test_fields_are_those_of_the_package(tmp_path: Path) -> None:
    """Which makes an object of each element of an array."""
    for pieces in (False, True):
        path = SmallLlama(layers=1, pieces=pieces, fields={"a.flag": True, "b.text": "ü"}).write(tmp_path / "m.gguf")
        package, file = GGUFReader(path), GGUFFile(path)
        assert file.fields.keys() == package.fields.keys()
        for name, field in package.fields.items():
            assert file.fields[name].contents() == field.contents(), name


def test_blocks_stay_in_the_file(tmp_path: Path) -> None:
    """A graph has few numbers in memory, and its weights are the file's bytes."""
    path = SmallLlama(layers=1, hidden=1024, inner=32, formats=("Q4_1",), table="Q4_1").write(tmp_path / "m.gguf")
    with converted(path, 64) as made:
        graph = import_model(made.path, {"input_ids": (1, 4)}, states="auto")
        weights = [value.constant for node in graph.nodes for value in node.inputs if value is not None and value.constant]
        blocks = [each for each in weights if isinstance(each, BlockConstant)]
        assert len(blocks) == 6 and {each.format.name for each in blocks} == {"Q4_1"}
        assert all(isinstance(each.data, FileConstant) for each in blocks)
        of_file = {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}
        assert any(np.array_equal(each.data.array(), of_file["token_embd.weight"]) for each in blocks)


def test_the_model_is_written_beside_the_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary folder may be in memory."""
    path, target = SmallLlama(layers=1).write(tmp_path / "m.gguf"), tmp_path / "new" / "m.flashmem"

    def refuse(*_: object, **__: object) -> str:
        raise AssertionError("a temporary folder")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with converted(path, 64, beside=target) as made:
        assert made.path.parent.parent == target.parent
        assert len(onnx.load(made.path).graph.initializer) > 9
    assert not [*target.parent.iterdir()]


def test_room_on_the_disk_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = SmallLlama().write(tmp_path / "m.gguf")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=100_000))
    with pytest.raises(UserError) as caught:
        flashmem.compile(path, tmp_path / "m.flashmem", device="pocl")
    said = str(caught.value)
    assert said.startswith(f"compiling {path} needs ") and said.endswith(
        f"in {tmp_path}, where 100KB are free; free some space, or name an output on another disk"
    )
    assert [each.name for each in tmp_path.iterdir()] == ["m.gguf"]
    with converted(path, 64, sketched):  # which takes no room
        pass
