"""A language model in a GGUF file or in a folder of safetensors, as an ONNX model with states and its language."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flashmem.base.errors import UserError
from flashmem.bundle.working_folder import working_folder
from flashmem.compiler.frontend.decoder.file import DecoderFile
from flashmem.compiler.frontend.decoder.graph import write_decoder
from flashmem.compiler.frontend.decoder.kinds import decoder_of
from flashmem.compiler.frontend.decoder.placed_data import Read
from flashmem.compiler.frontend.decoder.weights import matrix, sketched
from flashmem.compiler.frontend.gguf.reader import GGUFFile
from flashmem.compiler.frontend.language.model import LanguageModel, cache_length
from flashmem.compiler.frontend.safetensors.reader import SafetensorsFolder


def decoder_file(path: Path) -> DecoderFile:
    """The reader of `path`. Raises UserError if it is damaged, or a library is missing."""
    return SafetensorsFolder(path) if path.is_dir() else GGUFFile(path)


@contextmanager
def converted(
    path: Path, max_length: int | None, read: Read = matrix, batch: int = 1, *, beside: Path | None = None
) -> Iterator[LanguageModel]:
    """The model in the file or folder `path`, as long as the body runs.

    `max_length`: tokens that the cache holds, in each row of the `batch`. `read` makes weights of tensors; `dequantised` makes
    floats of all, for other runtimes. The model is in a folder beside the bundle `beside`, or a temporary one.

    Raises:
        UserError: a library is missing; the file is damaged, of an unknown kind, or has parts that are not supported;
            it has no room for `max_length`; or the disk has none for the model.
    """
    file = decoder_file(path)
    with working_folder(beside, "flashmem-decoder-") as folder:
        target = folder / f"{path.stem}.onnx"
        if read is sketched:
            file.read_little()
        try:
            language = _convert(file, target, max_length, read, batch)
        except (UserError, OSError):
            raise
        except Exception as error:  # for a damaged file, libraries and numpy raise any kind of error
            raise file.damage(error) from error
        yield LanguageModel(target, language, files=file.files, key=file.key())


def _convert(file: DecoderFile, target: Path, max_length: int | None, read: Read, batch: int) -> bytes:
    """Write the decoder, and return the JSON of the language."""
    file.check_is_model()
    language = file.language()
    length = cache_length(max_length, int(file.value("context_length")), file.path)
    decoder = decoder_of(file)
    file.check_settings()
    write_decoder(target, decoder, file, length, read, batch)
    return json.dumps({**language, "max_length": length}).encode()
