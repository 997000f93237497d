"""`flashmem zoo`: the models and their export."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from flashmem import zoo
from flashmem.console import out, say


def list_models() -> None:
    """Prints the full-size models."""
    table = Table("name", "input", "what", box=None)
    for name in zoo.names():
        model = zoo.find(name)
        table.add_row(name, f"{model.default_size} {model.size_means}", model.summary)
    out().print(table)


def export_model(name: str, directory: Path, *, size: int | None, seed: int) -> Path:
    """Writes `directory/model.onnx`; see `flashmem.zoo.export` for what it raises."""
    model = zoo.find(name)
    say(f"exporting {name} with PyTorch, {size or model.default_size} {model.size_means}")
    return zoo.export(name, directory, size=size, seed=seed)
