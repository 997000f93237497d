"""Parts of pyopencl that it does not document.

No other module uses them; `tests/repository/test_undocumented.py` checks that they exist.

- `pyopencl._cl`: the compiled module. Its file names the OpenCL library that pyopencl is linked with, and its functions copy
  memory without the checks and the wrapper objects of `enqueue_copy`. pyopencl keeps the interpreter lock while a driver starts
  and makes a context, 0.1 s each on NVIDIA; the library itself does not need it.
- `Kernel._set_arg_buf`: sets an argument that is a number. `Kernel.set_arg` finds the kind by exceptions, 5 us each.
- `pyopencl.invoker`: writes a Python function for every kernel object, which flashmem never calls.
- `Program._get_prg`: the program of the compiled module inside a `Program`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import sys
import threading
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.runtime.opencl.binding import checked
from flashmem.runtime.opencl.binding import cl as cl
from flashmem.runtime.opencl.handles import Buffer, DeviceHandle, Event, Handle, KernelObject, ProgramHandle, Texture


@functools.cache
def library(*, locked: bool = False) -> Any:
    """The OpenCL library that pyopencl is linked with, for ctypes. With `locked`, calls keep the interpreter lock."""
    path: str = cl._cl.__file__
    return ctypes.PyDLL(path) if locked else ctypes.CDLL(path)


def start_drivers() -> None:
    """Let the OpenCL loader start the drivers; other threads run meanwhile."""
    library().clGetPlatformIDs(ctypes.c_uint(0), None, ctypes.byref(ctypes.c_uint()))


def make_context(device: DeviceHandle) -> Handle:
    """A new context of one device; other threads run meanwhile.

    Raises:
        RunError: the driver refuses.
    """
    create = library().clCreateContext
    code = ctypes.c_int()
    create.restype = ctypes.c_void_p
    devices = (ctypes.c_void_p * 1)(device.int_ptr)
    made = create(None, ctypes.c_uint(1), devices, None, None, ctypes.byref(code))
    checked("create a context", code.value)
    context: Handle = cl.Context.from_int_ptr(made, retain=False)
    return context


def enqueue_write_buffer(queue: Handle, buffer: Buffer, data: NDArray[Any], offset: int) -> Event:
    """Start a copy of contiguous host memory to byte `offset` of a buffer; its event."""
    event: Event = cl._cl._enqueue_write_buffer(queue, buffer, data, offset, is_blocking=False)
    return event


def enqueue_read_buffer(queue: Handle, buffer: Buffer, data: NDArray[Any], offset: int = 0, *, blocking: bool) -> Event:
    """Copy a buffer from byte `offset` on to a contiguous host array, or start to; its event."""
    event: Event = cl._cl._enqueue_read_buffer(queue, buffer, data, offset, is_blocking=blocking)
    return event


def enqueue_write_image(
    queue: Handle, image: Texture, origin: tuple[int, int], region: tuple[int, int], data: NDArray[Any], row_pitch: int
) -> Event:
    """Start a copy of host memory, with rows `row_pitch` bytes apart, to a region of an image; its event."""
    event: Event = cl._cl._enqueue_write_image(queue, image, origin, region, data, row_pitch, is_blocking=False)
    return event


def set_number(kernel: Any, index: int, number: np.generic) -> None:
    """Set argument `index` of a kernel to a numpy scalar."""
    kernel._set_arg_buf(index, number)


_INVOKER = "pyopencl.invoker"
_STANDING_IN = threading.RLock()


def new_kernel(program: ProgramHandle, name: str) -> KernelObject:
    """A kernel object of a program, made without two detours of pyopencl. Raises pyopencl.Error.

    pyopencl generates and compiles a Python function for every kernel object, which flashmem never calls. That costs 0.2 ms:
    0.1 s for a model of 500 launches. The module that does it is not even imported: that takes 30 ms, and opens a database in
    the user's cache folder.

    And it asks whether `Program` has a certain attribute. One that was loaded then looks for a kernel of that name, and what
    goes wrong meanwhile, also a Ctrl-C, is taken for "no". So the kernel is made of the program inside.
    """
    thread = threading.get_ident()
    stands_in = ModuleType(_INVOKER)

    def generate(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            return None, None
        if real is None and sys.modules.get(_INVOKER) is stands_in:
            del sys.modules[_INVOKER]
        module = real or importlib.import_module(_INVOKER)
        return module.generate_enqueue_and_set_args(*args, **kwargs)

    stands_in.__dict__["generate_enqueue_and_set_args"] = generate
    find = getattr(type(program), "_get_prg", None)  # none of the program inside
    inside = program if find is None else find(program)
    with _STANDING_IN:  # two threads would each restore the other's module
        real = sys.modules.get(_INVOKER)
        try:
            sys.modules[_INVOKER] = stands_in
            kernel: KernelObject = cl.Kernel(inside, name)
            return kernel
        finally:
            if real is not None:
                sys.modules[_INVOKER] = real
            elif sys.modules.get(_INVOKER) is stands_in:
                del sys.modules[_INVOKER]
