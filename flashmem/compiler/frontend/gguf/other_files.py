"""GGUF files that are no model of their own: what each is, and what to do with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashmem.base.errors import UserError


def check_is_model(path: Path, field: Callable[[str, Any], Any], *, has_weights: bool) -> None:
    """Raise UserError if the file with these fields is an adapter, a projector, or another file beside one."""
    kind = str(field("general.type", "adapter" if field("adapter.type", "") else "model"))
    if kind in _KINDS or field("general.architecture", "") == "clip":
        raise UserError(f"{path} is {_KINDS.get(kind, _KINDS['mmproj'])}")
    if kind != "model":
        raise UserError(f"{path} is of the type {kind!r} and no model; give the file of a model")
    if not has_weights:
        raise UserError(f"{path} has no weights, as a file of a vocabulary alone; give the file of the whole model")


_KINDS = {
    "adapter": "an adapter (LoRA) and no whole model; merge it into its model with llama.cpp (llama-export-lora), and give "
    "the merged file",
    "mmproj": "the part of a model that reads images or sound, without the part for text; give the file of the model",
    "imatrix": "an importance matrix, which a model was quantized with; give the file of the model",
    "vocab": "a vocabulary without weights; give the file of the whole model",
}
"""By `general.type`."""
