"""The content of golden files: launches and bytes of a model by kernel family, and hashes of its records if it is small."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.stages.pipeline import generate
from flashmem.target.descriptor import load_descriptor
from tests.golden.models import GoldenModel
from tests.golden.records import DEVICES, hash_stages, record

HASHED = (
    "decoder-with-states",
    "gptneo-tiny-dynamic-quantised",
    "llama-layers",
    "sam2-narrow",
    "whisper-tiny-decoder",
)
"""Models whose record takes a second or two, and whose weights depend on no processor; the command compares the others."""

COUNTED = ("pocl", "generic-gpu")
"""The devices whose launches and bytes are counted."""


def golden_file(model: GoldenModel) -> dict[str, Any]:
    """The content of a model's golden file."""
    if model.name not in HASHED:
        return summary(model)
    return {**summary(model), "hashes": {device: hash_stages(record(model, device)) for device in DEVICES}}


def summary(model: GoldenModel) -> dict[str, Any]:
    """The numbers of a model, by device: launches, bytes by kernel family, arena and weights."""
    with tempfile.TemporaryDirectory() as folder:
        return {device: _counts(model, Path(folder), device) for device in COUNTED}


def _counts(model: GoldenModel, folder: Path, device: str) -> dict[str, Any]:
    graph = model.graph(folder)
    program = generate(fuse(graph), load_descriptor(device)).program
    launches: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for launch in program.launches:
        launches[launch.shape.family] += 1
        nbytes[launch.shape.family] += launch.bytes
    return {
        "launches": dict(sorted(launches.items())),
        "bytes": dict(sorted(nbytes.items())),
        "arena_bytes": program.arena_bytes,
        "weights_bytes": program.weights_bytes,
    }
