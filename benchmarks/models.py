"""The models of a benchmark, as `flashmem zoo export` writes them, and their bundles."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import flashmem
from flashmem.errors import BudgetError

MODELS = ("resnet50", "vit-b16", "gptneo-125m", "gptneo-1.3b")


def models_in(zoo: Path, names: list[str], parser: argparse.ArgumentParser) -> dict[str, Path]:
    """The files of those `names` that are in `zoo`; the parser's error if none is."""
    found = {name: zoo / name / "model.onnx" for name in names if (zoo / name / "model.onnx").is_file()}
    if not found:
        parser.error(f"none of {', '.join(names)} is in {zoo}; export one with `flashmem zoo export`")
    return found


def compiled_within(model: Path, output: Path, budget: int, **options: Any) -> flashmem.Bundle:
    """The bundle within the budget, or within the smallest one that works."""
    try:
        return flashmem.compile(model, output, budget=budget, **options)
    except BudgetError as error:
        return flashmem.compile(model, output, budget=error.smallest_bytes, **options)
