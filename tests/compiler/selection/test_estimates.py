"""Estimates of kernel configs on phones: they charge registers, and use the code that the GPU's compiler counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashmem.base.resources import names
from flashmem.compiler.configs.config import EstimatedDevice
from flashmem.compiler.configs.listed import configs_of, listed_configs, with_configs
from flashmem.compiler.configs.workload import Workload
from flashmem.compiler.kernels.attention.configs import SharedWeightsConfig
from flashmem.compiler.kernels.contraction.configs import CONTRACTIONS, PlainContraction
from flashmem.compiler.selection.configs import choose, estimates
from flashmem.compiler.selection.counted_code import CODE, KernelCode, load_codes
from flashmem.target.descriptor import DeviceDescriptor, load_descriptor
from flashmem.target.registers import RegisterFile

COUNTED = names("devices", CODE)
WORKLOADS = [
    Workload("matmul", "texture", 128, 768, 3072),
    Workload("matmul", "texture", 3136, 64, 256),
    Workload("conv", "texture", 784, 1152, 128, taps=9),
    Workload("matmul_dynamic", "buffer", 197, 64, 197, 12),
]


def contractions(device: str) -> list[tuple[KernelCode, PlainContraction]]:
    """The counted kernels of contractions, each with the config of its tile."""
    return [
        (code, PlainContraction("c", code.rows, code.columns, 4, half=16 * code.half))
        for code in load_codes(device)
        if code.family in CONTRACTIONS
    ]


def uncounted(device: str) -> DeviceDescriptor:
    """The device without counted code."""
    return replace(load_descriptor(device), pipelines=None, counted="")


@pytest.mark.parametrize("device", COUNTED)
def test_threads_by_registers_are_those_that_the_compiler_reports(device: str) -> None:
    registers = load_descriptor(device).registers
    assert registers is not None
    most = 8 if "adreno" in device else 2
    for code, _ in contractions(device):
        assert registers.share(code.registers) == min(code.threads, most) / most, code
        assert (code.registers > registers.most) == (code.spills > 0)


@pytest.mark.parametrize("device", COUNTED)
def test_estimated_code_is_near_counted_code(device: str) -> None:
    """Slots of sums in float within a quarter, and spilling as the compiler reports."""
    estimated = EstimatedDevice.of(uncounted(device))
    for code, config in contractions(device):
        assert estimated.spills(config.registers) == (code.spills > 0), code
        if code.memory_path != "buffer" and not code.half:
            assert config.slots(estimated) == pytest.approx(code.slots, rel=0.25), code


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each.family)
@pytest.mark.parametrize("device", ["mali-g710", "mali-g720"])
def test_spilling_configs_are_not_chosen(device: str, workload: Workload) -> None:
    """By the phones' compilers, 8x4 spills on Mali (docs/research/phone-compilers.md)."""
    tall = PlainContraction("tall", 8, 4, 4, (8, 4))
    descriptor = uncounted(device)
    listed = with_configs(descriptor, [*listed_configs(descriptor), tall])
    assert choose(listed, workload) != tall
    [cost] = estimates(listed, workload, [tall]).values()
    [free] = estimates(replace(listed, registers=None), workload, [tall]).values()
    assert cost > 100 * free


@pytest.mark.parametrize(("queries", "keys", "spills"), [(2, 4, False), (4, 2, True), (4, 4, True)])
def test_attention_charges_registers(queries: int, keys: int, spills: bool) -> None:
    """As Mesa's compiler reports for Mali, with 64 registers (docs/research/phone-compilers.md)."""
    config = SharedWeightsConfig("a", queries, keys, (4, 16))
    device, workload = EstimatedDevice(7168, RegisterFile(64, 64, 2)), Workload("attention", "buffer", 128, 64, 128, 12)
    free = replace(device, registers=None)
    assert device.spills(config.registers) == spills
    assert (config.cost(workload, device) > 100 * config.cost(workload, free)) == spills


def test_counted_spills_are_prohibitive(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor, workload = load_descriptor("adreno750"), WORKLOADS[0]
    best = choose(descriptor, workload)
    assert isinstance(best, PlainContraction)
    tile = best.rows, best.columns
    codes = tuple(replace(each, spills=9) if (each.rows, each.columns) == tile else each for each in load_codes("adreno750"))
    monkeypatch.setattr("flashmem.compiler.selection.configs.load_codes", lambda model: codes)
    assert choose(descriptor, workload) != best


def test_configs_that_are_cut_to_one_kernel_cost_the_same() -> None:
    descriptor = load_descriptor("adreno750")
    configs = tuple(PlainContraction(name, rows, 4, 4, (8, 8)) for name, rows in (("tall", 8), ("low", 4)))
    row = Workload("matmul", "texture", 1, 768, 768)
    assert len(set(estimates(descriptor, row, configs).values())) == 1
    assert len(set(estimates(descriptor, replace(row, rows=128), configs).values())) == 2


def test_counted_code_is_used_only_if_every_config_has_some() -> None:
    descriptor, workload = load_descriptor("adreno750"), replace(WORKLOADS[0], path="buffer", storage="float16")
    configs = configs_of(descriptor, "matmul")  # none in half was counted with weights in a buffer
    assert estimates(descriptor, workload, configs) == estimates(uncounted("adreno750"), workload, configs)
    assert estimates(descriptor, workload, configs[:2]) != estimates(uncounted("adreno750"), workload, configs[:2])
