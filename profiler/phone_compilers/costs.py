"""Writes the counted instructions of a phone's kernels: DEVICE.code.csv, for `flashmem.compiler.selection.counted_code`.

    python -m flashmem.profiler.phone_compilers.costs adreno750 [-o DIR]

Compiles one kernel of each family and config that the device's descriptor lists, by the compiler of a GPU with its core.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from flashmem.base.errors import UserError
from flashmem.base.files import written_whole
from flashmem.base.streams import exit_codes
from flashmem.compiler.configs.listed import configs_of
from flashmem.compiler.kernels.contraction.configs import Contraction, SlicedContraction
from flashmem.compiler.selection.counted_code import CODE, LANE, KernelCode, write_codes
from flashmem.profiler.phone_compilers.cases import kernels_of, lane_kernels_of
from flashmem.profiler.phone_compilers.gpus import gpu_of
from flashmem.profiler.phone_compilers.report import CompilerReport, examine
from flashmem.profiler.phone_compilers.results import StoredResults, results_folder
from flashmem.profiler.phone_compilers.statistics import KernelStatistics
from flashmem.target.descriptor import DeviceDescriptor, load_descriptor

_PACKED = ("matmul", "conv")
_FAMILIES = (*_PACKED, "matmul_dynamic", "depthwise", "attention")
_LANES = (f"{LANE}_buffer", f"{LANE}_float")
"""Copies of the weights of fp32 models."""

_LANE_BYTES = 64
"""Bytes that a work-item of a lane's copy moves at a time."""

_FEW = "attention-few"
"""Attention of one query: few multiply-adds, which need less time than its memory traffic."""

_SPECIAL = ("conv-first", "depthwise-strided")
"""Convolutions that do not stand for others of their family: of an image's three channels; of many taps and few pixels."""

_TEXEL = {False: 16, True: 8}
"""Bytes of a texel of four floats, and of four halves."""


def codes_of(report: CompilerReport, descriptor: DeviceDescriptor) -> list[KernelCode]:
    """The rows of `report`, which has the kernels of `kernels_of` and `lane_kernels_of`. Kernels without products have none.

    Raises:
        UserError: a kernel does not build.
    """
    if report.failures:
        raise UserError(f"{', '.join(report.failures)}: does not build for {report.gpu.name}")
    found = [_lane(each) if each.kernel in _LANES else _code(each, descriptor) for each in report.kernels]
    return [each for each in found if each is not None]


def _lane(each: KernelStatistics) -> KernelCode:
    assert each.main_loop is not None  # its one loop moves _LANE_BYTES at a time
    path = "buffer" if each.kernel.endswith("buffer") else "texture"
    slots = each.main_loop.slots / _LANE_BYTES
    loads = each.main_loop.load_bytes / _LANE_BYTES
    return KernelCode(LANE, 0, 0, 0, path, slots, 0.0, loads, each.registers, each.main_loop.stack, each.threads)


def _code(each: KernelStatistics, descriptor: DeviceDescriptor) -> KernelCode | None:
    family, _, name = each.kernel.partition("-")
    loop = each.main_loop
    if loop is None or not loop.macs or family not in _FAMILIES or each.kernel in (_FEW, *_SPECIAL):
        return None
    config = next((known for known in configs_of(descriptor, family) if known.name == name.removesuffix("-buffer")), None)
    if isinstance(config, SlicedContraction) or name.endswith("-checked"):  # quantised weights have one config for few rows
        return None
    half = config is not None and "half" in config.needs
    rows, columns = (config.rows, config.columns) if isinstance(config, Contraction) else (0, 0)
    path = "buffer" if name.endswith("-buffer") else descriptor.memory_paths[0] if family in _PACKED else ""
    per = loop.slots / loop.macs, loop.textures * _TEXEL[half] / loop.macs, loop.load_bytes / loop.macs
    return KernelCode(family, rows, columns, int(half), path, *per, each.registers, loop.stack, each.threads)


def main() -> None:
    """Write the file, and print its path."""
    parser = argparse.ArgumentParser(prog="python -m flashmem.profiler.phone_compilers.costs", description=__doc__)
    parser.add_argument("device", help="the device descriptor of a phone's GPU")
    parser.add_argument("-o", "--output", type=Path, default=Path("devices"), metavar="DIR", help="the descriptor's folder")
    parser.add_argument("-j", "--jobs", type=int, default=0, help="compilers at a time; as many as processors by default")
    given = parser.parse_args()
    if not given.output.is_dir():
        raise UserError(f"--output {given.output} is not a folder; name one")
    descriptor = replace(load_descriptor(given.device), counted="")  # the file may not exist yet
    gpu = gpu_of(descriptor.name)
    kernels = {**kernels_of(descriptor), **lane_kernels_of(descriptor)}
    report = examine(kernels, gpu, given.jobs, StoredResults(results_folder()))
    path = given.output / f"{descriptor.name}{CODE}"
    comment = f"{gpu.name}, Mesa {report.mesa}. Written by python -m flashmem.profiler.phone_compilers.costs: write it again."
    with written_whole(path) as file:
        file.write(write_codes(codes_of(report, descriptor), comment).encode())
    print(path)


if __name__ == "__main__":
    with exit_codes():
        main()
