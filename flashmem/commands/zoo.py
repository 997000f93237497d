"""`flashmem zoo`: the models and their export."""

from __future__ import annotations

from pathlib import Path

from flashmem.console import print_table, say
from flashmem.zoo.export import export
from flashmem.zoo.models import find, names


def list_models() -> None:
    """Prints the full-size models."""
    models = [find(name) for name in names()]
    print_table(
        ("name", "input", "what"), [(model.name, f"{model.default_size} {model.size_means}", model.summary) for model in models]
    )


def export_model(name: str, directory: Path, *, size: int | None, seed: int) -> Path:
    """Writes `directory/model.onnx`; see `flashmem.zoo.export.export` for what it raises."""
    model = find(name)
    say(f"exporting {name} with PyTorch, {size or model.default_size} {model.size_means}")
    return export(name, directory, size=size, seed=seed)
