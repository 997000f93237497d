"""Writes the tiny models beside this file again, with PyTorch: `python tests/data/regenerate.py [NAME...]`.

The files are the exporters' output without the stack traces of every node, which would be most of each file.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import onnx

from benchmarks.exports.export import export

HERE = Path(__file__).parent

EXPORTS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet-tiny": ("resnet-tiny", {}),
    "resnet-tiny-legacy": ("resnet-tiny", {"exporter": "legacy"}),
    "regnet-tiny": ("regnet-tiny", {}),
    "mobilenet-tiny": ("mobilenet-tiny", {}),
    "vit-tiny": ("vit-tiny", {}),
    "vit-tiny-legacy": ("vit-tiny", {"exporter": "legacy"}),
    "vit-tiny-opset23": ("vit-tiny", {"opset": 23}),
    "gptneo-tiny": ("gptneo-tiny", {}),
    "gptneo-tiny-legacy": ("gptneo-tiny", {"exporter": "legacy"}),
    "gptneo-tiny-tied": ("gptneo-tiny-tied", {}),
    "gptneo-tiny-dynamic": ("gptneo-tiny", {"dynamic": True}),
    "gptneo-tiny-dynamic-legacy": ("gptneo-tiny", {"dynamic": True, "exporter": "legacy"}),
    "gptneo-tiny-external": ("gptneo-tiny", {"external_data": True}),
    "whisper-tiny-encoder": ("whisper-tiny-encoder", {}),
    "whisper-tiny-decoder": ("whisper-tiny-decoder", {}),
    "sd-tiny-unet": ("sd-tiny-unet", {}),
    "sd-tiny-unet-legacy": ("sd-tiny-unet", {"exporter": "legacy"}),
    "depthanything-tiny": ("depthanything-tiny", {}),
    "depthanything-tiny-legacy": ("depthanything-tiny", {"exporter": "legacy"}),
    "sam2-narrow": ("sam2-narrow", {}),
    "sam2-narrow-legacy": ("sam2-narrow", {"exporter": "legacy"}),
    "sam2-narrow-decoder": ("sam2-narrow-decoder", {}),
    "sam2-narrow-decoder-legacy": ("sam2-narrow-decoder", {"exporter": "legacy"}),
    "deepvit-tiny": ("deepvit-tiny", {}),
    "deepvit-tiny-legacy": ("deepvit-tiny", {"exporter": "legacy"}),
}


def strip(path: Path) -> None:
    """Remove metadata from every level of the model; external data stays in its file."""
    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    for message in (model, graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        message.ClearField("metadata_props")
        message.ClearField("doc_string")
    path.write_bytes(model.SerializeToString())


def main() -> None:
    """Write every export, or the named ones."""
    for target in sys.argv[1:] or EXPORTS:
        name, options = EXPORTS[target]
        with tempfile.TemporaryDirectory(dir=HERE) as scratch:
            strip(export(name, scratch, filename=f"{target}.onnx", **options))
            for file in Path(scratch).iterdir():
                file.replace(HERE / file.name)
        print(target)


if __name__ == "__main__":
    main()
