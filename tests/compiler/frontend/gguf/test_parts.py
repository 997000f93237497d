"""A model in several files, as the package gguf writes them: the same model, and what is said of parts that are missing."""

from __future__ import annotations

from pathlib import Path

import gguf
import onnx
import pytest

import flashmem
from flashmem.base.errors import MissingFileError, UserError
from flashmem.compilation import read_compilation
from flashmem.compiler.frontend.decoder.weights import sketched
from flashmem.compiler.frontend.decoder_files import converted
from flashmem.compiler.frontend.gguf.parts import read_parts
from flashmem.request.request import BundleRequest
from tests.support.command_line import command_line
from tests.support.gguf_models import SmallLlama

MODEL = SmallLlama(layers=1)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Three files of at most five tensors."""
    MODEL.write(tmp_path / "m.gguf", most_tensors=5)
    found = sorted(tmp_path.glob("*.gguf"))
    assert [each.name for each in found] == [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    return found


def change(path: Path, key: str, value: int) -> None:
    """Set a field of a part in place."""
    reader = gguf.GGUFReader(path, "r+")
    field = reader.fields[key]
    field.parts[field.data[0]][:] = value
    del reader


def text_of(model: Path) -> str:
    """An ONNX file without the name of its data."""
    return str(onnx.load(model, load_external_data=False)).replace(model.stem, "")


def test_every_part_stands_for_the_model(parts: list[Path], tmp_path: Path) -> None:
    """Graph and data are those of the single file."""
    with converted(MODEL.write(tmp_path / "whole.gguf"), 64) as single:
        wanted = text_of(single.path), single.path.with_suffix(".data").read_bytes()
        for path in parts:
            with converted(path, 64) as made:
                data = made.path.with_suffix(".data")
                assert data.read_bytes() == wanted[1]
                assert text_of(made.path) == wanted[0]
                assert made.language == single.language and made.key == single.key
                assert made.files == tuple(parts)


def test_a_changed_part_makes_the_bundle_outdated(parts: list[Path]) -> None:
    """Also one that was not given."""
    request = BundleRequest(device="pocl", max_length=64, batch=2)
    compilation = read_compilation(parts[1], request)
    assert compilation.find() is None
    flashmem.compile(parts[1], device="pocl", max_length=64, batch=2, build=False)
    assert compilation.find() is not None
    parts[0].touch()
    assert compilation.find() is None


def test_a_missing_part_is_named(parts: list[Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    parts[1].unlink()
    outcome = command_line(monkeypatch, capfd)("compile", parts[2], "-o", parts[2].parent / "o.flashmem", "--device", "pocl")
    said = f"flashmem: {parts[1]} is missing, a part of the model of {parts[2].name}; put all parts into one folder\n"
    assert (outcome.code, outcome.err) == (2, said)
    with pytest.raises(MissingFileError), converted(parts[0], 64, sketched):
        pass


def test_parts_that_are_not_those_of_one_model(parts: list[Path], tmp_path: Path) -> None:
    def refused(path: Path, said: str) -> None:
        with pytest.raises(UserError) as caught:
            read_parts(path)
        assert str(caught.value).startswith(said)

    other = parts[1].rename(tmp_path / "other.gguf")
    refused(
        other, f"{other} is part 2 of the 3 parts of a model, and its name does not say so; name it NAME-00002-of-00003.gguf"
    )
    other.rename(parts[1])
    change(parts[1], "split.no", 2)
    refused(parts[0], f"{parts[1]} says that it is part 3 of 3, unlike its name")
    change(parts[1], "split.no", 1)
    change(parts[2], "split.tensors.count", 50)
    refused(parts[0], f"the 3 parts of {parts[0]} have {len(MODEL.blocks)} tensors, and {len(MODEL.blocks)} are said to")
    refused(parts[2], f"the 3 parts of {parts[2]} have {len(MODEL.blocks)} tensors, and 50 are said to be in them")
    parts[0].write_bytes(parts[0].read_bytes()[:700])
    refused(parts[1], f"{parts[0]} is no GGUF file, or a part of one (")
