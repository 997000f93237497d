"""Device memory as coarse-grained shared virtual memory (OpenCL 3.0, section 5.6), whose parts are addresses.

NVIDIA's driver tracks sub-buffers: a launch takes it up to 120 us more when another sub-buffer of the same bytes was used
before, and tensors share an arena. Addresses it does not track. But an allocation takes 0.35 ms a MB, and as much memory of the
host as of the device, so that this is for small ones (docs/research/opencl-notes.md). The host never maps such memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from flashmem.runtime.opencl import undocumented
from flashmem.runtime.opencl.binding import checked
from flashmem.runtime.opencl.handles import Handle

MOST_BYTES = 64 << 20
"""The largest allocation. Kernels on more memory take so long that their launches matter less."""

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_size_t
_READ_WRITE = ctypes.c_ulonglong(1)  # CL_MEM_READ_WRITE
_NOT_BLOCKING, _BLOCKING, _DEFAULT_ALIGNMENT = (ctypes.c_uint(n) for n in (0, 1, 0))


class SharedMemory:
    """A range of addresses: an allocation, or a part of one. `int_ptr` is the first address."""

    __slots__ = ("_free", "int_ptr", "nbytes")

    def __init__(self, address: int, nbytes: int, free: Callable[[], None] | None) -> None:
        """`free` frees the allocation; None for a part."""
        self.int_ptr = address
        self.nbytes = nbytes
        self._free = free

    def get_sub_region(self, offset: int, nbytes: int) -> SharedMemory:
        """`nbytes` bytes from byte `offset` on; valid until the allocation is released."""
        assert offset >= 0 and offset + nbytes <= self.nbytes
        return SharedMemory(self.int_ptr + offset, nbytes, None)

    def release(self) -> None:
        """Free an allocation, which no command uses any longer."""
        if self._free is not None:
            self._free()
            self._free = None


def allocate(context: Handle, nbytes: int, finish: Callable[[], None]) -> SharedMemory:
    """Allocate memory of a context. `finish` waits for all commands that may use it: the driver does not (clSVMFree).

    Raises:
        RunError: the device refuses.
    """
    library = undocumented.library()
    handle = _POINTER(context.int_ptr)
    make = library.clSVMAlloc
    make.restype = _POINTER
    address = make(handle, _READ_WRITE, _SIZE(nbytes), _DEFAULT_ALIGNMENT)
    if not address:
        checked(f"allocate {nbytes} bytes of shared virtual memory", _ALLOCATION_FAILURE)

    def free() -> None:
        finish()
        library.clSVMFree(handle, _POINTER(address))

    return SharedMemory(address, nbytes, free)


_ALLOCATION_FAILURE = -4  # CL_MEM_OBJECT_ALLOCATION_FAILURE; clSVMAlloc returns no code


def set_argument(kernel: Handle, index: int, memory: SharedMemory) -> None:
    """Set argument `index` of a kernel to an address. Raises RunError."""
    library = undocumented.library()
    failed = library.clSetKernelArgSVMPointer(_POINTER(kernel.int_ptr), ctypes.c_uint(index), _POINTER(memory.int_ptr))
    checked("set the argument of a kernel", failed)


_NO_EVENTS = (ctypes.c_uint(0), None)


def enqueue_copy(queue: int, target: int, source: int, nbytes: int, event: Any = None, *, blocking: bool = False) -> int:
    """Copy bytes between two addresses, of which at least one is of the device's memory; the error code. Other threads run
    meanwhile.

    `event`: a reference to a cl_event to set, or None.
    """
    code: int = undocumented.library().clEnqueueSVMMemcpy(
        _POINTER(queue), _BLOCKING if blocking else _NOT_BLOCKING, _POINTER(target), _POINTER(source), _SIZE(nbytes),
        *_NO_EVENTS, event,
    )  # fmt: skip
    return code


def address_of(data: Any) -> int:
    """The address of a contiguous array. Loads ask for it, and numpy's own ways take three times as long."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(data))
    except (TypeError, ValueError):  # read-only, or without elements
        address: int = data.__array_interface__["data"][0]
        return address
