"""Parts of pyopencl that it does not document.

No other module uses them; `tests/repository/test_undocumented.py` checks that they exist.

- `pyopencl._cl`: the compiled module. Its file names the OpenCL library that pyopencl is linked with, and its functions copy
  memory without the checks and the wrapper objects of `enqueue_copy`.
- `Kernel._set_arg_buf`: sets an argument that is a number. `Kernel.set_arg` finds the kind by exceptions, 5 us each.
- `pyopencl.invoker`: writes a Python function for every kernel object, which flashmem never calls.
- `pyopencl._PYOPENCL_NO_CACHE`: whether `pyopencl.invoker` opens a database in the user's cache folder.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flashmem.runtime.opencl.binding import cl as cl


@functools.cache
def library(*, locked: bool = False) -> Any:
    """The OpenCL library that pyopencl is linked with, for ctypes. With `locked`, calls keep the interpreter lock."""
    path: str = cl._cl.__file__
    return ctypes.PyDLL(path) if locked else ctypes.CDLL(path)


def enqueue_write_buffer(queue: Any, buffer: Any, data: Any, offset: int) -> Any:
    """Start a copy of contiguous host memory to byte `offset` of a buffer; its event."""
    return cl._cl._enqueue_write_buffer(queue, buffer, data, offset, is_blocking=False)


def enqueue_read_buffer(queue: Any, buffer: Any, data: Any, offset: int = 0, *, blocking: bool) -> Any:
    """Copy a buffer from byte `offset` on to a contiguous host array, or start to; its event."""
    return cl._cl._enqueue_read_buffer(queue, buffer, data, offset, is_blocking=blocking)


def enqueue_write_image(
    queue: Any, image: Any, origin: tuple[int, int], region: tuple[int, int], data: Any, row_pitch: int
) -> Any:
    """Start a copy of host memory, with rows `row_pitch` bytes apart, to a region of an image; its event."""
    return cl._cl._enqueue_write_image(queue, image, origin, region, data, row_pitch, is_blocking=False)


def set_number(kernel: Any, index: int, number: Any) -> None:
    """Set argument `index` of a kernel to a numpy scalar."""
    kernel._set_arg_buf(index, number)


_INVOKERS = threading.RLock()


@contextmanager
def without_invokers() -> Iterator[None]:
    """Create kernels in the body without Python call functions, which flashmem never uses.

    pyopencl generates and compiles Python code for these. That costs 0.2 ms a kernel object: 0.1 s for a model of 500 launches.
    """
    invoker = _invokers()
    with _INVOKERS:  # two threads would each restore the other's replacement
        generate, thread = invoker.generate_enqueue_and_set_args, threading.get_ident()

        def skip_here(*args: Any, **kwargs: Any) -> Any:
            return (None, None) if threading.get_ident() == thread else generate(*args, **kwargs)

        invoker.generate_enqueue_and_set_args = skip_here
        try:
            yield
        finally:
            invoker.generate_enqueue_and_set_args = generate


def _invokers() -> Any:
    """The module `pyopencl.invoker`. Its import opens a database in the user's cache folder, or fails to."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None  # closing a database that failed to open raises
    try:
        return importlib.import_module("pyopencl.invoker")
    except (OSError, sqlite3.Error):
        cl._PYOPENCL_NO_CACHE = True
    finally:
        sys.unraisablehook = hook
    return importlib.import_module("pyopencl.invoker")
