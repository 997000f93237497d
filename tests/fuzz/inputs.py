"""Fuzzing of .npz files: a damaged file is read correctly, or refused with one sentence, in little memory.

    python -m tests.fuzz.inputs --count 10000 --seed 1

Half of the files have changed bytes. Half are valid archives with changed members, which checksums do not reveal.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import tracemalloc
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import UserError
from flashmem.program.tensors import Port
from flashmem.runtime.engine.inputs import read_inputs

_ARRAYS: dict[str, NDArray[Any]] = {
    "image": np.linspace(-1, 1, 96, dtype=np.float32).reshape(1, 3, 4, 8),
    "ids": np.arange(20, dtype=np.int64).reshape(4, 5).T,
    "flags": np.array([True, False, True]),
    "scalar": np.array(1.5, np.float16),
}
_PORTS = [Port(name, array.shape, str(array.dtype), None) for name, array in _ARRAYS.items()]
_MOST_BYTES = 4 << 20
_WORDS = (
    b"'|O'", b"'<V9999999999'", b"'<f8'", b"'>f4'", b"[('a', '<f4')]", b"(-1,)", b"()", b"(1,) * 9", b"(99999999999999999999,)",
    b"4611686018427387904", b"(" * 5000, b"-" * 5000 + b"1", b"True", b"{}", b"0L", b"'", b"\n", b"\\", b"\x00", b"\xff" * 4,
)  # fmt: skip


def fuzz(count: int, seed: int, folder: Path) -> Counter[str]:
    """Read `count` files drawn from `seed`; returns how many were "read" and how many "refused".

    Raises:
        AssertionError: a file was read wrongly, or refused in more than one line, or used too much memory.
        Exception: any other error of `read_inputs`; a note names the file's number.
    """
    results: Counter[str] = Counter()
    path = folder / "fuzzed.npz"
    for number in range(count):
        generator = np.random.default_rng([seed, number])
        path.write_bytes((_changed_bytes if number % 2 else _changed_members)(generator))
        tracemalloc.start()
        try:
            results[_read(path, exactly=bool(number % 2))] += 1
            peak = tracemalloc.get_traced_memory()[1]
            assert peak < _MOST_BYTES, f"{peak} bytes"
        except Exception as error:
            error.add_note(f"file {number} of seed {seed}, made again by the same count and seed")
            raise
        finally:
            tracemalloc.stop()
    return results


def _read(path: Path, *, exactly: bool) -> str:
    try:
        arrays = read_inputs(path, _PORTS)
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 800, str(error)
        return "refused"
    for name, array in arrays.items():
        assert (array.dtype, array.shape) == (_ARRAYS[name].dtype, _ARRAYS[name].shape), name
        assert not exactly or np.array_equal(array, _ARRAYS[name]), name
    return "read"


def _changed_bytes(generator: np.random.Generator) -> bytes:
    """An archive with bytes changed, removed, repeated, or inserted; arrays that are read must equal the originals."""
    content = bytearray(_archive({name: _npy(array) for name, array in _ARRAYS.items()}, generator))
    for _ in range(generator.integers(1, 5)):
        at, length = int(generator.integers(len(content))), int(generator.choice([1, 1, 2, 4, 8, 64]))
        piece = content[at : at + length]
        content[at : at + length] = {
            0: bytes([piece[0] ^ 1 << int(generator.integers(8))]) + piece[1:],
            1: generator.bytes(len(piece)),
            2: b"",
            3: piece * 2,
            4: b"\xff" * len(piece),
            5: bytes(len(piece)),
        }[int(generator.integers(6))]
        content = content or bytearray(b"P")
    return bytes(content[: generator.integers(1, len(content) + 1)] if generator.random() < 0.1 else content)


def _changed_members(generator: np.random.Generator) -> bytes:
    """A valid archive of arrays with changed headers."""
    members = {name: bytearray(_npy(array)) for name, array in _ARRAYS.items()}
    for _ in range(generator.integers(1, 4)):
        member = members[str(generator.choice(list(members)))]
        at = int(generator.integers(min(len(member), 140) + 1))
        word = bytes(generator.choice(np.array(_WORDS, object))) if generator.random() < 0.6 else generator.bytes(2)
        member[at : at + int(generator.integers(20))] = word
        if generator.random() < 0.5 and len(member) > 10:  # a length that matches again
            end = member.find(b"\n", 10)
            member[8:10] = max(end + 1 - 10, 0).to_bytes(8, "little")[:2]
        if generator.random() < 0.2:
            member[6] = int(generator.integers(5))
    names = {name: name if generator.random() < 0.95 else f"{name}{chr(int(generator.integers(1, 2000)))}" for name in members}
    return _archive({names[name]: bytes(member) for name, member in members.items()}, generator)


def _npy(array: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _archive(members: dict[str, bytes], generator: np.random.Generator) -> bytes:
    methods = [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", methods[int(generator.integers(2))]) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return file.getvalue()


def main() -> None:
    """Fuzz, and print how many files were read and how many refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = fuzz(options.count, options.seed, Path(folder))
    print(f"{options.count} files: {results['read']} read, {results['refused']} refused with one sentence")


if __name__ == "__main__":
    main()
