"""External data of tensors: every location and size is checked before anything is read.

A model file is untrusted. Its external data may name only regular files inside the model's own folder (after links are
resolved), and only bytes that those files have.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import onnx
import onnx_ir

from flashmem.base.errors import MissingFileError, UserError

_HOLE_BYTES = 1 << 20
_ELEMENTS = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")


def check_embedded_data(model: onnx.ModelProto, path: Path) -> None:
    """Raise UserError for a tensor inside `model`, loaded from `path`, that has more or less data than its shape needs."""
    for tensor in tensors(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            continue
        needed = _bytes_needed(tensor, path)
        if tensor.HasField("raw_data"):
            if len(tensor.raw_data) != needed:
                raise UserError(f"{path}: weight {tensor.name!r} needs {needed} bytes, but has {len(tensor.raw_data)}")
            continue
        given = sum(len(getattr(tensor, field)) for field in _ELEMENTS)
        wanted = math.prod(tensor.dims)
        if onnx_ir.DataType(tensor.data_type).bitwidth >= 8 and given != wanted:
            raise UserError(f"{path}: weight {tensor.name!r} needs {wanted} elements, but has {given}")


def resolve_external_data(model: onnx.ModelProto, path: Path) -> None:
    """Resolve the location of every external tensor of `model`, loaded from `path`, to an absolute, checked file, in place.

    Afterwards each tensor has offset and length as well, and the length fits its shape and type. Raises UserError for a
    location outside the folder or bytes outside the file, MissingFileError for a missing file.
    """
    sizes: dict[str, tuple[Path, int]] = {}
    for tensor in tensors(model):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        if location not in sizes:
            file = _inside(path, location, tensor.name)
            sizes[location] = file, file.stat().st_size
        file, size = sizes[location]
        needed = _bytes_needed(tensor, path)
        try:
            offset = int(entries.get("offset") or 0)
            length = int(entries["length"]) if entries.get("length") else needed
        except ValueError:
            raise UserError(f"{path}: weight {tensor.name!r} has an external offset or length that is no number") from None
        if length != needed:
            raise UserError(f"{path}: weight {tensor.name!r} needs {needed} bytes, but the model gives it {length}")
        if offset < 0 or offset + length > size:
            raise UserError(
                f"{path}: weight {tensor.name!r} is at bytes {offset} to {offset + length} of {file.name}, "
                f"which has {size}: the file is truncated or belongs to another model"
            )
        del tensor.external_data[:]
        for key, value in (("location", str(file)), ("offset", str(offset)), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)


def embed_small(model: onnx.ModelProto, path: Path, largest: int) -> None:
    """Read external tensors of less than `largest` bytes into `model`, whose data is resolved (`resolve_external_data`).

    onnx-ir maps the whole file for each external tensor that it reads, with a file descriptor of its own. Raises UserError for
    a file that cannot be read, or for embedded data of another size than its shape (`check_embedded_data`).
    """
    opened: dict[str, BinaryIO] = {}
    with ExitStack() as files:
        for tensor in tensors(model):
            entries = {entry.key: entry.value for entry in tensor.external_data}
            if tensor.data_location != onnx.TensorProto.EXTERNAL or int(entries["length"]) >= largest:
                continue
            location = entries["location"]
            try:
                if location not in opened:
                    opened[location] = files.enter_context(Path(location).open("rb"))
                tensor.raw_data = os.pread(opened[location].fileno(), int(entries["length"]), int(entries["offset"]))
            except OSError as error:
                raise UserError(f"{path}: weight {tensor.name!r} cannot be read from {location}: {error.strerror}") from None
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]
    check_embedded_data(model, path)


def model_files(model: onnx.ModelProto, path: Path) -> list[Path]:
    """`path` and the data files of `model`, resolved by `resolve_external_data`, without duplicates."""
    resolve_external_data(model, path)
    found = {path.resolve(): None}
    for tensor in tensors(model):
        found.update({Path(entry.value): None for entry in tensor.external_data if entry.key == "location"})
    return list(found)


def place_data(tensor: onnx.TensorProto, content: bytes, file: BinaryIO) -> None:
    """Write the data of `tensor` to `file`, at a page of its own, and refer to it there by the file's name.

    Long runs of zeros become holes, which take no disk space.
    """
    file.seek(-file.tell() % 4096, os.SEEK_CUR)
    tensor.ClearField("raw_data")
    del tensor.external_data[:]
    fields = {"location": Path(file.name).name, "offset": file.tell(), "length": len(content)}
    for key, value in fields.items():
        tensor.external_data.add(key=key, value=str(value))
    tensor.data_location = onnx.TensorProto.EXTERNAL
    zeros = bytes(_HOLE_BYTES)
    for at in range(0, len(content), _HOLE_BYTES):
        piece = content[at : at + _HOLE_BYTES]
        if piece == zeros:
            file.seek(_HOLE_BYTES, os.SEEK_CUR)
        else:
            file.write(piece)
    file.truncate(file.tell())


def tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor in `model`: initializers and attributes, also in subgraphs and functions."""
    yield from _in_graph(model.graph)
    for function in model.functions:
        yield from _in_attributes(function.attribute_proto)
        yield from _in_nodes(function.node)


def _in_graph(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    yield from _in_nodes(graph.node)


def _in_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        yield from _in_attributes(node.attribute)


def _in_attributes(attributes: Iterable[onnx.AttributeProto]) -> Iterator[onnx.TensorProto]:
    for attribute in attributes:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            yield from _in_graph(graph)


def _inside(model_path: Path, location: str, tensor: str) -> Path:
    """The file of `location`, which must be inside the model's folder."""
    folder = model_path.parent.resolve()
    if location == model_path.name:  # the model's own bytes, even if the model is a link
        return model_path.resolve()
    if not location or "\0" in location:
        raise UserError(f"{model_path}: weight {tensor!r} is external but names no file")
    file = (folder / location).resolve()
    if Path(location).is_absolute() or not file.is_relative_to(folder):
        raise UserError(
            f"{model_path}: weight {tensor!r} is in {location!r}, outside the model's folder: only files in it are read"
        )
    if not file.is_file():
        raise MissingFileError(
            f"{model_path}: the external data file {location!r} (weight {tensor!r}) is not next to the model"
        )
    return file


def _bytes_needed(tensor: onnx.TensorProto, path: Path) -> int:
    if any(dim < 0 for dim in tensor.dims):
        raise UserError(f"{path}: weight {tensor.name!r} has a negative dimension: {list(tensor.dims)}")
    try:
        bits = onnx_ir.DataType(tensor.data_type).bitwidth
    except (TypeError, ValueError):
        known = onnx.TensorProto.DataType.values()
        kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower() if tensor.data_type in known else tensor.data_type
        raise UserError(f"{path}: weight {tensor.name!r} has element type {kind}, which is not supported") from None
    return int(math.prod(tensor.dims) * bits + 7) // 8
