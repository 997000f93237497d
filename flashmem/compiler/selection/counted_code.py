"""Counted instructions of a phone's kernel configs, by the open compiler of its GPU: what estimates of configs charge.

They are in DEVICE.code.csv next to a descriptor, written by `python -m flashmem.profiler.phone_compilers.costs`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, get_type_hints

from flashmem.base.errors import UserError
from flashmem.base.resources import read_text
from flashmem.target.pipelines import Pipelines

CODE = ".code.csv"
"""The suffix of the file with counted instructions."""

LANE = "lane_copy"
"""The family of kernels that only copy streamed weights."""


@dataclass(frozen=True)
class KernelCode:
    """Counted instructions of one kernel for each multiply-add; of `LANE`, for each byte that it copies.

    `rows` and `columns`: outputs of a work-item, 0 where the family has no configs. `half`: whether products are summed in
    half. `memory_path`: of the weights, "" where there are none. `slots`: issue slots. `texture_bytes`, `load_bytes`: bytes
    read through textures and from buffers. `spills`: accesses of scratch memory in the main loop. `registers` and `threads` are
    those of `KernelStatistics`.
    """

    family: str
    rows: int
    columns: int
    half: int
    memory_path: str
    slots: float
    texture_bytes: float
    load_bytes: float
    registers: int
    spills: int
    threads: int


def read_codes(text: str, where: str) -> list[KernelCode]:
    """The rows of a .code.csv file, whose first lines are comments.

    Raises:
        UserError: it is something else.
    """
    kinds = get_type_hints(KernelCode)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    try:
        return [KernelCode(**{name: kinds[name](value) for name, value in line.items()}) for line in csv.DictReader(lines)]
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(
            f"{where} has no counted instructions ({error}); write it with python -m flashmem.profiler.phone_compilers.costs"
        ) from error


@lru_cache(maxsize=8)
def load_codes(counted: str) -> tuple[KernelCode, ...]:
    """The rows of the file that a descriptor's key `counted` names: next to it, or shipped, for a copy of a shipped one.

    Raises:
        UserError: the file is damaged.
    """
    name = f"{counted}{CODE}"
    beside = Path(name).is_absolute() and Path(name).is_file()
    return tuple(read_codes(Path(name).read_text(encoding="utf-8") if beside else read_text("devices", Path(name).name), name))


def write_codes(codes: Iterable[KernelCode], comment: str) -> str:
    """The text of a .code.csv file."""
    names = [field.name for field in fields(KernelCode)]
    lines = [f"# {comment}", ",".join(names)]
    lines += [",".join(_cell(getattr(code, name)) for name in names) for code in codes]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def cycles_of(code: KernelCode, pipelines: Pipelines) -> dict[str, float]:
    """Cycles of each pipeline of the whole GPU for a multiply-add: "arithmetic", "texture" and "load"."""
    return {
        "arithmetic": code.slots / pipelines.lanes / (pipelines.half_rate if code.half else 1),
        "texture": code.texture_bytes / pipelines.texture_bytes,
        "load": code.load_bytes / pipelines.load_bytes,
    }
