"""Results of the compilers on disk: a text is compiled once for each GPU and version of Mesa, also after an interruption."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flashmem.base.files import written_whole
from flashmem.base.paths import cache_folder
from flashmem.profiler.phone_compilers.compiling import BUILD_SCRIPT, Compiled, Compiler
from flashmem.profiler.phone_compilers.gpus import Gpu
from flashmem.profiler.phone_compilers.roots import Root


def results_folder() -> Path:
    """The folder for results in the user's cache."""
    return cache_folder("phone-compilers") / "results"


@dataclass(frozen=True)
class StoredResults:
    """Results in `folder`, in files named by a hash of the GPU, the version of Mesa, the options and the text."""

    folder: Path

    def compiled(self, compiler: Compiler, text: str, options: Sequence[str]) -> Compiled:
        """The stored result, or that of `compiler`, which is then stored if the compiler finished.

        Raises:
            UserError: the compiler cannot be started on this machine.
        """
        path = self.folder / f"{_key(compiler.gpu, compiler.root, text, options)}.json.gz"
        found = _read(path)
        if found is not None:
            return found
        made = compiler.compile(text, options)
        if made.device:  # the compiler finished, with code or with an error of the text
            self.folder.mkdir(parents=True, exist_ok=True)
            with written_whole(path) as file:
                file.write(gzip.compress(json.dumps(asdict(made)).encode()))
        return made


def _read(path: Path) -> Compiled | None:
    try:
        return Compiled(**json.loads(gzip.decompress(path.read_bytes())))
    except (OSError, EOFError, ValueError, TypeError):  # absent, or not of this version: it is made again
        return None


def _key(gpu: Gpu, root: Root, text: str, options: Sequence[str]) -> str:
    parts = [gpu.name, gpu.environment, root.mesa, list(options), BUILD_SCRIPT.read_text(encoding="utf-8"), text]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
