"""GGUF files that are no model of their own: what each is, and what to do with it."""

from __future__ import annotations

from flashmem.base.errors import UserError
from flashmem.compiler.frontend.gguf.kinds import Fields


def check_is_model(file: Fields) -> None:
    """Raise UserError if `file` is an adapter, a projector, or another file beside one."""
    kind = str(file.field("general.type", "adapter" if file.field("adapter.type", "") else "model"))
    if kind in _KINDS or file.field("general.architecture", "") == "clip":
        raise UserError(f"{file.path} is {_KINDS.get(kind, _KINDS['mmproj'])}")
    if kind != "model":
        raise UserError(f"{file.path} is of the type {kind!r} and no model; give the file of a model")
    if not file.tensors:
        raise UserError(f"{file.path} has no weights, as a file of a vocabulary alone; give the file of the whole model")


_KINDS = {
    "adapter": "an adapter (LoRA) and no whole model; merge it into its model with llama.cpp (llama-export-lora), and give "
    "the merged file",
    "mmproj": "the part of a model that reads images or sound, without the part for text; give the file of the model",
    "imatrix": "an importance matrix, which a model was quantized with; give the file of the model",
    "vocab": "a vocabulary without weights; give the file of the whole model",
}
"""By `general.type`."""
