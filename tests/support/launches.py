"""The launches of a model, without a device: which kernels run it, and which operators each computes."""

from __future__ import annotations

from pathlib import Path

import onnx

from flashmem.compiler.frontend.importer import import_model
from flashmem.compiler.operators import why_unsupported
from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.passes.pipeline import prepare
from flashmem.compiler.stages.pipeline import generate
from flashmem.program.launches import Launch
from flashmem.target.descriptor import load_descriptor


def launches_of(model: onnx.ModelProto | Path, folder: Path, device: str = "pocl") -> tuple[Launch, ...]:
    """The launches of `model` on a device of which only the descriptor is needed; `folder` is for temporary files."""
    if isinstance(model, onnx.ModelProto):
        onnx.save(model, folder / "launched.onnx")
        model = folder / "launched.onnx"
    graph = prepare(import_model(model, {}, why_unsupported))
    return generate(fuse(graph), load_descriptor(device)).program.launches


def families_of(model: onnx.ModelProto | Path, folder: Path, device: str = "pocl") -> list[str]:
    """The families of the kernels of `launches_of`, in order."""
    return [launch.shape.family for launch in launches_of(model, folder, device)]
