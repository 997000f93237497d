"""Properties of the code of every kernel config that descriptors list for Adreno and Mali, by their compilers."""

from __future__ import annotations

import pytest

from flashmem.profiler.phone_compilers.cases import CONTRACTIONS, kernels_of, lane_kernels_of
from flashmem.profiler.phone_compilers.gpus import gpu_of
from flashmem.profiler.phone_compilers.report import CompilerReport, examine
from flashmem.target.descriptor import load_descriptor
from tests.support.phone_compilers import need_compilers

EMULATED = 4.0
"""Issue slots for each multiply-add of a contraction or attention. At least as many show an operation emulated in software."""

LEAST_WAVES = 4
"""Waves that an Adreno's core must hold, of 16."""

MOST_COPY_SLOTS = 100
"""Issue slots for each 64 bytes that a kernel without computation copies."""

KNOWN = {
    "adreno750": {"attention-few: stack", "attention-few: slots"},
    "mali-g710": {"attention-few: stack", "attention-few: slots", "attention-many: stack"},
}
"""Rules that kernels break at present. A kernel that is fixed must be removed from the list."""


def _broken(report: CompilerReport) -> set[str]:
    """The rules that kernels break, by name."""
    broken = {f"{name}: does not build" for name in report.failures}
    for each in report.kernels:
        loop = each.main_loop
        multiplies = each.kernel.partition("-")[0] in (*CONTRACTIONS, "attention")
        if loop is not None and loop.stack:
            broken.add(f"{each.kernel}: stack")
        if multiplies and (loop is None or loop.slots_per_mac is None or loop.slots_per_mac >= EMULATED):
            broken.add(f"{each.kernel}: slots")
        if each.kernel.startswith("lane_copy") and (loop is None or 64 * loop.slots > MOST_COPY_SLOTS * loop.load_bytes):
            broken.add(f"{each.kernel}: slots")
        if report.gpu.driver == "freedreno" and each.threads < LEAST_WAVES:
            broken.add(f"{each.kernel}: waves")
    return broken


@pytest.mark.parametrize("device", ["adreno750", "mali-g710"])
def test_code_of_phones(device: str) -> None:
    gpu = gpu_of(device)
    need_compilers(gpu.architecture)
    descriptor = load_descriptor(device)
    kernels = {**kernels_of(descriptor), **lane_kernels_of(descriptor)}
    listed = {f"{family}-{config.name}" for config in descriptor.configs for family in config.families}
    assert listed <= set(kernels)
    report = examine(kernels, gpu)
    assert _broken(report) == KNOWN[device], report.table()
