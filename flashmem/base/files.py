"""Atomic writing of files, and safe reading of files that another user may have replaced."""

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
from flashmem.base.paths import can_be_written, is_foreign


def check_target(path: Path, flag: str) -> None:
    """Raise UserError if `path`, the value of `flag`, cannot become a file. Called before the work whose result it gets."""
    if not path.parent.is_dir():
        raise MissingFileError(f"{flag} {path}: there is no folder {path.parent}; create it first")
    if not can_be_written(path.parent):
        raise UserError(f"{flag} {path}: the folder {path.parent} cannot be written; name another")
    if path.is_dir():
        raise UserError(f"{flag} {path} is a folder; name a file")
    if path.exists() and not path.is_file():
        raise UserError(f"{flag} {path} is a device or a pipe, which a file would replace; name another file")


@contextmanager
def written_whole(path: Path, *, private: bool = False) -> Iterator[IO[bytes]]:
    """A new file that is renamed to `path` when the body succeeds and it is on the disk, and removed when it fails.

    `private`: only the user may read it.
    """
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else the name could outlive a loss of power, and the content not
        if not private:
            Path(partial).chmod(0o666 & ~_umask())  # mkstemp creates files with mode 0600
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def open_regular(path: Path, *, links: bool = True) -> int:
    """Open a regular file for reading; the descriptor. Unlike `open` it never blocks, for instance on a pipe without a writer.

    Raises:
        OSError: the file does not exist or is not a regular file; without `links`, also where it is a symbolic link.
    """
    found = path.stat() if links else path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "it is a link", str(path))
    if stat.S_ISREG(found.st_mode):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW))
        if stat.S_ISREG(os.fstat(descriptor).st_mode):  # not replaced since `stat`
            return descriptor
        os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


def read_regular(path: Path, most: int, *, links: bool = True) -> bytes:
    """Read a regular file of at most `most` bytes. Raises OSError as `open_regular` does, and for a larger file."""
    with os.fdopen(open_regular(path, links=links), "rb") as file:
        if os.fstat(file.fileno()).st_size <= most:
            content = file.read(most + 1)
            if len(content) <= most:
                return content
    raise OSError(errno.EFBIG, f"it is larger than {most} bytes", str(path))


def read_cached(path: Path, most: int) -> bytes:
    """Read a file of a cache folder, of at most `most` bytes.

    Raises:
        OSError: as `read_regular` without links; also where the folder or the file is another user's.
    """
    if is_foreign(path.parent) or is_foreign(path):
        raise PermissionError(errno.EPERM, "another user owns it", str(path))
    return read_regular(path, most, links=False)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
