"""What golden models answer on the OpenCL runtime of this machine, in every transfer mode.

Answers depend on a processor's instruction set, so no file has them: compare two commits on one machine.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import flashmem
from flashmem.base.types import MemoryPath, TransferMode
from flashmem.bundle.bundle import Bundle
from flashmem.program.tensors import Port
from tests.golden.models import GoldenModel
from tests.golden.records import Record

RUNTIME = "pocl"
PATHS: tuple[MemoryPath, ...] = ("buffer", "texture")


def answers(model: GoldenModel) -> Record:
    """Hashes of a model's outputs, by memory path and mode: of a first and a later run."""
    assert model.write is not None
    with tempfile.TemporaryDirectory() as folder:
        file = model.write(Path(folder))
        return {f"{path} answers": _on_path(model, file, path, Path(folder)) for path in PATHS}


def _on_path(model: GoldenModel, file: Path, path: MemoryPath, folder: Path) -> dict[str, str]:
    bundle = flashmem.compile(
        file,
        folder / f"{path}.flashmem",
        device=RUNTIME,
        memory_path=path,
        shapes=model.shapes or None,
        states=model.states,
        build=False,
    )
    return {mode: _of_session(bundle, mode) for mode in bundle.descriptor.modes[path]}


def _of_session(bundle: Bundle, mode: TransferMode) -> str:
    random, lines = np.random.default_rng(49), []
    with flashmem.Session(bundle, device=RUNTIME, mode=mode, build_apart=False) as session:
        for run in ("first", "later"):
            values = session.run(None, {port.name: _drawn(random, port) for port in bundle.program.inputs})
            names = [port.name for port in bundle.program.outputs]
            lines += [f"{run} run, {name}: {_hash(value)}" for name, value in zip(names, values, strict=True)]
    return "\n".join(lines)


def _drawn(random: np.random.Generator, port: Port) -> NDArray[Any]:
    """Random numbers for an input; of integers, indices that every model has."""
    if port.dtype.startswith("float"):
        return random.standard_normal(port.shape).astype(port.dtype)
    return random.integers(0, 2, port.shape).astype(port.dtype)


def _hash(value: object) -> str:
    return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]
