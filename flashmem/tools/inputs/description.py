"""What a model file says of its inputs and classes: input shapes, ONNX metadata, and configuration files beside it."""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashmem.base.errors import UserError
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.language import is_bundle, is_language_folder
from flashmem.bundle.shape_variants import port_shapes

PREPROCESSOR = "preprocessor_config.json"
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
"""Files of a Hugging Face folder."""


@dataclass(frozen=True)
class ModelInput:
    """An input of a model: open dimensions are None, and the type is numpy's name."""

    name: str
    shape: tuple[int | None, ...]
    dtype: str

    @property
    def shape_text(self) -> str:
        """For messages, `1x3x?x?`."""
        return "x".join("?" if size is None else str(size) for size in self.shape) or "a number"


@dataclass(frozen=True)
class Description:
    """A model's inputs, its metadata properties, and the folders in which its configuration files may be."""

    inputs: tuple[ModelInput, ...]
    properties: Mapping[str, str]
    folders: tuple[Path, ...]

    def find(self, name: str) -> Path | None:
        """The file `name` beside the model."""
        return next((folder / name for folder in self.folders if (folder / name).is_file()), None)

    def config(self, name: str) -> Mapping[str, Any]:
        """The JSON object in the file `name` beside the model, empty if there is none.

        Raises:
            UserError: the file is not a JSON object.
        """
        path = self.find(name)
        if path is None:
            return {}
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path} is not JSON ({error}); repair it, or move it away") from None
        if not isinstance(found, dict):
            raise UserError(f"{path} is not a JSON object; repair it, or move it away")
        return found

    def value(self, name: str) -> Any:
        """The value of a metadata property that exporters write as Python or JSON text, None without the property."""
        text = self.properties.get(name)
        if text is None:
            return None
        for read in (json.loads, ast.literal_eval):
            try:
                return read(text)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                continue
        return text


def describe(model: Path, shapes: Mapping[str, Sequence[int]]) -> Description:
    """Describe an ONNX model, or a bundle by its program and by the model it was compiled from, if that is still there.

    `shapes` are sizes of open dimensions, by input, as `--shape` names them.

    Raises:
        UserError: neither an ONNX model nor a bundle of one; or `shapes` does not fit.
    """
    if is_language_folder(model) or model.suffix == ".gguf":
        raise UserError(f"{model} is a language model, which reads a prompt: flashmem generate")
    if not is_bundle(model):
        inputs, properties = _read_onnx(model)
        return Description(tuple(_with_sizes(each, shapes) for each in inputs), properties, _folders(model))
    bundle = Bundle.open(model)
    variants = [variant.program.inputs for variant in bundle.variants]
    shapes_of = [port_shapes(ports) for ports in variants]
    inputs = tuple(ModelInput(port.name, _common([each[port.name] for each in shapes_of]), port.dtype) for port in variants[0])
    original = Path(str(bundle.meta.get("model_path", "")))
    readable = original.is_file() and original.suffix == ".onnx" and importlib.util.find_spec("onnx") is not None
    properties = _read_onnx(original)[1] if readable else {}
    folders = _folders(original if original.is_file() else model)
    return Description(tuple(_with_sizes(each, shapes) for each in inputs), properties, folders)


def _read_onnx(path: Path) -> tuple[tuple[ModelInput, ...], dict[str, str]]:
    """The inputs without initializers, and the metadata."""
    from onnx.helper import tensor_dtype_to_np_dtype

    from flashmem.compiler.frontend.mapped_file import load_mapped

    proto = load_mapped(path)
    held = {tensor.name for tensor in proto.graph.initializer}
    inputs = []
    for value in proto.graph.input:
        tensor = value.type.tensor_type
        if value.name in held or not tensor.elem_type:
            continue
        shape = tuple(size.dim_value if size.dim_value > 0 else None for size in tensor.shape.dim)
        inputs.append(ModelInput(value.name, shape, tensor_dtype_to_np_dtype(tensor.elem_type).name))
    return tuple(inputs), {each.key: each.value for each in proto.metadata_props}


def _with_sizes(each: ModelInput, shapes: Mapping[str, Sequence[int]]) -> ModelInput:
    return replace(each, shape=tuple(shapes[each.name])) if each.name in shapes else each


def _common(shapes: Sequence[tuple[int, ...]]) -> tuple[int | None, ...]:
    """The sizes that all shapes have in common."""
    return tuple(sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*shapes, strict=True))


def _folders(path: Path) -> tuple[Path, ...]:
    """The folder of a file, and the one above `onnx/`, where folders for transformers.js keep their models."""
    folder = path.absolute().parent
    return (folder, folder.parent) if folder.name == "onnx" else (folder,)
