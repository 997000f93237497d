"""Texts as the inputs of an encoder, by the `tokenizer.json` beside the model. Needs the `inputs` extra (tokenizers)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import UserError
from flashmem.base.extras import need
from flashmem.tools.inputs.description import ModelInput

FIELDS = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
"""Names of inputs, and what of an encoding of the library tokenizers they are."""


def is_text(port: ModelInput) -> bool:
    """Whether an input is one of an encoder of text."""
    return port.name in FIELDS and port.dtype.startswith("int") and len(port.shape) == 2


def read_text(text: str, tokenizer: str | Path, ports: Sequence[ModelInput]) -> tuple[dict[str, NDArray[Any]], int]:
    """The arrays of `ports` for one text, each of shape (1, tokens), and the number of tokens.

    A fixed length is filled with the tokenizer's padding, and cuts a longer text.

    Raises:
        UserError: the file is no tokenizer, a text has no token or does not fit, or the library is missing.
    """
    need("text", "tokenizers")
    from tokenizers import Tokenizer

    try:
        loaded = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the library raises Exception itself
        raise UserError(f"{tokenizer} is not a tokenizer that can be read ({' '.join(str(error).split())[:200]})") from error
    lengths = {port.shape[1] for port in ports if port.shape[1] is not None}
    if len(lengths) > 1:
        found = ", ".join(map(str, sorted(lengths)))
        raise UserError(f"the text inputs have different lengths: {found}; give arrays with --input")
    loaded.no_padding()
    loaded.no_truncation()
    whole = len(loaded.encode(text).ids)
    if lengths:
        (length,) = lengths
        stored = Tokenizer.from_file(str(tokenizer)).padding or {}
        named = (loaded.token_to_id(name) for name in _PADS)
        number = stored.get("pad_id", next((number for number in named if number is not None), 0))
        loaded.enable_truncation(length)
        loaded.enable_padding(length=length, pad_id=number, direction=stored.get("direction", "right"))
    encoded = loaded.encode(text)
    if not encoded.ids:
        raise UserError("the text has no tokens; give words")
    return {port.name: np.array([getattr(encoded, FIELDS[port.name])], port.dtype) for port in ports}, whole


_PADS = ("[PAD]", "<pad>")
