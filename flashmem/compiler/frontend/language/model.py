"""A language model as the compiler takes it: an ONNX file, a tokenizer, and the number of tokens that its cache holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx

from flashmem.base.errors import UserError
from flashmem.bundle.language import PROMPT_TOKENS

MAX_LENGTH = 2048
"""Room for so many tokens, unless the model has less or the user asks for another number."""

END_TOKENS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"}
)
"""Control tokens that end an answer; some files name only one of them."""

Rewrite = Callable[[onnx.ModelProto], None]
"""Changes a model in place, after it was read and before its shapes are bound."""


def unchanged(model: onnx.ModelProto) -> None:
    """The rewrite of a model that has its final form."""


@dataclass(frozen=True)
class LanguageModel:
    """A model as an ONNX file, which `rewrite` changes when it is read, and its tokenizer as JSON (`flashmem.bundle.language`).

    `files` are those that it was read from, besides the ONNX file and its data. `key`: a hash of its weights, "" if there is
    none.
    """

    path: Path
    language: bytes
    rewrite: Rewrite = unchanged
    files: tuple[Path, ...] = ()
    key: str = ""


def cache_length(asked: int | None, context: int, path: Path, spare: int = 0) -> int:
    """The tokens that the cache holds: `asked`, or a default. `spare`: further places that the context must have room for.

    Raises:
        UserError: the model at `path`, with that `context`, has no room for `asked`.
    """
    most = context - spare
    if asked is None:
        return min(MAX_LENGTH, most)
    if not PROMPT_TOKENS <= asked <= most:
        less = f" less {spare} places that a batch needs" if spare else ""
        raise UserError(f"max_length {asked} is not between {PROMPT_TOKENS} and {most}, the context of {path}{less}")
    return asked
