"""`flashmem zoo`: list the known architectures and write them with random weights."""

from __future__ import annotations

from pathlib import Path

from flashmem.base.extras import offline_half
from flashmem.cli.calls.devices import ExportZooCommand
from flashmem.cli.output.console import print_table


def list_models() -> None:
    """Print the architectures."""
    with offline_half("the zoo"):
        from flashmem.tools.zoo.graphs import architectures
    print_table(("name", "input", "source"), list(architectures()))


def export_model(call: ExportZooCommand) -> Path:
    """Write `model.onnx` and example inputs into the output folder. Raises as `export_architecture`."""
    with offline_half("the zoo"):
        from flashmem.tools.zoo.graph_file import export_architecture
    return export_architecture(call.name, call.output, size=call.size, seed=call.seed)
