"""Models in formats that flashmem does not read: what each is, and what to do with it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from flashmem.base.errors import UserError

ADAPTER = "adapter_config.json"
"""The settings of an adapter, as the library peft saves it."""

_TO_SAFETENSORS = "save the model with transformers (save_pretrained), which writes safetensors"
_TO_ONNX = "export the model to ONNX"

_SUFFIXES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        ".safetensors": (
            "weights in safetensors, without the model's settings",
            "for a language model, name its folder, with config.json and tokenizer.json; or export the model to ONNX",
        ),
        **dict.fromkeys((".bin", ".ckpt", ".pt", ".pth"), ("a file of PyTorch", f"{_TO_ONNX} (torch.onnx.export)")),
        **dict.fromkeys((".h5", ".keras", ".pb"), ("a model of TensorFlow", f"{_TO_ONNX} (tf2onnx)")),
        ".tflite": ("a model of LiteRT", f"{_TO_ONNX} (tf2onnx)"),
        ".ggml": ("a file of the format before GGUF", "convert the original model with llama.cpp again"),
    }
)
"""By the end of a file's name: what it is, and what to do."""

_LFS = b"version https://git-lfs"


def check_format(path: Path) -> None:
    """Raise UserError if the file or folder `path` is a model in a known format that is not read."""
    if path.is_dir():
        _check_folder(path)
        return
    begin = b""
    with suppress(OSError), path.open("rb") as file:
        begin = file.read(len(_LFS))
    if begin == _LFS:
        raise UserError(f"{path} is a pointer of Git LFS and not the model; get the file itself with: git lfs pull")
    if begin.startswith(b"GGUF") and path.suffix != ".gguf":
        raise UserError(f"{path} is a GGUF file under another name; rename it to {path.name}.gguf")
    if path.suffix in _SUFFIXES and path.is_file():
        what, remedy = _SUFFIXES[path.suffix]
        raise UserError(f"{path} is {what}, which flashmem does not read; {remedy}")


def _check_folder(path: Path) -> None:
    if (path / ADAPTER).is_file():
        raise UserError(
            f"{path} is an adapter (LoRA) and no whole model; merge it into its model with peft (merge_and_unload), and "
            "export or convert the result"
        )
    if any(path.glob("pytorch_model*.bin")) and not any((*path.glob("*.safetensors"), *path.glob("**/*.onnx"))):
        raise UserError(f"{path} has its weights in files of PyTorch, which flashmem does not read; {_TO_SAFETENSORS}")


def has_safetensors(folder: Path) -> bool:
    """Whether a folder has weights in safetensors, and no ONNX file."""
    return any(folder.glob("*.safetensors")) and not any(folder.glob("**/*.onnx"))
