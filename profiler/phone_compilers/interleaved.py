"""Counts the instructions that an interleaved copy stream adds to each kernel of a phone (transfer mode `interleave`).

    python -m flashmem.profiler.phone_compilers.interleaved adreno750

Compiles every product, convolution and attention that the device's descriptor lists, without and with a copy stream. A step of
the stream is one pass through the main loop, if it copies there, or through the loops around it.
"""

from __future__ import annotations

import argparse
import re

from flashmem.base.streams import exit_codes
from flashmem.profiler.phone_compilers.cases import interleaved_kernels_of, kernels_of
from flashmem.profiler.phone_compilers.gpus import gpu_of
from flashmem.profiler.phone_compilers.pipeline import CodeCounts, CompiledKernel, stream_places
from flashmem.profiler.phone_compilers.report import examine
from flashmem.profiler.phone_compilers.statistics import KernelStatistics
from flashmem.target.descriptor import load_descriptor

_UNITS = re.compile(r"^#define LANE_UNITS (\d+)$", re.MULTILINE)
_UNIT = re.compile(r"^#define LANE_BEGIN .* (\w+) lane_raw0", re.MULTILINE)
_BYTES = {"uint": 4, "uint2": 8, "uint4": 16, "ushort4": 8, "LANE_HALF4": 8}


def step_bytes(text: str) -> int:
    """Bytes that a work-item of an interleaved kernel copies in a step; 0 where it copies after the work."""
    units = _UNITS.search(text)
    unit = _UNIT.search(text)
    return int(units[1]) * _BYTES[unit[1]] if units and unit else 0


def _row(plain: KernelStatistics, interleaved: KernelStatistics, text: str) -> str:
    def of(each: KernelStatistics) -> str:
        return f"{each.main_loop.slots if each.main_loop else 0} / {each.registers} / {each.threads}"

    places = stream_places(text)
    made = CompiledKernel(CodeCounts.of(plain), CodeCounts.of(interleaved), step_bytes(text), *places, drained=0.0, waves=0)
    slots = made.step_slots
    nbytes = made.step_bytes
    step = f"{slots:.0f} | {nbytes} | {16 * slots / nbytes:.0f}" if nbytes else "- | 0 | -"
    return f"| {plain.kernel} | {of(plain)} | {of(interleaved)} | {step} | {interleaved.spills} |"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m flashmem.profiler.phone_compilers.interleaved", description=__doc__)
    parser.add_argument("device", help="the device descriptor of a phone's GPU")
    parser.add_argument("-j", "--jobs", type=int, default=0, help="compilers at a time; as many as processors by default")
    given = parser.parse_args()
    descriptor = load_descriptor(given.device)
    gpu = gpu_of(descriptor.name)
    texts = interleaved_kernels_of(descriptor)
    reports = [examine(each, gpu, given.jobs) for each in (kernels_of(descriptor), texts)]
    plain = {each.kernel: each for each in reports[0].kernels}
    print(f"{gpu.name}, Mesa {reports[0].mesa}\n")
    print(
        "| kernel | main loop, registers, threads | with a copy stream | slots of a step | its bytes | for 16 bytes | spills |"
    )
    print("|---|---|---|---|---|---|---|")
    for each in reports[1].kernels:
        print(_row(plain[each.kernel], each, texts[each.kernel]))
    for name, error in (*reports[0].failures.items(), *reports[1].failures.items()):
        print(f"{name}: {error}")


if __name__ == "__main__":
    with exit_codes():
        main()
