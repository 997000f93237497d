"""A GGUF file as a `DecoderFile`. ggml's documentation of GGUF describes its fields and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flashmem.base.errors import UserError
from flashmem.base.extras import need
from flashmem.bundle.language import CONTROL, PATTERNS, RECOMMENDED
from flashmem.compiler.frontend.decoder.file import DecoderFile
from flashmem.compiler.frontend.decoder.weights import FileTensor
from flashmem.compiler.frontend.gguf.keys import check_keys
from flashmem.compiler.frontend.gguf.other_files import check_is_model
from flashmem.compiler.frontend.gguf.part import no_file
from flashmem.compiler.frontend.gguf.parts import read_parts
from flashmem.compiler.frontend.language.chat import chat_fields
from flashmem.compiler.frontend.language.model import END_TOKENS

_BEGINNING = ("llama-bpe",)
"""Patterns with which a text begins with a token unless the file says otherwise. Files of Llama 3 from before llama.cpp wrote
the field `add_bos_token` lack it, and llama.cpp reads them so."""
_ENDS = ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Tokens that end an answer besides that of the end of a text."""


class GGUFFile(DecoderFile):
    """The fields and tensors of a GGUF file, or of its parts."""

    def __init__(self, path: Path) -> None:
        need("a GGUF file", "gguf")
        self.path = path
        self.parts = read_parts(path)
        self.files = tuple(part.path for part in self.parts)
        self.fields: Mapping[str, Any] = self.parts[0].fields
        self.read: set[str] = set()  # names of fields
        try:
            self.tensors = {tensor.name: _stored(tensor) for part in self.parts for tensor in part.tensors}
        except ValueError as error:
            raise self.damage(error) from error
        if len(self.tensors) < sum(len(part.tensors) for part in self.parts):
            raise UserError(f"{path} has two tensors of one name; download or convert it again")

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The architecture."""
        return str(self.field("general.architecture"))

    @property
    def interleaved(self) -> bool:  # type: ignore[override]
        """Whether neighbouring elements rotate: the converter of llama.cpp brings them together for this kind."""
        return self.kind == "llama"

    def read_little(self) -> None:
        """See `DecoderFile`."""
        for part in self.parts:
            part.read_little()

    def damage(self, error: Exception) -> UserError:
        """See `DecoderFile`."""
        return no_file(self.path, error)

    def field(self, name: str, default: Any = None) -> Any:
        """The value of a field."""
        self.read.add(name)
        if name in self.fields:
            return self.fields[name].contents()
        if default is None:
            raise UserError(f"{self.path} lacks the field {name}; download or convert it again")
        return default

    def value(self, name: str, default: Any = None) -> Any:
        """See `DecoderFile`."""
        return self.field(f"{self.kind}.{name}", default)

    def check_is_model(self) -> None:
        """See `DecoderFile`."""
        check_is_model(self.path, self.field, has_weights=bool(self.tensors))

    def check_settings(self) -> None:
        """See `DecoderFile`."""
        unread = [name for name in self.fields if name not in self.read]
        check_keys(unread, lambda name: self.fields[name].contents(), self.kind, self.path)

    def sampling(self) -> dict[str, float]:
        """How the model's makers recommend to choose tokens."""
        names = {ours: f"general.sampling.{name}" for ours, name in RECOMMENDED.items()}
        found = {ours: self.field(name) for ours, name in names.items() if name in self.fields}
        return {name: int(value) if name == "top_k" else round(float(value), 6) for name, value in found.items()}

    def language(self) -> dict[str, Any]:
        """See `DecoderFile`."""
        kind = self.field("tokenizer.ggml.model")
        pattern = self.field("tokenizer.ggml.pre", "gpt-2")
        pieces = kind == "llama"
        if not pieces and (kind != "gpt2" or pattern not in PATTERNS):
            known = ", ".join(PATTERNS)
            raise UserError(
                f"{self.path} has the tokenizer {kind!r} with the pattern {pattern!r}; supported are 'llama', and 'gpt2' with "
                f"the patterns {known}"
            )
        tokens = self.field("tokenizer.ggml.tokens")
        types = [int(each) for each in self.field("tokenizer.ggml.token_type")]
        end = int(self.field("tokenizer.ggml.eos_token_id", 2 if pieces else None))
        ends = [end, *(int(self.field(f"tokenizer.ggml.{name}_token_id", end)) for name in _ENDS)]
        ends += [
            number
            for number, (token, its) in enumerate(zip(tokens, types, strict=True))
            if its == CONTROL and token in END_TOKENS
        ]
        first = int(self.field("tokenizer.ggml.bos_token_id", 1 if pieces else -1))
        begins = self.field("tokenizer.ggml.add_bos_token", first >= 0 and (pieces or pattern in _BEGINNING))
        if begins and not 0 <= first < len(tokens):
            raise UserError(f"{self.path} has texts begin with a token, and does not name one; download or convert it again")
        begin = first if begins else None
        template = self.field("tokenizer.chat_template", "")
        marks = {"bos_token": tokens[first] if first >= 0 else "", "eos_token": tokens[end]}
        return {
            "pattern": None if pieces else pattern,
            "tokens": tokens,
            "types": types,
            "merges": [] if pieces else self.field("tokenizer.ggml.merges"),
            "scores": [float(each) for each in self.field("tokenizer.ggml.scores")] if pieces else [],
            "space_prefix": "always" if pieces and self.field("tokenizer.ggml.add_space_prefix", True) else "never",
            "nfc": False,
            "begin": begin,
            "ends": list(dict.fromkeys(ends)),
            "sampling": self.sampling(),
            **chat_fields(template, marks),
        }


def _stored(tensor: Any) -> FileTensor:
    """A tensor of the package's reader, which has the shape in ggml's order."""
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return FileTensor(tensor.name, tensor.tensor_type.name, shape, tensor.data.reshape(shape[0], -1).view(np.uint8))
