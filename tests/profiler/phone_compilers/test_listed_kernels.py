"""Properties of the code of every kernel family, and of every listed config, by the compilers of Adreno and Mali."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from flashmem.compiler.configs.config import EstimatedDevice
from flashmem.compiler.configs.listed import listed_configs
from flashmem.compiler.configs.workload import Workload
from flashmem.compiler.kernels.contraction.configs import PlainContraction
from flashmem.compiler.selection.configs import candidates, choose
from flashmem.compiler.selection.counted_code import cycles_of
from flashmem.profiler.phone_compilers.cases import (
    CONTRACTIONS,
    family_kernels_of,
    interleaved_kernels_of,
    kernels_of,
    lane_kernels_of,
    template_of,
)
from flashmem.profiler.phone_compilers.costs import codes_of
from flashmem.profiler.phone_compilers.gpus import gpu_of
from flashmem.profiler.phone_compilers.report import CompilerReport, examine
from flashmem.target.descriptor import DeviceDescriptor, load_descriptor
from tests.support.paths import ROOT
from tests.support.phone_compilers import need_compilers

DEVICES = ("adreno750", "mali-g710")

EMULATED = 4.0
"""Issue slots for each multiply-add of a product, a convolution or attention. At least as many show emulated arithmetic."""

LEAST_WAVES = {"attention": 6}
"""Waves that an Adreno's core must hold, of 16, by family; 4 for others."""

MOST_LOCAL = {"freedreno": 12_800, "panfrost": 4096}
"""Bytes of local memory of a group. On Mali it is main memory: only what work-items exchange, not operands."""

MOST_COPY_SLOTS = {"buffer": 100, "float": 100, "half": 180, "uint16": 250, "uint8": 490}
"""Issue slots for each 64 bytes that a kernel without computation copies, by destination. A texel's place costs
the same whatever its size: 64 bytes are 4 texels of floats, 8 of 16-bit elements, 16 of bytes, and each byte is converted."""


INTERLEAVED = "interleaved "
"""The prefix of kernels with a copy stream, which may not spill more registers than without it."""


KNOWN = {
    # Mesa's compiler for Mali aborts on `pow`. A sampled position for each of 4 rows of the tile is too much for 64 registers.
    # So are two pixels of 5 x 5 taps with strides of two: one pixel alone needs 5.75 slots for each multiply-add.
    # One row unpacks a code of 4 bits for each multiply-add, and Mali's kernel has one row at a time.
    "panfrost": {"kit-lrn: does not build", "kit-deform_conv: stack", "depthwise-strided: slots"}
    | {"matmul-few-rows: slots", "matmul-few-rows-checked: slots"}
    # Tiles that use all registers: the ids of a lane are live beside the work.
    | {
        f"{INTERLEAVED}{family}-{config}: spills"
        for family in ("matmul", "conv")
        for config in ("tile", "4x4-half", "tile-buffer")
    }
    | {f"{INTERLEAVED}matmul-{config}: stack" for config in ("tile", "4x4-half", "tile-buffer")},
    # A quotient that is rounded to the nearest takes an emulated fma: one for each row that is written, or each pair of boxes
    # that overlap.
    "freedreno": {"scatter_quantised: emulated", "kit-suppress: emulated", "matmul-few-rows: slots"},
}
"""The rules that kernels break today: one that breaks no longer leaves the list."""


def _broken(report: CompilerReport) -> set[str]:
    """The rules that kernels break, by name."""
    broken = {f"{name}: does not build" for name in report.failures}
    plain = {each.kernel: each for each in report.kernels}
    for each in report.kernels:
        loop = each.main_loop
        family = each.kernel.partition("-")[0]
        multiplies = family in (*CONTRACTIONS, "attention", "depthwise")
        if loop is not None and loop.stack:
            broken.add(f"{each.kernel}: stack")
        if each.emulated:
            broken.add(f"{each.kernel}: emulated")
        if each.kernel.startswith(INTERLEAVED):
            alone = plain[each.kernel.removeprefix(INTERLEAVED)]
            if each.spills > alone.spills:
                broken.add(f"{each.kernel}: spills")
            if loop is not None and alone.main_loop is not None and loop.branches > alone.main_loop.branches:
                broken.add(f"{each.kernel}: branches")
            continue
        if multiplies and (loop is None or loop.slots_per_mac is None or loop.slots_per_mac >= EMULATED):
            broken.add(f"{each.kernel}: slots")
        copied = MOST_COPY_SLOTS.get(each.kernel.removeprefix("lane_copy_"))
        if copied and (loop is None or 64 * loop.slots > copied * loop.load_bytes):
            broken.add(f"{each.kernel}: slots")
        if report.gpu.driver == "freedreno" and each.threads < LEAST_WAVES.get(family, 4):
            broken.add(f"{each.kernel}: waves")
        if each.local_bytes > MOST_LOCAL[report.gpu.driver]:
            broken.add(f"{each.kernel}: local memory")
    return broken


WORKLOADS = [
    Workload(*case, storage=storage, taps=9 if case[0] == "conv" else 1)
    for storage in ("float32", "float16")
    for case in (
        ("matmul", "texture", 512, 768, 3072),
        ("conv", "texture", 3136, 576, 256),
        ("matmul_dynamic", "buffer", 512, 64, 512),
    )
]
"""Products large enough that every config fills both GPUs."""


def _check_choice(descriptor: DeviceDescriptor, workload: Workload, report: CompilerReport) -> None:
    """Require that the chosen config neither spills nor is slower than another of the list, by the code in `report`.

    The least time is that of the busiest pipeline, over the threads that registers leave if too few hide latency.
    """
    kernels = {each.kernel: each for each in report.kernels}
    pipelines, device = load_descriptor(descriptor.name).pipelines, EstimatedDevice.of(descriptor)
    assert pipelines is not None and device.registers is not None
    cost = {}
    for code in codes_of(report, descriptor):
        for config in candidates(descriptor, workload):
            assert isinstance(config, PlainContraction)
            same = (code.family, code.rows, code.columns, code.half > 0) == (
                workload.family, config.rows, config.columns, config.half > 0,
            )  # fmt: skip
            if same and code.memory_path in ("", workload.path):
                threads = device.registers.share(code.registers) * math.sqrt(config.rows * config.columns)
                cost[config] = max(cycles_of(code, pipelines).values()) / min(1.0, threads)
    chosen = choose(descriptor, workload)
    assert cost[chosen] <= 1.01 * min(cost.values()), (chosen, cost)
    loop = kernels[f"{workload.family}-{chosen.name}"].main_loop
    assert loop is not None and loop.stack == 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_kernel_of_each_family_and_config(device: str) -> None:
    descriptor = load_descriptor(device)
    kernels = {**kernels_of(descriptor), **family_kernels_of(descriptor)}
    listed = {f"{family}-{config.name}" for config in listed_configs(descriptor) for family in config.families}
    assert listed <= set(kernels)
    files = (ROOT / "kernels/templates").rglob("*.cl.j2")
    templates = {path.name.partition(".")[0] for path in files if "__kernel" in path.read_text(encoding="utf-8")}
    others = {"best_of_chunks", "candidates_by_heap", "winograd"}  # of CPUs
    others |= {"block_rows"}  # of GGUF files, which the kit's models are not
    others |= {"split_keys", "join_chunks", "tensor_attention", "mask_blocks", "join_sums"}  # of NVIDIA
    assert {template_of(text) for text in kernels.values()} == templates - {"lane_copy"} - others


@pytest.mark.parametrize("device", [DEVICES[0], pytest.param(DEVICES[1], marks=pytest.mark.thorough)])  # the faster compiler
def test_code_of_every_family(device: str) -> None:
    gpu = gpu_of(device)
    need_compilers(gpu.architecture)
    descriptor = load_descriptor(device)
    kernels = {**lane_kernels_of(descriptor), **family_kernels_of(descriptor)}
    report = examine(kernels, gpu)
    assert _broken(report) == {rule for rule in KNOWN[gpu.driver] if rule.partition(": ")[0] in kernels}, report.table()


@pytest.mark.thorough
@pytest.mark.parametrize("device", DEVICES)
def test_code_of_every_config(device: str) -> None:
    gpu = gpu_of(device)
    need_compilers(gpu.architecture)
    descriptor = load_descriptor(device)
    interleaved = interleaved_kernels_of(descriptor)
    kernels = {**kernels_of(descriptor), **lane_kernels_of(descriptor)}
    kernels |= {f"{INTERLEAVED}{name}": text for name, text in interleaved.items()}
    assert {f"lane_copy_{kind}" for kind in MOST_COPY_SLOTS} <= set(kernels)
    report = examine({**kernels, **family_kernels_of(descriptor)}, gpu)
    assert _broken(report) == KNOWN[gpu.driver], report.table()
    report = replace(report, kernels=tuple(each for each in report.kernels if each.kernel in kernels), failures={})
    for about in (
        descriptor,
        replace(descriptor, pipelines=None, capacity_model="", counted=""),
    ):  # by counted code, and without it
        for workload in WORKLOADS:
            _check_choice(about, workload, report)
