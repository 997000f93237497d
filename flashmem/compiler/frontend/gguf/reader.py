"""A GGUF file as an ONNX model with states, and what a generator needs besides: tokenizer and chat template.

ggml's documentation of GGUF describes its fields and tensors.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from flashmem.base.errors import UserError
from flashmem.base.extras import need
from flashmem.base.units import format_size
from flashmem.bundle.language import CONTROL, PATTERNS, RECOMMENDED
from flashmem.bundle.working_folder import working_folder
from flashmem.compiler.frontend.gguf.decoder import write_decoder
from flashmem.compiler.frontend.gguf.keys import check_keys
from flashmem.compiler.frontend.gguf.kinds import decoder_of
from flashmem.compiler.frontend.gguf.other_files import check_is_model
from flashmem.compiler.frontend.gguf.part import no_file
from flashmem.compiler.frontend.gguf.parts import read_parts
from flashmem.compiler.frontend.gguf.placed_data import Read
from flashmem.compiler.frontend.gguf.weights import matrix, sketched
from flashmem.compiler.frontend.language.chat import chat_fields
from flashmem.compiler.frontend.language.model import END_TOKENS, LanguageModel, cache_length

_BEGINNING = ("llama-bpe",)
"""Patterns with which a text begins with a token unless the file says otherwise. Files of Llama 3 from before llama.cpp wrote
the field `add_bos_token` lack it, and llama.cpp reads them so."""
_ENDS = ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Tokens that end an answer besides that of the end of a text."""
_KEY_BYTES = 1 << 12  # of the data of a tensor, at its beginning, middle and end


@contextmanager
def converted(
    path: Path, max_length: int | None, read: Read = matrix, batch: int = 1, *, beside: Path | None = None
) -> Iterator[LanguageModel]:
    """The model in the GGUF file `path`, or in the parts of which it is one, as long as the body runs.

    `max_length`: tokens that the cache holds, in each row of the `batch`.

    `read` makes weights of tensors; `weights.dequantised` makes floats of all, for other runtimes. The model is in a folder
    beside the bundle `beside`, or a temporary one.

    Raises:
        UserError: the package `gguf` is missing; the file is damaged, of an unknown kind, or has parts that are not supported;
            it has no room for `max_length`; or the disk has none for the model.
    """
    need("a GGUF file", "gguf")
    with working_folder(beside, "flashmem-gguf-") as folder:
        target = folder / f"{path.stem}.onnx"
        try:
            file = GGUFFile(path)
            if read is sketched:
                file.read_little()
            language = _convert(file, target, max_length, read, batch)
        except (UserError, OSError):
            raise
        except Exception as error:  # for a damaged file, the package and numpy raise any kind of error
            raise no_file(path, error) from error
        yield LanguageModel(target, language, files=tuple(part.path for part in file.parts), key=file.key())


def _convert(file: GGUFFile, target: Path, max_length: int | None, read: Read, batch: int) -> bytes:
    """Write the decoder, and return the JSON of the language."""
    check_is_model(file)
    language = file.language()
    length = cache_length(max_length, int(file.field(f"{file.field('general.architecture')}.context_length")), file.path)
    decoder = decoder_of(file)
    file.check_keys()
    write_decoder(target, decoder, file, length, read, batch)
    return json.dumps({**language, "max_length": length}).encode()


class GGUFFile:
    """The fields and tensors of a GGUF file, or of its parts. Every method raises UserError for what is missing or unknown."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts = read_parts(path)
        self.fields = self.parts[0].fields
        self.tensors = {tensor.name: tensor for part in self.parts for tensor in part.tensors}
        if len(self.tensors) < sum(len(part.tensors) for part in self.parts):
            raise UserError(f"{path} has two tensors of one name; download or convert it again")
        self.read: set[str] = set()  # names of fields

    def read_little(self) -> None:
        """Read only the pages that are used from now on, and not those behind them, where the system can be asked for that."""
        for part in self.parts:
            part.read_little()

    def field(self, name: str, default: Any = None) -> Any:
        """The value of a field."""
        self.read.add(name)
        if name in self.fields:
            return self.fields[name].contents()
        if default is None:
            raise UserError(f"{self.path} lacks the field {name}; download or convert it again")
        return default

    def has(self, name: str) -> bool:
        """Whether the file has a tensor."""
        return name in self.tensors

    def tensor(self, name: str) -> Any:
        """A tensor of `gguf.GGUFReader`."""
        if name not in self.tensors:
            raise UserError(f"{self.path} lacks the tensor {name}; download or convert it again")
        return self.tensors[name]

    def check_keys(self) -> None:
        """Raise UserError for a field that was not read and may change the answers."""
        unread = [name for name in self.fields if name not in self.read]
        check_keys(unread, lambda name: self.fields[name].contents(), str(self.field("general.architecture")), self.path)

    def check_tensors(self, used: Collection[str]) -> None:
        """Raise UserError for a tensor that is not `used`."""
        unused = [name for name in self.tensors if name not in used]
        if unused:
            raise UserError(
                f"{self.path} has the tensor {unused[0]}, which has no part in a model of the kind "
                f"{self.field('general.architecture')} as this version knows it, so the answers would be wrong without it; use "
                "another model"
            )

    def check_room(self, folder: Path, nbytes: int) -> None:
        """Raise UserError if the disk of `folder` has no room for `nbytes` bytes and, beside them, a bundle of this file."""
        needed = nbytes + sum(int(tensor.n_bytes) for tensor in self.tensors.values())
        if (free := shutil.disk_usage(folder).free) < needed:
            raise UserError(
                f"compiling {self.path} needs {format_size(needed)} in {folder.parent}, where {format_size(free)} are free; "
                "free some space, or name an output on another disk"
            )

    def key(self) -> str:
        """A hash of the tensors: their names, shapes and formats, and a part of the data of each."""
        found = hashlib.sha256()
        for tensor in self.tensors.values():
            found.update(repr((tensor.name, tensor.tensor_type.name, [int(size) for size in tensor.shape])).encode())
            data = tensor.data.reshape(-1).view(np.uint8)
            for at in (0, len(data) // 2, max(0, len(data) - _KEY_BYTES)):
                found.update(data[at : at + _KEY_BYTES].tobytes())
        return found.hexdigest()

    def sampling(self) -> dict[str, float]:
        """How the model's makers recommend to choose tokens."""
        names = {ours: f"general.sampling.{name}" for ours, name in RECOMMENDED.items()}
        found = {ours: self.field(name) for ours, name in names.items() if name in self.fields}
        return {name: int(value) if name == "top_k" else round(float(value), 6) for name, value in found.items()}

    def language(self) -> dict[str, Any]:
        """The tokenizer, the tokens that begin and end a text, and the chat template in pieces (`flashmem.bundle.language`)."""
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
