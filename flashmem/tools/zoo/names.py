"""`zoo:NAME`: how a known architecture, which needs no file, is named where a model is."""

from __future__ import annotations

from pathlib import Path

_PREFIX = "zoo:"


def architecture(model: str | Path) -> str | None:
    """NAME of `zoo:NAME`, known or not; None for anything else, which is a path."""
    text = str(model)
    return text.removeprefix(_PREFIX) if text.startswith(_PREFIX) else None
