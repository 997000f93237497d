"""`zoo:NAME`: the name of a known architecture in place of a model's path."""

from __future__ import annotations

from pathlib import Path

_PREFIX = "zoo:"


def architecture(model: str | Path) -> str | None:
    """NAME of `zoo:NAME`, known or not; None for a path."""
    text = str(model)
    return text.removeprefix(_PREFIX) if text.startswith(_PREFIX) else None
