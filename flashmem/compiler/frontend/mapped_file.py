"""Opens an ONNX file without reading its weights: a walk over the protobuf wire format.

An ONNX file is one protobuf message, weights included; parsing it copies every weight into memory. This module walks the file
instead. It gives protobuf a copy in which each large tensor is an *external* one (ONNX's external data). Such a tensor points
back into the same file, from which it can be mapped. The walk reads small windows: mapping the file here as well would load
megabytes around every byte it reads.

The wire format (protobuf.dev/programming-guides/encoding), in short: a message is a sequence of fields; a field
is a key, a varint `number << 3 | type`, and a payload. Type 0 is a varint (7 bits a byte, low first, high bit set on all but
the last), 1 eight bytes, 5 four bytes, 2 a varint length and that many bytes: a string, packed numbers or a message. Types 3
and 4 do not occur in ONNX. Only the numbers of the fields on the way to tensors matter (onnx.proto, all versions):

    ModelProto      7 graph, 25 functions          NodeProto       5 attribute
    GraphProto      1 node, 5 initializer          AttributeProto  5 t, 6 g, 10 tensors, 11 graphs
    FunctionProto   7 node, 11 attribute_proto     TensorProto     2 data_type, 4 float_data, 9 raw_data, 10 double_data,
                                                                   13 external_data, 14 data_location

All other fields, and every submessage too small for a large tensor, are copied unchanged. `float_data` and `double_data` in one
packed run are the same bytes as `raw_data`. Split or unpacked data, and the varints of integer data, are not changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]

from flashmem.base.errors import MissingFileError, UserError

LARGE = 4096
"""Tensors of at least this many bytes stay in the file."""

_VARINT = 0
_EIGHT = 1
_BYTES = 2
_FOUR = 5
_DEEPEST = 100  # protobuf's own limit

_DATA_TYPE = 2
_FLOAT_DATA = 4
_RAW_DATA = 9
_DOUBLE_DATA = 10
_EXTERNAL_DATA = 13
_DATA_LOCATION = 14

# Message type -> the fields to descend into -> their message type.
_INWARD: dict[str, dict[int, str]] = {
    "ModelProto": {7: "GraphProto", 25: "FunctionProto"},
    "GraphProto": {1: "NodeProto", 5: "TensorProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": {5: "TensorProto", 6: "GraphProto", 10: "TensorProto", 11: "GraphProto"},
}


def load_mapped(path: Path) -> onnx.ModelProto:
    """Load the model at `path`; its tensors of `LARGE` bytes and more refer to the file, by its name, as external data.

    Raises MissingFileError, and UserError for a file that is empty, truncated or not ONNX.
    """
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        raise UserError(f"{path}: ONNX names files in UTF-8, and this path is not; rename the file or its folder") from None
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise UserError(f"{path} is empty: an ONNX model is needed")
            light = _Walk(_Window(file.fileno()), path.name).message("ModelProto", 0, size, 0)
    except FileNotFoundError:
        raise MissingFileError(f"no model at {path}") from None
    except (OSError, _MalformedError) as error:
        raise UserError(f"{path} cannot be read as an ONNX model: {error}") from None
    model = onnx.ModelProto()
    try:
        model.ParseFromString(light)
    except DecodeError:
        raise UserError(f"{path} is not an ONNX model, or is damaged: it does not parse") from None
    if not model.HasField("graph") or not (model.opset_import or model.functions):
        raise UserError(f"{path} is not an ONNX model, or is truncated: it has no graph or no operator set")
    if not _is_text(model):
        raise UserError(f"{path} is not an ONNX model, or is damaged: a name in it is not text")
    return model


def _is_text(message: Message) -> bool:
    """Whether every string in `message` is valid UTF-8; protobuf accepts others, as bytes."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            texts = [value] if isinstance(value, str | bytes) else value
            if any(isinstance(text, bytes) for text in texts):
                return False
        elif field.type == field.TYPE_MESSAGE:
            inner = [value] if isinstance(value, Message) else value
            if not all(map(_is_text, inner)):
                return False
    return True


class _Window:
    """Random access to a file through a buffer of the last few KiB read."""

    SIZE = 16 << 10

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.start = 0
        self.data = b""

    def __getitem__(self, at: int) -> int:
        if not self.start <= at < self.start + len(self.data):
            self.start = at
            self.data = os.pread(self.descriptor, self.SIZE, at)
            if not self.data:
                raise _MalformedError(f"the file is truncated or damaged (at byte {at})")
        return self.data[at - self.start]

    def read(self, start: int, end: int) -> bytes:
        """Read bytes `start` to `end`; raises if the file has fewer."""
        if self.start <= start and end <= self.start + len(self.data):
            return self.data[start - self.start : end - self.start]
        data = os.pread(self.descriptor, end - start, start)
        if len(data) != end - start:
            raise _MalformedError(f"the file is truncated or damaged (at byte {start + len(data)})")
        return data


class _MalformedError(ValueError):
    """The bytes are not a protobuf message."""


@dataclass(frozen=True)
class _Field:
    """One field: bytes `start` to `end` with its key; the payload starts at `payload`."""

    number: int
    type: int
    start: int
    payload: int
    end: int
    value: int = 0


@dataclass(frozen=True)
class _Walk:
    file: _Window
    location: str

    def message(self, kind: str, start: int, end: int, depth: int) -> bytes:
        """The message of type `kind` at `start`..`end`, rewritten."""
        if depth > _DEEPEST:
            raise _MalformedError("its messages are nested too deeply")
        if kind == "TensorProto":
            return self._tensor(start, end)
        inward = _INWARD[kind]
        pieces: list[bytes] = []
        for field in self._fields(start, end):
            inner = inward.get(field.number)
            if inner is None or field.type != _BYTES or field.end - field.payload < LARGE:
                pieces.append(self.file.read(field.start, field.end))
            else:
                pieces.append(_bytes_field(field.number, self.message(inner, field.payload, field.end, depth + 1)))
        return b"".join(pieces)

    def _tensor(self, start: int, end: int) -> bytes:
        fields = list(self._fields(start, end))
        data = self._data(fields)
        pieces = [self.file.read(field.start, field.end) for field in fields if field is not data]
        if data is not None:
            entries = {"location": self.location, "offset": str(data.payload), "length": str(data.end - data.payload)}
            for key, value in entries.items():
                pieces.append(_bytes_field(_EXTERNAL_DATA, _bytes_field(1, key.encode()) + _bytes_field(2, value.encode())))
            pieces.append(_varint(_DATA_LOCATION << 3 | _VARINT) + _varint(onnx.TensorProto.EXTERNAL))
        return b"".join(pieces)

    def _data(self, fields: list[_Field]) -> _Field | None:
        """The field with the tensor's bytes, if they are large, in one piece and not already external."""
        data_type = next((field.value for field in fields if field.number == _DATA_TYPE), 0)
        holders = {_RAW_DATA}
        if data_type == onnx.TensorProto.FLOAT:
            holders.add(_FLOAT_DATA)
        elif data_type == onnx.TensorProto.DOUBLE:
            holders.add(_DOUBLE_DATA)
        found = [field for field in fields if field.number in holders and field.end > field.payload]
        if len(found) != 1 or found[0].type != _BYTES or found[0].end - found[0].payload < LARGE:
            return None
        return None if any(field.number in (_EXTERNAL_DATA, _DATA_LOCATION) for field in fields) else found[0]

    def _fields(self, start: int, end: int) -> Iterator[_Field]:
        at = start
        while at < end:
            key, payload = self._read_varint(at, end)
            number = key >> 3
            kind = key & 7
            value = 0
            if kind == _VARINT:
                value, stop = self._read_varint(payload, end)
            elif kind == _BYTES:
                length, payload = self._read_varint(payload, end)
                stop = payload + length
            elif kind in (_EIGHT, _FOUR):
                stop = payload + (8 if kind == _EIGHT else 4)
            else:
                raise _MalformedError(f"there is no protobuf message at byte {at}")
            if number == 0 or stop > end:
                raise _MalformedError(f"the file is truncated or damaged (field at byte {at} ends at {stop}, past {end})")
            yield _Field(number, kind, at, payload, stop, value)
            at = stop

    def _read_varint(self, at: int, end: int) -> tuple[int, int]:
        """The varint at `at`, and the position after it."""
        value = 0
        for shift in range(0, 70, 7):
            if at >= end:
                raise _MalformedError(f"the file is truncated or damaged (at byte {at})")
            byte = self.file[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
        raise _MalformedError(f"there is no protobuf message at byte {at}")


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _bytes_field(number: int, payload: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(payload)) + payload
