"""Smallest budgets of models, the paper's figures for them, and files to which result rows are added."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import flashmem
from flashmem.base.errors import BudgetError
from flashmem.base.files import written_whole
from flashmem.bundle.bundle import Bundle
from flashmem.compiler.stages.reading import read_graph
from flashmem.options import resolve
from flashmem.request.request import BundleRequest
from flashmem.tools.smallest_budget import smallest_budget as found

Row = dict[str, Any]
Precision = Literal["fp32", "fp16"]

TABLE_8 = {
    "gptneo-125m": 260, "gptneo-1.3b": 554, "gptneo-2.7b": 1132, "resnet50": 83, "sam2-large": 150, "vit-103m": 83,
    "deepvit-204m": 165, "sd15-unet": 838, "whisper-medium-text": 240, "depthanything-s": 86, "depthanything-l": 246,
}  # fmt: skip
"""FlashMem (ASPLOS 2026), Table 8: average memory on a phone in MB, by names of the zoo. Table 6 lists these eleven models."""


def smallest_budget(model: Path, device: str, precision: Precision = "fp32") -> int:
    """The smallest budget that the planner names."""
    options = resolve(BundleRequest(device=device, precision=precision))
    return found(read_graph(model, options), options).nbytes


def compiled_at_smallest(model: Path, output: Path, device: str, precision: Precision = "fp32") -> tuple[int, Bundle]:
    """The smallest budget that works, and the bundle for it; its kernels are in the program cache."""
    budget = smallest_budget(model, device, precision)
    while True:
        try:
            return budget, flashmem.compile(model, output, device=device, precision=precision, budget=budget)
        except BudgetError as error:  # the named budget is too small
            if error.smallest_bytes <= budget:
                raise
            budget = error.smallest_bytes


def why(error: BaseException) -> str:
    """The last line of an error message, short enough for a table."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def read_rows(path: Path | None) -> list[Row]:
    """The rows in a file; empty without a file."""
    rows: list[Row] = json.loads(path.read_text()) if path is not None and path.is_file() else []
    return rows


def keep(row: Row, path: Path | None, key: Sequence[str]) -> list[Row]:
    """Replace the row with the same `key` in the file `path` by `row`, and write the file atomically; returns all rows."""
    rows = read_rows(path)
    same = [at for at, old in enumerate(rows) if all(old[name] == row[name] for name in key)]
    if same:
        rows[same[0]] = row
    else:
        rows.append(row)
    if path is not None:
        with written_whole(path) as file:
            file.write((json.dumps(rows, indent=1) + "\n").encode())
    return rows
