"""The golden models: exported files, models that other tools write, and known architectures without weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnxruntime import quantization

from flashmem.base.types import States
from flashmem.compiler.frontend.importer import collect_unsupported, import_model
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.operators import why_unsupported
from flashmem.compiler.passes.pipeline import prepare
from flashmem.tools.zoo.graphs import zoo_graph
from tests.support import state_models
from tests.support.decoders import Decoder, llama, smollm2

DATA = Path(__file__).parent.parent / "data"


@dataclass(frozen=True)
class GoldenModel:
    """A model, whose ONNX file `write` puts in a folder; a known architecture, without a file, if that is None."""

    name: str
    write: Callable[[Path], Path] | None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    states: States | None = None

    def graph(self, folder: Path) -> Graph:
        """The graph after all rewrites; files with its weights may be in `folder`."""
        if self.write is None:
            graph = zoo_graph(self.name)
        else:
            graph = import_model(self.write(folder), dict(self.shapes), why_unsupported, self.states)
        collect_unsupported(graph, why_unsupported)
        return prepare(graph)


def _exported(name: str) -> GoldenModel:
    return GoldenModel(name, lambda folder: DATA / f"{name}.onnx")


def _saved(model: onnx.ModelProto, path: Path) -> Path:
    onnx.save(model, path)
    return path


def _decoder(name: str, decoder: Callable[[], Decoder]) -> GoldenModel:
    """A decoder that exporters would write, of two layers."""
    return GoldenModel(name, lambda folder: _saved(decoder().model(), folder / "decoder.onnx"))


def _with_states(name: str) -> GoldenModel:
    """A decoder whose cache is written in place."""

    def write(folder: Path) -> Path:
        return _saved(state_models.decoder([1]).proto, folder / "decoder.onnx")

    return GoldenModel(name, write, {"x": (1, 1, state_models.HIDDEN)}, "auto")


def _quantised(name: str, source: str, kind: str) -> GoldenModel:
    """An exported model, quantised by ONNX Runtime's tools: "dynamic", "QDQ" or "QOperator"."""

    def write(folder: Path) -> Path:
        floats, target = folder / "float.onnx", folder / "quantised.onnx"
        model = onnx.load(DATA / f"{source}.onnx")
        del model.graph.value_info[:]
        onnx.save(model, floats)
        if kind == "dynamic":
            quantization.quantize_dynamic(floats, target, per_channel=True)
        else:
            kinds = {"quant_format": quantization.QuantFormat[kind], "op_types_to_quantize": ["Conv", "MatMul"]}
            quantization.quantize_static(floats, target, _Examples(floats), per_channel=True, **kinds)
        return target

    return GoldenModel(name, write)


class _Examples(quantization.CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
    """One example of a model's float inputs. Scales depend on it."""

    def __init__(self, model: Path) -> None:
        random = np.random.default_rng(4)
        ports = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"]).get_inputs()
        self.rest = iter([{port.name: random.standard_normal(port.shape, np.float32) for port in ports}])

    def get_next(self) -> dict[str, Any] | None:
        return next(self.rest, None)


MODELS: dict[str, GoldenModel] = {
    model.name: model
    for model in (
        _with_states("decoder-with-states"),
        GoldenModel("deepvit-204m", None),
        _exported("depthanything-tiny"),
        GoldenModel("gpt2", None),
        GoldenModel("gptneo-125m", None),
        _quantised("gptneo-tiny-dynamic-quantised", "gptneo-tiny", "dynamic"),
        _decoder("llama-layers", llama),
        GoldenModel("llama2-13b", None),
        GoldenModel("mobilenetv2", None),
        _quantised("resnet-tiny-qoperator", "resnet-tiny", "QOperator"),
        GoldenModel("resnet50", None),
        _exported("sam2-narrow"),
        _exported("sam2-narrow-decoder"),
        _exported("sd-tiny-unet"),
        _decoder("smollm2-layers", smollm2),
        GoldenModel("vit-b16", None),
        _quantised("vit-tiny-qdq", "vit-tiny", "QDQ"),
        GoldenModel("whisper-medium-encoder", None),
        _exported("whisper-tiny-decoder"),
    )
}
