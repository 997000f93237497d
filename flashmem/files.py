"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from flashmem.errors import MissingFileError, UserError
from flashmem.paths import can_be_written


def check_target(path: Path, flag: str) -> None:
    """Raises UserError if `path`, given as `flag`, cannot become a file: better before the work than after it."""
    if not path.parent.is_dir():
        raise MissingFileError(f"{flag} {path}: there is no folder {path.parent}; create it first")
    if not can_be_written(path.parent):
        raise UserError(f"{flag} {path}: the folder {path.parent} cannot be written; name another")
    if path.is_dir():
        raise UserError(f"{flag} {path} is a folder; name a file")
    if path.exists() and not path.is_file():
        raise UserError(f"{flag} {path} is a device or a pipe, which a file would replace; name another file")


@contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which takes the name `path` when all went well and leaves nothing behind when it did not."""
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        Path(partial).chmod(0o666 & ~_umask())  # mkstemp made it private
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
