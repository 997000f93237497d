"""The temporary folder of a process whose children compile and check kernels."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from flashmem.base.paths import no_temporary_folder, temporary_parent
from flashmem.bundle.version_directories import held
from flashmem.runtime.opencl.pocl import ROOM_BYTES

_LEFT_OVER = 60.0
"""Age in seconds at which a folder without a lock belongs to a killed process."""
_PREFIX = "flashmem-build-"


class WorkFolder:
    """A temporary folder with a lock of this process, which is emptied when it is no longer needed."""

    def __init__(self) -> None:
        """Create the folder, and remove folders of killed processes.

        Raises:
            UserError: no temporary folder can be written.
        """
        try:
            self.name = tempfile.mkdtemp(prefix=_PREFIX, dir=temporary_parent(ROOM_BYTES))
            self._lock = os.open(self.name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise no_temporary_folder(error) from error
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for other in Path(self.name).parent.glob(f"{_PREFIX}*"):
            _remove_left_over(other)

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.name, ignore_errors=True)
        os.close(self._lock)


def _remove_left_over(folder: Path) -> None:
    try:
        status = folder.lstat()
    except OSError:
        return
    if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _LEFT_OVER:
        with held(folder) as mine:
            if mine:
                shutil.rmtree(folder, ignore_errors=True)
