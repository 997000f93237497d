"""Models in other formats are named, with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

import flashmem
from flashmem.base.errors import UserError
from flashmem.bundle.language import is_bundle


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "m.safetensors",
            b"",
            "is weights in safetensors, without the model's settings, which flashmem does not read; for a language model, name",
        ),
        ("pytorch_model.bin", b"PK", "is a file of PyTorch, which flashmem does not read; export the model to ONNX"),
        ("m.tflite", b"", "is a model of LiteRT, which flashmem does not read; export the model to ONNX (tf2onnx)"),
        ("m.gguf", b"version https://git-lfs.github.com/spec/v1", "is a pointer of Git LFS and not the model; get the file"),
        ("model", b"GGUF....", "is a GGUF file under another name; rename it to model.gguf"),
    ],
)
def test_files(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        flashmem.compile(path, tmp_path / "o.flashmem")
    assert str(caught.value).startswith(f"{path} {said}")


def test_folders(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    with pytest.raises(UserError, match=f"^{tmp_path} has its weights in files of PyTorch, which flashmem does not read; sav"):
        flashmem.compile(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "adapter_config.json")
    assert not is_bundle(tmp_path)
    with pytest.raises(UserError, match=rf"^{tmp_path} is an adapter \(LoRA\) and no whole model; merge it into its model"):
        flashmem.compile(tmp_path)
