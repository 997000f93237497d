"""Build OpenCL C from standard input, and print the driver's properties of its kernels. Runs inside a compiler root.

Only the standard library is available there. The last line of output is `BUILT` and JSON: the device, the kernels, or an error.
"""

import ctypes
import json
import os
import sys
import time
from typing import Any

_DEVICE_NAME, _BUILD_LOG, _KERNEL_NAMES = 0x102B, 0x1183, 0x1168
_KERNEL_NUMBERS = {"work_group": 0x11B0, "local_bytes": 0x11B2, "work_group_multiple": 0x11B3, "private_bytes": 0x11B4}


def _text(function: Any, *arguments: Any) -> str:
    """A string property of an OpenCL object."""
    size = ctypes.c_size_t()
    function(*arguments, ctypes.c_size_t(0), None, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value + 1)
    function(*arguments, size, text, None)
    return text.value.decode(errors="replace")


def build(source: bytes, options: list[str]) -> dict[str, Any]:
    """Build `source` for the first device, and create its kernels."""
    cl = ctypes.CDLL("libOpenCL.so.1")
    for name in ("clCreateContext", "clCreateProgramWithSource", "clCreateKernel"):
        getattr(cl, name).restype = ctypes.c_void_p
    platform, device, count, error = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_int()
    if cl.clGetPlatformIDs(1, ctypes.byref(platform), ctypes.byref(count)):
        return {"error": "no OpenCL platform"}
    if cl.clGetDeviceIDs(platform, ctypes.c_ulong(0xFFFFFFFF), 1, ctypes.byref(device), ctypes.byref(count)):
        return {"error": "no OpenCL device"}
    name = _text(cl.clGetDeviceInfo, device, _DEVICE_NAME)
    context = ctypes.c_void_p(cl.clCreateContext(None, 1, ctypes.byref(device), None, None, ctypes.byref(error)))
    text, length = ctypes.c_char_p(source), ctypes.c_size_t(len(source))
    program = ctypes.c_void_p(
        cl.clCreateProgramWithSource(context, 1, ctypes.byref(text), ctypes.byref(length), ctypes.byref(error))
    )
    start = time.monotonic()
    if cl.clBuildProgram(program, 1, ctypes.byref(device), " ".join(options).encode(), None, None):
        return {"device": name, "error": _text(cl.clGetProgramBuildInfo, program, device, _BUILD_LOG)[-4000:]}
    kernels: dict[str, dict[str, int]] = {}
    for each in _text(cl.clGetProgramInfo, program, _KERNEL_NAMES).split(";"):
        kernel = ctypes.c_void_p(cl.clCreateKernel(program, each.encode(), ctypes.byref(error)))
        if error.value:
            return {"device": name, "error": f"clCreateKernel({each}) returned {error.value}"}
        kernels[each] = {}
        for word, number in _KERNEL_NUMBERS.items():
            value = ctypes.c_ulong()
            cl.clGetKernelWorkGroupInfo(
                kernel, device, number, ctypes.c_size_t(ctypes.sizeof(value)), ctypes.byref(value), None
            )
            kernels[each][word] = value.value
    return {"device": name, "kernels": kernels, "seconds": time.monotonic() - start}


if __name__ == "__main__":
    result = build(sys.stdin.buffer.read(), sys.argv[1:])
    ctypes.CDLL(None).fflush(None)
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(1, b"\nBUILT " + json.dumps(result).encode() + b"\n")
    sys.exit(1 if "error" in result else 0)
