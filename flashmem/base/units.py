"""Sizes and shapes as people write them: `256MB`, `1MiB`, `input_ids=1x128`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flashmem.base.errors import UserError
from flashmem.base.types import States

_FACTORS = {
    "": 1, "B": 1,
    "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4,
    "KIB": 1024, "MIB": 1024**2, "GIB": 1024**3, "TIB": 1024**4,
}  # fmt: skip
_LONGEST = 100
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_DIMENSION = re.compile(r"0*[0-9]{1,18}")  # 64 bits


def parse_size(text: str | int, *, what: str = "size") -> int:
    """Bytes in `text`: a positive number with B, KB, MB, GB (powers of 1000) or KiB, MiB, GiB (powers of 1024).

    Raises:
        UserError: not a size, or not a positive one.
    """
    if isinstance(text, int):
        if text <= 0:
            raise UserError(f"{what} {text} is not a positive number of bytes")
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) and len(text) <= _LONGEST else None
    if match is None or match[2].upper() not in _FACTORS:
        raise UserError(
            f"{what} {str(text)[:_LONGEST]!r} is not a size; write a positive number with a unit, for example 256MB or 64MiB"
        )
    size = int(float(match[1]) * _FACTORS[match[2].upper()])
    if size <= 0:
        raise UserError(f"{what} {text!r} must be more than 0 bytes, for example 256MB")
    return size


def format_size(size: int | float) -> str:
    """`size` bytes for a reader, in powers of 1000 (as `--budget` reads them), rounded to three digits."""
    value = float(size)
    for unit in ("B", "KB", "MB"):
        if abs(value) < 999.5:
            return f"{value:.0f}{unit}" if unit == "B" else f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}GB" if value < 999.5 else f"{value:.0f}GB"


def budget_text(nbytes: int | None) -> str:
    """A budget in a sentence: `budget 64MB`, or `no budget` for None."""
    return "no budget" if nbytes is None else f"budget {format_size(nbytes)}"


def parse_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """`input_ids=1x128` as `("input_ids", (1, 128))`; `x=` is a scalar.

    Raises:
        UserError: no name, or a dimension that is not a whole number.
    """
    name, equals, dims = text.rpartition("=")
    parts = dims.lower().split("x") if dims else []
    if not equals or not name or not all(_DIMENSION.fullmatch(part) for part in parts):
        raise UserError(f"shape {text!r} is not understood; write name=1x3x224x224 with whole numbers")
    return name, tuple(int(part) for part in parts)


def read_states(texts: Sequence[str]) -> States | None:
    """The states in `--state h=h_next --state c=c_next`, the input's name before the output's; or in `--state auto`.

    Raises:
        UserError: not a pair of names, an input that is named twice, or "auto" beside a pair.
    """
    if not texts:
        return None
    if list(texts) == ["auto"]:
        return "auto"
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, output = text.partition("=")
        if not (name and equals and output):
            raise UserError(f"state {text!r} is not understood; write input=output with the names of both, or auto alone")
        if name in pairs:
            raise UserError(f"the state {name!r} is given twice; name one output for it")
        pairs[name] = output
    return pairs


def read_constants(texts: Sequence[str]) -> dict[str, int | float | list[int | float]]:
    """The values in `--constant sr=16000 --constant scales=0.5,2`, by the names of inputs.

    Raises:
        UserError: not a name with numbers, or a name that is given twice.
    """
    constants: dict[str, int | float | list[int | float]] = {}
    for text in texts:
        name, _, values = text.rpartition("=")
        try:
            numbers = [_number(each) for each in values.split(",")]
        except ValueError:
            numbers = []
        if not name or not numbers:
            raise UserError(f"constant {text!r} is not understood; write name=16000, or name=1,2,3 with several numbers")
        if name in constants:
            raise UserError(f"the constant {name!r} is given twice; give it one value")
        constants[name] = numbers if "," in values else numbers[0]
    return constants


def _number(text: str) -> int | float:
    """A number, or `true` or `false` as 1 or 0. Raises ValueError for anything else."""
    known = {"true": 1, "false": 0}.get(text.strip().lower())
    if known is not None:
        return known
    try:
        return int(text)
    except ValueError:
        return float(text)
