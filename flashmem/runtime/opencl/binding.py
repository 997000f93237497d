"""The import of pyopencl, its errors turned into `RunError`, and its compiler warnings turned off."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flashmem.base.errors import NoDeviceError, RunError
from flashmem.base.postponed import postponed

# pytools prints two lines on stderr in each process if an optional compiled package is not installed.
warnings.filterwarnings("ignore", "Unable to import recommended hash")

try:
    with postponed("pyopencl.cltypes"):  # vector types, which flashmem does not use; 60 ms with what they import
        import pyopencl
except ImportError as error:
    raise NoDeviceError(f"pyopencl cannot be loaded ({error}); install an OpenCL loader and pyopencl") from error

cl: Any = pyopencl  # its type stubs lack callable enumerations and numpy scalar types


_HINTS = {
    "MEM_OBJECT_ALLOCATION_FAILURE": "the device is out of memory; free some or lower the budget",
    "OUT_OF_HOST_MEMORY": "the host is out of memory; free some",
    "OUT_OF_RESOURCES": "the device ran out of resources or was lost; try again, with fewer programs on it",
    "DEVICE_NOT_AVAILABLE": "the device was lost; try again",
    "BUILD_PROGRAM_FAILURE": "the driver refuses the kernels; please report this with the message above",
    "INVALID_BUFFER_SIZE": "the buffer is larger than the device allows; compile for this device",
    "INVALID_IMAGE_SIZE": "the texture is larger than the device allows; compile for this device",
    "IMAGE_FORMAT_NOT_SUPPORTED": "the device lacks this texture format; compile with --memory-path buffer",
    "MISALIGNED_SUB_BUFFER_OFFSET": "the bundle was laid out for another device; compile for this one",
    "INVALID_KERNEL_NAME": "the bundle's program and its kernels do not belong together; compile again",
    "INVALID_WORK_GROUP_SIZE": "the device does not take this work-group; compile for this device",
}


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an OpenCL error in the body into a RunError with the failed action, the error's name and a hint."""
    try:
        yield
    except (cl.Error, MemoryError) as error:
        raise run_error(what, error) from error


def run_error(what: str, error: Exception) -> RunError:
    """The RunError for an OpenCL error of pyopencl, or for any exception with an error code as `code`."""
    code = getattr(error, "code", None)
    name = cl.status_code.to_string(code, "code %d") if isinstance(code, int) else type(error).__name__
    return RunError(f"OpenCL failed to {what}: {name} ({_HINTS.get(name, str(error).splitlines()[0])})")


class _RefusedError(Exception):
    """An error code that a C function returned."""

    def __init__(self, code: int) -> None:
        super().__init__("the driver refuses")
        self.code = code


def checked(what: str, code: int) -> None:
    """Raise the RunError for `code`, the result of a function of `library()`, unless it is success."""
    if code:
        raise run_error(what, _RefusedError(code))


class _Quiet:
    """Suppress pyopencl's warnings about compiler output while any thread is inside.

    Warning filters belong to the process: if each thread restored them, one would end what another began.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._before = warnings.catch_warnings()
                self._before.__enter__()
                warnings.simplefilter("ignore", cl.CompilerWarning)

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._before.__exit__(None, None, None)


QUIET = _Quiet()
