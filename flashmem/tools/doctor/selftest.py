"""Self test of a device in two seconds: checks the features that flashmem requires, and measures approximate rates.

`python -m flashmem.tools.doctor.selftest NUMBER FOLDER` tests one device in its own process, which a driver may end. It prints
a line of JSON after each test. Rates are approximate: `flashmem profile` measures them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from flashmem.base.child_processes import ending_in_a_sentence, module_environment, python_module
from flashmem.base.errors import RunError
from flashmem.base.paths import make_private, why_unusable

if TYPE_CHECKING:
    from flashmem.runtime.opencl.context import Queue

_WIDTH = 64  # texels
_ROWS = 48  # no multiple of 64 rows
_TEXEL = 16
_COPY_BYTES = 32 << 20
_DISK_BYTES = 64 << 20
_BUSY_SECONDS = 0.1
_LONGEST = 60.0

_SUMS = """
__constant sampler_t nearest = CLK_NORMALIZED_COORDS_FALSE | CLK_ADDRESS_CLAMP_TO_EDGE | CLK_FILTER_NEAREST;
__kernel void sum_rows(__read_only image2d_t texels, __global float* sums, int width) {
    int y = get_global_id(0);
    float4 sum = (float4)(0.0f);
    for (int x = 0; x < width; ++x) sum += read_imagef(texels, nearest, (int2)(x, y));
    sums[y] = sum.x + sum.y + sum.z + sum.w;
}
"""
_BUSY = """
__kernel void busy(__global float* numbers, int steps) {
    int i = get_global_id(0);
    float x = numbers[i];
    for (int step = 0; step < steps; ++step) x = x * 0.999f + 0.001f;
    numbers[i] = x;
}
"""


@dataclass(frozen=True)
class SelfTestResult:
    """The result of one test. `ok` is None if the device does not support the feature. `rate` is bytes per second, if
    measured.
    """

    test: str
    ok: bool | None
    said: str
    rate: float | None = None


def run_apart(number: int, folder: Path) -> list[SelfTestResult]:
    """Run the tests of device `number` in the list of devices, in a new process; it creates files in `folder`."""
    command = python_module("flashmem.tools.doctor.selftest", str(number), str(folder))
    try:
        done = subprocess.run(command, env=module_environment(), capture_output=True, text=True, timeout=_LONGEST, check=False)
        out = done.stdout
        ended = "" if done.returncode == 0 else _describe_end(done.returncode, done.stderr)
    except subprocess.TimeoutExpired as error:
        out = (error.stdout or b"").decode(errors="replace")
        ended = f"it did not end within {_LONGEST:.0f} s"
    found = []
    for line in out.splitlines():
        with suppress(ValueError, TypeError):  # a driver may print to the same stream
            found.append(SelfTestResult(**json.loads(line)))
    return [*found, SelfTestResult("the self test", False, f"{ended}, after {len(found)} tests")] if ended else found


def _describe_end(code: int, errors: str) -> str:
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), "")
    return f"the driver ended the process with signal {-code}" if code < 0 else f"the process ended with code {code}: {last}"


def tests(number: int, folder: Path) -> Iterator[SelfTestResult]:
    """Run the tests of one device in sequence."""
    from flashmem.runtime.opencl.context import Context
    from flashmem.runtime.opencl.discovery import device_at

    device = device_at(number)
    context = Context(device)

    def guarded(name: str, test: Callable[[], SelfTestResult]) -> SelfTestResult:
        try:
            return test()
        except RunError as error:
            return SelfTestResult(name, False, str(error))

    def build() -> SelfTestResult:
        begun = perf_counter()
        program = context.build(_BUSY, [])
        program.check("busy")
        seconds = perf_counter() - begun
        size = len(program.binary())
        return SelfTestResult("build a kernel", True, f"{1e3 * seconds:.0f} ms, a binary of {size} bytes")

    content = np.arange(_ROWS * _WIDTH * 4, dtype=np.float32).reshape(_ROWS, _WIDTH * 4) % 251
    wanted = content.sum(1, dtype=np.float32)

    def summed(image: object, queue: Queue) -> bool:
        """Whether a kernel reads what `queue` wrote. A kernel on another queue would have to wait for an event of this one."""
        sums = context.buffer(4 * _ROWS)
        kernel = context.build(_SUMS, []).kernel("sum_rows", [image, sums, np.int32(_WIDTH)])
        queue.launch(queue.prepare(kernel, (_ROWS,), (1,)))
        found = np.empty(_ROWS, np.float32)
        queue.read(found, sums)
        return bool(np.array_equal(found, wanted))

    def images() -> SelfTestResult:
        if not device.has_images:
            return SelfTestResult("textures", None, "the device has none")
        image = context.image(_WIDTH, _ROWS, "float")
        data = content.view(np.uint8).reshape(-1)
        queue = context.queue()
        queue.write_image(image, data, first_row=0, width=_WIDTH, rows=_ROWS, row_pitch=_WIDTH * _TEXEL)
        right = summed(image, queue)
        said = f"up to {device.image_max_width} x {device.image_max_height} texels"
        return SelfTestResult("textures", right, said if right else "a kernel does not read the written numbers")

    def views() -> SelfTestResult:
        if not device.has_image_from_buffer:
            return SelfTestResult("textures over buffers", None, "the driver does not offer cl_khr_image2d_from_buffer")
        pitch = -(-_WIDTH // device.image_pitch_alignment) * device.image_pitch_alignment * _TEXEL
        padded = np.zeros((_ROWS, pitch), np.uint8)
        padded[:, : _WIDTH * _TEXEL] = content.view(np.uint8)
        start = 4096  # not at the start of the pool, like most slices
        pool = context.buffer(start + padded.nbytes, host_visible=True)
        queue = context.queue()
        queue.write(pool, padded, offset=start)
        part = context.sub_buffer(pool, start, padded.nbytes)
        right = summed(context.image_view(part, _WIDTH, _ROWS, pitch, "float"), queue)
        said = f"rows at multiples of {device.image_pitch_alignment} texels"
        return SelfTestResult("textures over buffers", right, said if right else "a kernel does not read the written numbers")

    def mapped() -> SelfTestResult:
        queue = context.queue()
        pool = context.buffer(1 << 16, host_visible=True)
        view = queue.map(pool, 1 << 16, invalidate=True)
        view[:] = 7
        queue.unmap(view)
        found = np.zeros(1 << 16, np.uint8)
        queue.read(found, pool)
        right = bool((found == 7).all())
        return SelfTestResult(
            "mapped buffers", right, "what the host writes is there" if right else "what the host wrote is not there"
        )

    def copies() -> SelfTestResult:
        queue = context.queue()
        other = context.queue()
        data = np.ones(_COPY_BYTES, np.uint8)
        target = context.buffer(_COPY_BYTES)
        other.write(target, data)
        rate = _COPY_BYTES / min(_seconds(lambda: other.write(target, data)) for _ in range(3))
        numbers = context.buffer(4 << 14)
        program = context.build(_BUSY, [])
        steps = 1000
        kernel = program.kernel("busy", [numbers, np.int32(steps)])

        def work() -> None:
            queue.launch(queue.prepare(kernel, (1 << 14,), (64,)))
            queue.finish()

        work()
        steps = min(1 << 24, max(1000, round(steps * _BUSY_SECONDS / max(_seconds(work), 1e-5))))
        kernel = program.kernel("busy", [numbers, np.int32(steps)])
        work()
        alone = min(_seconds(work) for _ in range(2))
        count = max(1, round(alone * rate / _COPY_BYTES))

        def both() -> None:
            queue.launch(queue.prepare(kernel, (1 << 14,), (64,)))
            queue.flush()
            for _ in range(count):
                other.write(target, data)
            queue.finish()

        copying = count * _COPY_BYTES / rate
        hidden = (alone + copying - min(_seconds(both) for _ in range(2))) / min(alone, copying)
        said = f"{rate / 1e9:.1f} GB/s; {100 * min(1.0, max(0.0, hidden)):.0f} % of a copy passes during a kernel"
        return SelfTestResult("copies during kernels", True, said, rate)

    yield guarded("build a kernel", build)
    yield guarded("textures", images)
    yield guarded("textures over buffers", views)
    yield guarded("mapped buffers", mapped)
    yield guarded("copies during kernels", copies)


def disk(folder: Path) -> SelfTestResult:
    """Measure the read rate of the disk under `folder`: cold, if the system drops the file's pages, and from the page cache."""
    if (reason := why_unusable(folder)) is not None:
        return SelfTestResult("disk", False, f"{folder} {reason}")
    block = np.random.default_rng(0).integers(0, 256, 4 << 20, np.uint8)
    try:
        make_private(folder)
        with tempfile.NamedTemporaryFile(prefix="flashmem-doctor-", dir=folder) as file:
            for _ in range(_DISK_BYTES // block.nbytes):
                file.write(block.data)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            cold, cached = (_DISK_BYTES / _seconds(lambda: _read(file.fileno(), block)) for _ in range(2))
    except OSError as error:
        return SelfTestResult("disk", False, f"{folder}: {error.strerror}")
    return SelfTestResult(
        "disk", True, f"{folder}: {cold / 1e9:.2f} GB/s cold, {cached / 1e9:.1f} GB/s from the page cache", cold
    )


def _read(descriptor: int, block: np.ndarray) -> None:
    for offset in range(0, _DISK_BYTES, block.nbytes):
        os.preadv(descriptor, [block.data], offset)


def _seconds(work: Callable[[], None]) -> float:
    begun = perf_counter()
    work()
    return perf_counter() - begun


def main() -> None:
    """Test one device and print a line for each test."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a driver's output must not mix with the results
    with ending_in_a_sentence():
        for result in tests(int(sys.argv[1]), Path(sys.argv[2])):
            answers.write(json.dumps(asdict(result)) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
