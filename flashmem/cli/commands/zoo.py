"""`flashmem zoo`: list the known models and export them."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from flashmem.base.streams import say
from flashmem.cli.calls.devices import ExportZooCommand
from flashmem.cli.output.console import print_table
from flashmem.tools.zoo.export import Exporter, export
from flashmem.tools.zoo.models import find, names


def list_models() -> None:
    """Print the full-size models."""
    rows = []
    for model in map(find, names()):
        paper = "" if model.paper_size is None else f"{model.paper_size}"
        rows.append((model.name, f"{model.default_size} {model.size_means}", paper, model.summary))
    print_table(("name", "input", "paper's", "what"), rows)


def export_model(call: ExportZooCommand) -> Path:
    """Write `model.onnx`, example inputs and notes into the output folder. Raises as `flashmem.tools.zoo.export.export`."""
    model = find(call.name)
    say(f"exporting {call.name} with PyTorch, {call.size or model.default_size} {model.size_means}")
    exporter = cast(Exporter, call.exporter)
    return export(call.name, call.output, size=call.size, seed=call.seed, exporter=exporter, notes=True)
