"""`flashmem zoo`: the models and their export."""

from __future__ import annotations

from pathlib import Path

from flashmem import zoo
from flashmem.console import print_table, say


def list_models() -> None:
    """Prints the full-size models."""
    models = [zoo.find(name) for name in zoo.names()]
    print_table(
        ("name", "input", "what"), [(model.name, f"{model.default_size} {model.size_means}", model.summary) for model in models]
    )


def export_model(name: str, directory: Path, *, size: int | None, seed: int) -> Path:
    """Writes `directory/model.onnx`; see `flashmem.zoo.export` for what it raises."""
    model = zoo.find(name)
    say(f"exporting {name} with PyTorch, {size or model.default_size} {model.size_means}")
    return zoo.export(name, directory, size=size, seed=seed)
