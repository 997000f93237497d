"""Files that are written whole or not at all, and files that are read although somebody else may have put them there."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from flashmem.base.errors import MissingFileError, UserError
from flashmem.base.paths import can_be_written


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


def open_regular(path: Path, *, links: bool = True) -> int:
    """A descriptor of the file `path`, open for reading. Unlike `open` it never waits, for instance for the writer of a pipe.

    Raises:
        OSError: there is none, or it is no regular file; without `links`, it is a link.
    """
    found = path.stat() if links else path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "it is a link", str(path))
    if stat.S_ISREG(found.st_mode):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW))
        if stat.S_ISREG(os.fstat(descriptor).st_mode):  # nobody has put another there meanwhile
            return descriptor
        os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


def read_regular(path: Path, most: int, *, links: bool = True) -> bytes:
    """The content of a regular file of at most `most` bytes. Raises OSError as `open_regular` does, and for a larger one."""
    with os.fdopen(open_regular(path, links=links), "rb") as file:
        if os.fstat(file.fileno()).st_size <= most:
            content = file.read(most + 1)
            if len(content) <= most:
                return content
    raise OSError(errno.EFBIG, f"it is larger than {most} bytes", str(path))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
