"""Imports of host memory: a GPU reads pages of the process in place.

The extension is cl_arm_import_memory (Khronos' registry, extensions/arm/cl_arm_import_memory.txt, revision 12, "Host process
memory type"). An import maps pages into the device's page tables and never copies. It commits and pins all of them until the
buffer is released. The pages must be mapped in the process, and no other import may have part of a page. Neither host nor
device may write them while the other one reads. It was never run on a device: a probe must pass there before
(`DeviceDescriptor.probed`).

Qualcomm's counterpart, cl_qcom_ext_host_ptr, has no such import. Its layered extensions accept ION or DMA-BUF allocations and
Android's buffers, by their descriptors, but no pages of a file (cl_qcom_ion_host_ptr.txt in the same registry).
"""

from __future__ import annotations

import ctypes

from flashmem.base.errors import RunError
from flashmem.base.pages import SYSTEM_PAGE
from flashmem.runtime.opencl import binding
from flashmem.runtime.opencl.context import Bytes, Context
from flashmem.runtime.opencl.handles import Buffer
from flashmem.runtime.opencl.launching import c_function, functions_of

_IMPORT_TYPE = 0x40B2  # CL_IMPORT_TYPE_ARM
_HOST = 0x40B3  # CL_IMPORT_TYPE_HOST_ARM
_POINTER = ctypes.c_void_p


class HostImports:
    """Creates read-only buffers over pages of the process."""

    def __init__(self, context: Context) -> None:
        """Raises RunError: the driver lacks the function."""
        self._context = context
        flags = ctypes.c_ulonglong
        size = ctypes.c_size_t
        find = functions_of(context.device.handle.platform)
        self._import = c_function(find, "clImportMemoryARM", _POINTER, _POINTER, flags, *[_POINTER] * 2, size, _POINTER)

    def buffer(self, data: Bytes) -> Buffer:
        """A buffer over `data`, which starts on a page and must stay mapped. The buffer has whole pages.

        Raises:
            RunError: `data` starts inside a page, or the driver refuses.
        """
        address = data.__array_interface__["data"][0]
        nbytes = -(-data.nbytes // SYSTEM_PAGE) * SYSTEM_PAGE
        if address % SYSTEM_PAGE:
            raise RunError(f"a slice at address {address:#x} does not start on a page, so a GPU cannot import it")
        error = ctypes.c_int()
        properties = (ctypes.c_ssize_t * 3)(_IMPORT_TYPE, _HOST, 0)
        handle = self._import(
            self._context.handle.int_ptr, int(binding.cl.mem_flags.READ_ONLY), properties, address, nbytes, ctypes.byref(error)
        )
        binding.checked(f"import {nbytes} bytes of the weight file", error.value)
        buffer: Buffer = binding.cl.Buffer.from_int_ptr(handle, retain=False)
        return buffer
