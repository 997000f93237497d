"""A folder for what compiling writes besides the bundle: on its disk, because the temporary folder may be in memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from flashmem.bundle.manifest import disk_errors
from flashmem.bundle.version_directories import begin_folder


@contextmanager
def working_folder(beside: Path | None, prefix: str) -> Iterator[Path]:
    """A folder beside the bundle `beside`, or with None a temporary one of this `prefix`; it is removed after the body.

    If the process is killed, the next writer of the bundle removes it. Raises UserError if it cannot be made.
    """
    if beside is None:
        with TemporaryDirectory(prefix=prefix) as name:
            yield Path(name)
        return
    with disk_errors(beside):
        folder, lock = begin_folder(beside)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
