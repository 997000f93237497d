"""Build OpenCL C texts from standard input, and print the driver's properties of their kernels. Runs inside a compiler root.

Only the standard library is available there. A line of input is JSON: `text` and `options`. Its output, with what the compiler
prints, ends with a line `BUILT` and JSON: the device, the kernels, or an error.
"""

import ctypes
import json
import os
import sys
import time
from typing import Any

_DEVICE_NAME = 0x102B
_BUILD_LOG = 0x1183
_KERNEL_NAMES = 0x1168
_KERNEL_NUMBERS = {"work_group": 0x11B0, "local_bytes": 0x11B2, "work_group_multiple": 0x11B3, "private_bytes": 0x11B4}


def _text(function: Any, *arguments: Any) -> str:
    """A string property of an OpenCL object."""
    size = ctypes.c_size_t()
    function(*arguments, ctypes.c_size_t(0), None, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value + 1)
    function(*arguments, size, text, None)
    return text.value.decode(errors="replace")


class Builder:
    """A context of the first OpenCL device, or the error why there is none."""

    def __init__(self) -> None:
        cl = self._cl = ctypes.CDLL("libOpenCL.so.1")
        for name in ("clCreateContext", "clCreateProgramWithSource", "clCreateKernel"):
            getattr(cl, name).restype = ctypes.c_void_p
        platform = ctypes.c_void_p()
        count = ctypes.c_uint()
        error = ctypes.c_int()
        self._device = ctypes.c_void_p()
        self.error = ""
        if cl.clGetPlatformIDs(1, ctypes.byref(platform), ctypes.byref(count)):
            self.error = "no OpenCL platform"
        elif cl.clGetDeviceIDs(platform, ctypes.c_ulong(0xFFFFFFFF), 1, ctypes.byref(self._device), ctypes.byref(count)):
            self.error = "no OpenCL device"
        else:
            self._name = _text(cl.clGetDeviceInfo, self._device, _DEVICE_NAME)
            self._context = ctypes.c_void_p(
                cl.clCreateContext(None, 1, ctypes.byref(self._device), None, None, ctypes.byref(error))
            )

    def build(self, source: bytes, options: list[str]) -> dict[str, Any]:
        """Build `source`, and create its kernels."""
        if self.error:
            return {"error": self.error}
        cl = self._cl
        error = ctypes.c_int()
        text = ctypes.c_char_p(source)
        length = ctypes.c_size_t(len(source))
        program = ctypes.c_void_p(
            cl.clCreateProgramWithSource(self._context, 1, ctypes.byref(text), ctypes.byref(length), ctypes.byref(error))
        )
        start = time.monotonic()
        try:
            if cl.clBuildProgram(program, 1, ctypes.byref(self._device), " ".join(options).encode(), None, None):
                said = _text(cl.clGetProgramBuildInfo, program, self._device, _BUILD_LOG)[-4000:]
                return {"device": self._name, "error": said}
            kernels: dict[str, dict[str, int]] = {}
            for each in _text(cl.clGetProgramInfo, program, _KERNEL_NAMES).split(";"):
                kernel = ctypes.c_void_p(cl.clCreateKernel(program, each.encode(), ctypes.byref(error)))
                if error.value:
                    return {"device": self._name, "error": f"clCreateKernel({each}) returned {error.value}"}
                kernels[each] = self._numbers(kernel)
                cl.clReleaseKernel(kernel)
            return {"device": self._name, "kernels": kernels, "seconds": time.monotonic() - start}
        finally:
            cl.clReleaseProgram(program)

    def _numbers(self, kernel: ctypes.c_void_p) -> dict[str, int]:
        """The driver's properties of a kernel."""
        found = {}
        for word, number in _KERNEL_NUMBERS.items():
            value = ctypes.c_ulong()
            self._cl.clGetKernelWorkGroupInfo(
                kernel, self._device, number, ctypes.c_size_t(ctypes.sizeof(value)), ctypes.byref(value), None
            )
            found[word] = value.value
        return found


if __name__ == "__main__":
    builder = Builder()
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        result = builder.build(asked["text"].encode(), asked["options"])
        ctypes.CDLL(None).fflush(None)
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(1, b"\nBUILT " + json.dumps(result).encode() + b"\n")
