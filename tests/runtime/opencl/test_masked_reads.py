"""Kernels for a driver that reads where no work-item asks: what becomes of their text, and of the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flashmem.program.kernel_text import kernel_heads
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.opencl.masked_reads import with_masked_reads

READING = [device.descriptor_name for device in list_devices() if device.reads_unasked]

_SCRIPT = """
import sys
import numpy as np
import pyopencl as cl
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.opencl.discovery import list_devices
device = next(device for device in list_devices() if device.reads_unasked)
context = Context(device)
program = context.build(sys.argv[1], [])
x, y = context.buffer(4096), context.buffer(4096)
kernel = program.kernel("total", [x, y, np.int32(1), np.int32(1 << 28)])
queue = context.queue()
cl.enqueue_nd_range_kernel(queue.handle, kernel, (64,), (1,))
queue.finish()
print("ended")
"""

_TEXT = """
__kernel ATTRIBUTES
void total(__global const float* x, __global float* y, int n, int stride)
{
    float sum = 0.0f;
    for (int k = 0; k < n; ++k)
        sum += x[k * stride];
    y[get_global_id(0)] = sum;
}
"""


def test_every_pointer_of_every_kernel_gets_the_offset() -> None:
    text = """
static inline float first(__global const float* p) { return p[0]; }
__kernel void a(__global const float4* restrict x, /* not __global float* z */ __local float* own, int n) { own[0] = n; }
// __kernel void none(__global int* x) {
__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void b(const int n, read_only image2d_t image, __constant int* table,
       __global uchar* out)
{
    out[n] = table[n];
}
__kernel void c(int n) { }
"""
    made = with_masked_reads(text)
    zero = "volatile int fm_private[2] = {0, 0}; const size_t fm_zero = fm_private[get_global_id(0) & 1];"
    assert f"int n) {{ {zero} x += fm_zero; own[0] = n; }}" in made
    assert f"{{ {zero} table += fm_zero; out += fm_zero;\n" in made
    assert made.count("fm_zero;") == 3
    assert "c(int n) { }" in made
    assert [head.name for head in kernel_heads(made)] == ["a", "b", "c"]


@pytest.mark.parametrize("device", READING)
@pytest.mark.parametrize("attributes", ["", "__attribute__((reqd_work_group_size(1, 1, 1)))"], ids=["any", "one"])
def test_a_loop_reads_nothing_after_its_last_turn(attributes: str, device: str) -> None:
    """The loop has one turn; another read would be 1 GiB behind the buffer, where nothing is mapped."""
    words = [sys.executable, "-c", _SCRIPT, _TEXT.replace("ATTRIBUTES", attributes)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
