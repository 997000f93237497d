"""A call of `flashmem.compile`, resolved: the model, and the options of each shape variant.

It has the name of its bundle in the cache, so that a command or a session finds a compiled model without importing the
compiler.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flashmem.base.errors import MissingFileError, UserError
from flashmem.base.foreign_models import check_format, has_safetensors
from flashmem.base.version import __version__
from flashmem.bundle import cache
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.language import BATCH_TOKENS, CHECKED_TOKENS, IDS, MOST_ROWS, PROMPT_TOKENS, is_language_folder
from flashmem.bundle.working_folder import working_folder
from flashmem.compiler.options import Options, RefusedKernel
from flashmem.compiler.selection.tuning_database import content_hash
from flashmem.options import resolve
from flashmem.request.request import BundleRequest
from flashmem.schedule.objectives import AUTO, STEADY

if TYPE_CHECKING:
    import onnx

ModelKind = Literal["onnx", "gguf", "safetensors", "folder"]
"""An ONNX file, a GGUF file, or a folder with a language model, in safetensors or in ONNX."""

STORED: frozenset[ModelKind] = frozenset({"gguf", "safetensors"})
"""Kinds of which the decoder is written as ONNX, and weights keep the types that they have."""

DATA_FILES = "data_files"
"""The key in a bundle's metadata for the states of the model's other files, as `states_of` gives them."""


@dataclass(frozen=True)
class Compilation:
    """What to compile: a model for each of the `variants` of one request. `content`: the bytes of a model that is in no file;
    `model` is then a name for it.
    """

    model: Path
    variants: tuple[Options, ...]
    content: bytes | None = field(default=None, repr=False)

    @property
    def request(self) -> BundleRequest:
        """The resolved request; it is the same for all variants."""
        return self.variants[0].request

    def refusing(self, refused: Mapping[str, RefusedKernel]) -> Compilation:
        """The same without these kernels, where others are in their place."""
        return replace(self, variants=tuple(replace(each, refused=refused) for each in self.variants))

    @property
    def kind(self) -> ModelKind:
        """The kind of the model, by its name."""
        return kind_of(self.model)

    @property
    def is_language(self) -> bool:
        """Whether the model has a tokenizer."""
        return self.kind != "onnx"

    @property
    def name(self) -> str:
        """The name of its bundle in the cache: with a hash of all options, and of the model's path, size and time, or bytes."""
        descriptor = self.variants[0].descriptor
        model = states_of([self.model]) if self.content is None else hashlib.sha256(self.content).hexdigest()
        shapes = [each.shapes for each in self.variants]
        content = [__version__, model, self.request.values(), shapes, asdict(descriptor), content_hash(descriptor)]
        key = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
        return f"{self.model.stem}-{key[:16]}"

    def describes(self, bundle: Bundle) -> bool:
        """Whether the model's other files are what they were when `bundle`, of this name, was compiled."""
        known: Any = bundle.common.get(DATA_FILES, [])
        try:
            return [*known] == states_of(Path(path) for path, *_ in known)
        except (OSError, TypeError, ValueError):
            return False

    def find(self) -> Bundle | None:
        """Its bundle in the cache."""
        return cache.find(self.name, self.describes)

    @contextmanager
    def in_a_file(self, beside: Path | None = None) -> Iterator[Compilation]:
        """The same with the model in a file: if it is in none, one beside the bundle `beside` or a temporary one, as long as
        the body runs.

        A UserError of the body then does not name that file.
        """
        if self.content is None:
            yield self
            return
        with working_folder(beside, "flashmem-model-") as folder:
            path = folder / self.model.name
            path.write_bytes(self.content)
            try:
                yield replace(self, model=path, content=None)
            except UserError as error:
                hint = "; give the path of its file" if isinstance(error, MissingFileError) else ""
                error.args = (str(error).replace(str(path), "the given model") + hint, *error.args[1:])
                raise


def read_compilation(model: str | Path | bytes | onnx.ModelProto, request: BundleRequest) -> Compilation:
    """Resolve a request for `model`, whose kind determines some of it.

    Raises:
        UserError: no such model, or an option must change.
    """
    content = None if isinstance(model, str | Path) else _bytes_of(model)
    model = Path(_UNNAMED) if content is not None else Path(model)  # type: ignore[arg-type]
    if content is None:
        check_format(model)
    if content is None and not model.is_file() and not is_language_folder(model):
        what = "is a folder without a language model" if model.is_dir() else "does not exist"
        raise MissingFileError(f"model {model} {what}; name an .onnx or .gguf file, or a folder of a language model")
    request = _of_network(model, request) if kind_of(model) == "onnx" else _of_language_model(model, request)
    if request.state_precision is not None and request.states is None:
        raise UserError("--state-precision is for states, and none is named; name them with --state")
    if request.states is not None and request.objective == AUTO:
        request = request.replace(objective=STEADY.name)  # a model is run many times for one answer
    first = resolve(request)
    return Compilation(model, tuple(replace(first, shapes=each) for each in request.shapes), content)


def _of_network(model: Path, request: BundleRequest) -> BundleRequest:
    """`request` for an ONNX file. Raises UserError for options of language models."""
    if request.batch != 1:
        raise UserError(f"--batch is for a GGUF file or a folder of a language model, which {model} is not; leave it out")
    if request.max_length is not None:
        raise UserError(
            f"--max-length is for a GGUF file or a folder of a language model, which {model} is not; give the sizes of its "
            "inputs with --shape"
        )
    return request


def _of_language_model(model: Path, request: BundleRequest) -> BundleRequest:
    """`request` with the shapes and states of a language model. Raises UserError for others."""
    rows = request.batch
    if not 1 <= rows <= MOST_ROWS:
        raise UserError(f"--batch {rows} is not possible; give a number from 1 to {MOST_ROWS}")
    if any(request.shapes) or request.states is not None or request.constants:
        raise UserError(f"the shapes, states and inputs of {model} are known; leave out --shape, --state and --constant")
    if request.quantize is not None and kind_of(model) in STORED:
        raise UserError(f"the weights of {model} keep the types that they have there; leave out --quantize")
    counts = (1, CHECKED_TOKENS, PROMPT_TOKENS) if rows == 1 else (1, BATCH_TOKENS)
    return request.replace(
        shapes=[{IDS: (rows, count)} for count in counts],
        states="auto",
        state_precision=request.state_precision or "fp16",
    )


def states_of(paths: Iterable[Path]) -> list[list[str | int]]:
    """The path, size and time of each file, by which a changed one is known. Raises OSError."""
    files = [path.resolve() for path in paths]
    return [[str(file), (found := file.stat()).st_size, found.st_mtime_ns] for file in files]


def kind_of(model: Path) -> ModelKind:
    """The kind of a model, by its name and, for a folder, by the files in it."""
    if model.is_dir():
        return "safetensors" if has_safetensors(model) else "folder"
    return "gguf" if model.suffix == ".gguf" else "onnx"


_UNNAMED = "model.onnx"
"""The name of a model that is in no file."""


def _bytes_of(model: object) -> bytes:
    """The bytes of an ONNX file, given as such or as an `onnx.ModelProto`. Raises UserError for anything else."""
    if isinstance(model, bytes | bytearray | memoryview):
        content = bytes(model)
        if content.startswith(b"GGUF"):
            raise UserError("the given bytes are a GGUF file; give the path of the file")
        return content
    if type(model).__name__ != "ModelProto" or not hasattr(model, "SerializeToString"):
        raise UserError(f"a model is the path of a file, bytes or an onnx.ModelProto, not {type(model).__name__}")
    try:
        serialized: bytes = model.SerializeToString(deterministic=True)
    except Exception as error:  # protobuf's limit of 2 GB, by errors of its own
        raise UserError(f"the given model cannot be written as one ONNX file ({error}); save it, and give its path") from None
    return serialized
