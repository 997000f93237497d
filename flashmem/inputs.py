"""Inputs of a run: read from an .npz file, the rest drawn from a seed; and outputs written to one."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from flashmem.errors import MissingFileError, UserError
from flashmem.files import written_whole
from flashmem.program import Port, Program

Arrays = dict[str, NDArray[Any]]


def read_inputs(path: Path) -> Arrays:
    """The arrays in an .npz file, by name.

    Raises:
        MissingFileError: no such file.
        UserError: not an .npz file, or one that holds Python objects.
    """
    if not path.is_file():
        raise MissingFileError(f"{path}: no such input file")
    how = "write it with numpy.savez(path, name=array)"
    try:
        stored = np.load(path, allow_pickle=False)
        if isinstance(stored, np.lib.npyio.NpzFile):
            with stored:
                return {name: stored[name] for name in stored.files}
    except (ValueError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise UserError(f"{path} is not a readable .npz file ({error}); {how}") from error
    raise UserError(f"{path} holds one nameless array; {how}")


def write_outputs(path: Path, names: Sequence[str], arrays: Sequence[NDArray[Any]]) -> None:
    """Writes an .npz file, whole or not at all."""
    with written_whole(path) as file:
        _write_npz(file, zip(names, arrays, strict=True))


def _write_npz(file: IO[bytes], arrays: Iterable[tuple[str, NDArray[Any]]]) -> None:
    """What numpy.savez writes; that function takes names as keywords, and so cannot write an output called `file`."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def complete_inputs(program: Program, given: Mapping[str, NDArray[Any]], seed: int) -> Arrays:
    """`given`, with every missing input of `program` drawn from `seed`.

    Each input has a generator of its own, so that giving one does not change the others.

    Raises:
        UserError: `given` names an input that the model does not have.
    """
    names = [port.name for port in program.inputs]
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise UserError(f"the model has no input {unknown[0]!r}; its inputs are: {', '.join(names)}")
    rows = {gather.indices: gather.rows for gather in program.row_gathers}
    drawn = {
        port.name: _draw(port, rows.get(port.name), np.random.default_rng([seed, index]))
        for index, port in enumerate(program.inputs)
        if port.name not in given
    }
    return {**given, **drawn}


def _draw(port: Port, rows: int | None, generator: np.random.Generator) -> NDArray[Any]:
    """Standard normal numbers; row numbers for a table's indices; 0 or 1 where all that is known is that it is whole."""
    dtype = np.dtype(port.dtype)
    if dtype.kind == "f":
        return generator.standard_normal(port.shape).astype(dtype)
    return generator.integers(0, rows or 2, port.shape).astype(dtype)
