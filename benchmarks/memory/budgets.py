"""Smallest budgets of models, the paper's figures for them, and result files that rows are appended to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import flashmem
from flashmem.base.errors import BudgetError
from flashmem.base.files import written_whole
from flashmem.bundle.bundle import Bundle
from flashmem.compile import read_graph
from flashmem.options import resolve
from flashmem.planning.limits import read_limits
from flashmem.tools.smallest_budget import smallest_budget as found

Row = dict[str, Any]
Precision = Literal["fp32", "fp16"]

TABLE_8 = {
    "gptneo-125m": 260, "gptneo-1.3b": 554, "gptneo-2.7b": 1132, "resnet50": 83, "sam2-large": 150, "vit-103m": 83,
    "deepvit-204m": 165, "sd15-unet": 838, "whisper-medium-text": 240, "depthanything-s": 86, "depthanything-l": 246,
}  # fmt: skip
"""FlashMem (ASPLOS 2026), Table 8: average memory on a phone in MB, by the names of the zoo. Its Table 6 lists these eleven."""


def smallest_budget(model: Path, device: str, precision: Precision = "fp32") -> int:
    """What the planner names when it is asked for nothing."""
    options = resolve(read_limits(), device=device, precision=precision)
    return found(read_graph(model, options), options).nbytes


def compiled_at_smallest(model: Path, output: Path, device: str, precision: Precision = "fp32") -> tuple[int, Bundle]:
    """The smallest budget that works, and the bundle; its kernels are in the program cache."""
    budget = smallest_budget(model, device, precision)
    while True:
        try:
            return budget, flashmem.compile(model, output, device=device, precision=precision, budget=budget)
        except BudgetError as error:  # what was named is too small after all
            if error.smallest_bytes <= budget:
                raise
            budget = error.smallest_bytes


def why(error: BaseException) -> str:
    """The last line of what went wrong: all that a table has room for."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def read_rows(path: Path | None) -> list[Row]:
    """The rows kept in a file; none where there is none."""
    rows: list[Row] = json.loads(path.read_text()) if path is not None and path.is_file() else []
    return rows


def keep(row: Row, path: Path | None, key: Sequence[str]) -> list[Row]:
    """`row` in place of the one of the same `key` in the file `path`, which is written whole; returns all rows."""
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
