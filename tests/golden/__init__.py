"""Golden files: the number of kernel launches of a model, by family, and the bytes that they read and write.

One JSON file for each model, for a CPU and a GPU. A lost fusion or an added copy changes a number here, without a time
measurement. `test_golden.py` compares. After an intended change, write the files again and read the difference:

    python -m tests.golden [NAME...]
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnxruntime import quantization

from flashmem.compiler.frontend.importer import collect_unsupported, import_model
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.lowering.program import generate
from flashmem.compiler.operators import why_unsupported
from flashmem.compiler.passes.fusion import fuse
from flashmem.compiler.passes.pipeline import prepare
from flashmem.target.descriptor import load_descriptor
from flashmem.tools.zoo.graphs import zoo_graph
from tests.support import state_models
from tests.support.decoders import Decoder, llama, smollm2

HERE = Path(__file__).parent
DATA = HERE.parent / "data"
DEVICES = ("pocl", "generic-gpu")


def summary(name: str) -> dict[str, Any]:
    """The numbers of the model `name`, by device: launches, bytes by kernel family, arena and weights."""
    with tempfile.TemporaryDirectory() as folder:
        return {device: _generated(MODELS[name](Path(folder)), device) for device in DEVICES}


def _generated(graph: Graph, device: str) -> dict[str, Any]:
    collect_unsupported(graph, why_unsupported)
    graph = prepare(graph)
    program = generate(graph, fuse(graph), load_descriptor(device)).program
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


Make = Callable[[Path], Graph]
"""Makes a model's graph; files with its weights may be in the folder."""


def _exported(name: str) -> Make:
    return lambda folder: import_model(DATA / f"{name}.onnx", {}, why_unsupported)


def _decoder(decoder: Callable[[], Decoder]) -> Make:
    """A decoder that exporters would write, of two layers."""

    def made(folder: Path) -> Graph:
        onnx.save(decoder().model(), folder / "decoder.onnx")
        return import_model(folder / "decoder.onnx", {}, why_unsupported)

    return made


def _with_states(folder: Path) -> Graph:
    """A decoder whose cache is written in place."""
    onnx.save(state_models.decoder([1]).proto, folder / "decoder.onnx")
    return import_model(folder / "decoder.onnx", {"x": (1, 1, state_models.HIDDEN)}, why_unsupported, "auto")


def _known(name: str) -> Make:
    return lambda folder: zoo_graph(name)


def _quantised(name: str, kind: str) -> Make:
    """An exported model, quantised by ONNX Runtime's tools: "dynamic", "QDQ" or "QOperator"."""

    def made(folder: Path) -> Graph:
        source, target = folder / "float.onnx", folder / "quantised.onnx"
        model = onnx.load(DATA / f"{name}.onnx")
        del model.graph.value_info[:]
        onnx.save(model, source)
        if kind == "dynamic":
            quantization.quantize_dynamic(source, target, per_channel=True)
        else:
            kinds = {"quant_format": quantization.QuantFormat[kind], "op_types_to_quantize": ["Conv", "MatMul"]}
            quantization.quantize_static(source, target, _Examples(source), per_channel=True, **kinds)
        return import_model(target, {}, why_unsupported)

    return made


class _Examples(quantization.CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
    """One example of a model's float inputs. Scales depend on it, but no golden file depends on scales."""

    def __init__(self, model: Path) -> None:
        random = np.random.default_rng(4)
        ports = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"]).get_inputs()
        self.rest = iter([{port.name: random.standard_normal(port.shape, np.float32) for port in ports}])

    def get_next(self) -> dict[str, Any] | None:
        return next(self.rest, None)


MODELS: dict[str, Make] = {
    "decoder-with-states": _with_states,
    "deepvit-204m": _known("deepvit-204m"),
    "depthanything-tiny": _exported("depthanything-tiny"),
    "gpt2": _known("gpt2"),
    "gptneo-125m": _known("gptneo-125m"),
    "gptneo-tiny-dynamic-quantised": _quantised("gptneo-tiny", "dynamic"),
    "llama-layers": _decoder(llama),
    "llama2-13b": _known("llama2-13b"),
    "mobilenetv2": _known("mobilenetv2"),
    "resnet-tiny-qoperator": _quantised("resnet-tiny", "QOperator"),
    "resnet50": _known("resnet50"),
    "sam2-narrow": _exported("sam2-narrow"),
    "sam2-narrow-decoder": _exported("sam2-narrow-decoder"),
    "sd-tiny-unet": _exported("sd-tiny-unet"),
    "smollm2-layers": _decoder(smollm2),
    "vit-b16": _known("vit-b16"),
    "vit-tiny-qdq": _quantised("vit-tiny", "QDQ"),
    "whisper-medium-encoder": _known("whisper-medium-encoder"),
    "whisper-tiny-decoder": _exported("whisper-tiny-decoder"),
}
