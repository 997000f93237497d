"""Inputs of a run, read from an .npz file or drawn from a seed; and outputs written to an .npz file."""

from __future__ import annotations

import io
import warnings
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib.format import MAGIC_PREFIX
from numpy.typing import NDArray

from flashmem.base.errors import MissingFileError, UserError
from flashmem.base.files import written_whole
from flashmem.program.program import Program
from flashmem.program.tensors import Port, numpy_dtype, port_dtype
from flashmem.runtime.engine.ports import check_inputs

Arrays = dict[str, NDArray[Any]]

_HOW = "write it with numpy.savez(path, name=array)"
_PIECE = 1 << 20  # bytes decompressed at once
_DRAWN_AT_ONCE = 1 << 16  # elements
_HEADER_BYTES = 1 << 14  # numpy refuses longer ones, but only after reading them
_LONGEST_NUMBER = 32  # bytes: a complex number of 256 bits
_LONGEST_NAME = 80
_LONGEST_REASON = 200


@dataclass(frozen=True)
class _Stored:
    """An array of the file as its header describes it; its data begins at byte `offset` of its member."""

    member: zipfile.ZipInfo
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    column_major: bool


def check_input_file(path: Path) -> None:
    """Check the headers of an .npz file, to refuse an unusable file before a model is compiled for it.

    Raises:
        MissingFileError: no such file.
        UserError: not an .npz file, or its headers show damage, or elements that are not numbers.
    """
    with _opened(path) as archive:
        _headers(path, archive)


def stored_arrays(path: Path) -> Mapping[str, _Stored]:
    """The arrays in an .npz file by name, as their headers describe them (`shape`, `dtype`). Raises as `check_input_file`."""
    with _opened(path) as archive:
        return _headers(path, archive)


def read_inputs(path: Path, ports: Sequence[Port]) -> Arrays:
    """The arrays in an .npz file, by name. Decompresses an array only after its header matches the port of that name.

    Raises:
        MissingFileError: no such file.
        UserError: as `check_input_file`; or an array without a port, or of another shape or type than its port; or damage.
    """
    by_name = {port.name: port for port in ports}
    with _opened(path) as archive:
        stored = _headers(path, archive)
        _refuse_unknown(stored, by_name, f"{path}: ")
        stored = {name: _checked(path, by_name[name], array) for name, array in stored.items()}
        return {name: _read(path, name, archive, array) for name, array in stored.items()}


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    if path.is_dir():
        raise UserError(f"{path} is a folder; name an .npz file")
    if not path.is_file():
        raise MissingFileError(f"{path}: no such input file")
    with path.open("rb") as file:
        if file.read(len(MAGIC_PREFIX)) == MAGIC_PREFIX:
            raise UserError(f"{path} holds one nameless array; {_HOW}")
        with _readable(path):
            archive = zipfile.ZipFile(file)
        with archive:
            yield archive


@contextmanager
def _readable(path: Path, name: str | None = None) -> Iterator[None]:
    """Turns errors of zipfile, zlib and numpy into UserError. Damaged bytes can raise any exception, so it catches all."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # headers of Python 2 and repeated names: read, or refused below
            yield
    except UserError:
        raise
    except Exception as error:
        where = f"{path}" if name is None else f"{path}: {_quoted(name)}"
        reason = " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
        raise UserError(f"{where} is not readable as .npz ({reason}); {_HOW}") from error


def _headers(path: Path, archive: zipfile.ZipFile) -> dict[str, _Stored]:
    stored: dict[str, _Stored] = {}
    for member in archive.infolist():
        name = member.filename.removesuffix(".npy")
        if name in stored:
            raise UserError(f"{path} holds {_quoted(name)} twice; {_HOW}")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UserError(f"{path}: {_quoted(name)} is compressed in a way that numpy does not write; {_HOW}")
        with _readable(path, name), archive.open(member) as file:
            stored[name] = array = _header(member, file)
        dtype = array.dtype
        if dtype.hasobject or dtype.fields or dtype.subdtype or dtype.itemsize > _LONGEST_NUMBER:
            raise UserError(f"{path}: {_quoted(name)} is not an array of numbers; {_HOW}")
    return stored


def _header(member: zipfile.ZipInfo, stream: IO[bytes]) -> _Stored:
    file = io.BytesIO(stream.read(_HEADER_BYTES))
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"an array of format {version[0]}.{version[1]}, which holds fields")
    shape, column_major, dtype = read(file)
    if any(size < 0 for size in shape):
        raise ValueError(f"a shape of {shape}")
    return _Stored(member, file.tell(), shape, dtype, column_major)


def _checked(path: Path, port: Port, array: _Stored) -> _Stored:
    """Refuse what `Session.run` would refuse, with the same message; an empty array replaces the stored one."""
    if port.dtype == "bfloat16" and array.dtype == np.dtype("V2"):  # numpy's name for it in a file
        array = replace(array, dtype=numpy_dtype(port.dtype))
    with _readable(path, port.name):
        stand_in = np.broadcast_to(np.empty((), array.dtype), array.shape)
    try:
        check_inputs([port], {port.name: stand_in})
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    return array


def _read(path: Path, name: str, archive: zipfile.ZipFile, array: _Stored) -> NDArray[Any]:
    """The array itself; reads no more bytes than its port's size, for a file of any decompressed size."""
    result = np.empty(array.shape[::-1] if array.column_major else array.shape, array.dtype)
    flat: Any = result.reshape(-1).view(np.uint8)
    left = memoryview(flat)
    with _readable(path, name), archive.open(array.member) as file:
        file.read(array.offset)
        while left and (piece := file.read(min(len(left), _PIECE))):
            left[: len(piece)] = piece
            left = left[len(piece) :]
        if left:
            raise ValueError(f"{len(left)} bytes are missing")
        if file.read(1):  # reading at the end compares the file with its checksum
            raise ValueError("it is longer than its shape says")
    return result.T if array.column_major else result


def _refuse_unknown(given: Iterable[str], known: Collection[str], where: str = "") -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise UserError(f"{where}the model has no input {_quoted(unknown[0])}; its inputs are: {', '.join(known)}")


def _quoted(name: str) -> str:
    return repr(name if len(name) <= _LONGEST_NAME else name[:_LONGEST_NAME] + "…")


def write_outputs(path: Path, names: Sequence[str], arrays: Sequence[NDArray[Any]]) -> None:
    """Writes an .npz file, whole or not at all."""
    write_npz(path, zip(names, arrays, strict=True))


def write_npz(path: Path, arrays: Iterable[tuple[str, NDArray[Any]]]) -> None:
    """Write arrays one by one to an .npz file, whole or not at all.

    The format is that of numpy.savez, which accepts names as keywords and so cannot write an output called `file`.
    """
    with written_whole(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                _write_npy(member, np.ascontiguousarray(array).reshape(array.shape))


def _write_npy(file: IO[bytes], array: NDArray[Any]) -> None:
    """Write the format of numpy.save, which copies 16 MB at a time."""
    if array.dtype.hasobject:
        raise ValueError("an array of objects would have to be pickled")
    header = np.lib.format.header_data_from_array_1_0(array)
    np.lib.format.write_array_header_1_0(file, header)
    flat: Any = array.reshape(-1).view(np.uint8)
    content = memoryview(flat)
    for first in range(0, len(content), _PIECE):
        file.write(content[first : first + _PIECE])


def complete_inputs(program: Program, given: Mapping[str, NDArray[Any]], seed: int) -> Arrays:
    """`given`, with every missing input of `program` drawn from `seed`.

    Each input has its own generator, so that a given input does not change the drawn ones.

    Raises:
        UserError: `given` names an input that the model does not have.
    """
    _refuse_unknown(given, [port.name for port in program.inputs])
    rows = {gather.indices: gather.rows for gather in program.host_embeddings}
    drawn = {
        port.name: _draw(port, rows.get(port.name), np.random.default_rng([seed, index]))
        for index, port in enumerate(program.inputs)
        if port.name not in given
    }
    return {**given, **drawn}


def _draw(port: Port, rows: int | None, generator: np.random.Generator) -> NDArray[Any]:
    """Standard normal numbers; row numbers for a table's indices; 0 or 1 for other integers."""
    dtype = numpy_dtype(port.dtype)
    drawn = np.empty(prod(port.shape), dtype)
    for first in range(0, drawn.size, _DRAWN_AT_ONCE):  # numpy draws in 64 bits
        piece = drawn[first : first + _DRAWN_AT_ONCE]
        if port_dtype(port) == "float32":
            piece[:] = generator.standard_normal(piece.size)
        else:
            piece[:] = generator.integers(0, rows or 2, piece.size)
    return drawn.reshape(port.shape)
