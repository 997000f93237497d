"""Kernel configs for a workload: the device's configs that can compute it, with measured or estimated seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flashmem.compiler.configs.config import CompiledCost, EstimatedDevice, KernelConfig
from flashmem.compiler.configs.listed import configs_of
from flashmem.compiler.configs.workload import Workload
from flashmem.compiler.kernels.contraction.configs import PlainContraction, Winograd
from flashmem.compiler.selection.counted_code import cycles_of, load_codes
from flashmem.compiler.selection.tuning_database import load_database
from flashmem.target.descriptor import DeviceDescriptor

_EXPOSED = 0.125
"""Share of the time of pipelines other than the busiest that is not hidden behind it: assumed."""


def choose(descriptor: DeviceDescriptor, workload: Workload) -> KernelConfig:
    """The fastest config for `workload`; of equally fast ones, the first in the device's list."""
    times = seconds(descriptor, workload)
    return min(times, key=lambda config: times[config])


def candidates(descriptor: DeviceDescriptor, workload: Workload) -> tuple[KernelConfig, ...]:
    """The device's configs that can compute `workload`: `descriptor.only` alone, if that one can."""
    found = [each for each in configs_of(descriptor, workload.family) if each.fits(workload)]
    return tuple(found) or candidates(replace(descriptor, only=""), workload)


def measured_seconds(
    descriptor: DeviceDescriptor, workload: Workload, configs: Sequence[KernelConfig]
) -> dict[KernelConfig, float]:
    """Seconds of `configs` on the nearest workload of the tuning database; none if no near one was measured.

    Raises:
        UserError: the tuning database that the descriptor names is missing or damaged.
    """
    database = load_database(descriptor)
    return database.seconds(workload, configs) if database else {}


def seconds(descriptor: DeviceDescriptor, workload: Workload) -> dict[KernelConfig, float]:
    """Seconds of the device's configs for `workload`: measured on the nearest workload of the tuning database, else estimated.

    If a near workload was measured, configs that were not measured, or failed, are excluded. Those of tensor cores could not
    compute it if its weights are floats, and are estimated. The gain of Winograd depends on
    caches, which no estimate models, so Winograd is used only if it was measured.

    Raises:
        UserError: the tuning database that the descriptor names is missing or damaged.
    """
    configs = candidates(descriptor, workload)
    if len(configs) > 1:
        database = load_database(descriptor)
        measured = database.seconds(workload, configs) if database else {}
        if database and measured:
            unknown = [each for each in database.unknown(workload, configs) if "mma" in each.needs]
            return measured | _estimated(descriptor, workload, unknown)
        configs = tuple(each for each in configs if not isinstance(each, Winograd)) or configs
    return _estimated(descriptor, workload, configs)


def _estimated(descriptor: DeviceDescriptor, workload: Workload, configs: Sequence[KernelConfig]) -> dict[KernelConfig, float]:
    step = descriptor.parallelism * 2 / descriptor.rates.flops_of(workload.family)  # one multiplication on all work-items
    return {config: step * cost for config, cost in estimates(descriptor, workload, configs).items()}


def estimates(descriptor: DeviceDescriptor, workload: Workload, configs: Sequence[KernelConfig]) -> dict[KernelConfig, float]:
    """The costs of `configs` without measurements, in multiplications of a full device: see `KernelConfig.cost`.

    Costs from counted code are not compared with costs without it, so it is used if every config has some.
    """
    compiled = {config: _compiled(descriptor, workload, config) for config in configs}
    if None in compiled.values():
        compiled = dict.fromkeys(configs)
    return {config: config.cost(workload, EstimatedDevice.of(descriptor), compiled[config]) for config in configs}


def _compiled(descriptor: DeviceDescriptor, workload: Workload, config: KernelConfig) -> CompiledCost | None:
    """The code of a contraction's kernel by the device's compiler, with weights in the workload's memory.

    Its busiest pipeline decides. Pipelines do not overlap perfectly, so that of two equally busy ones, fewer other instructions
    are better. Some configs are cut to a tile that was not counted. Such a config has the numbers of the nearest one, in
    proportion to the estimates of both.
    """
    pipelines, device = descriptor.pipelines, EstimatedDevice.of(descriptor)
    if pipelines is None or not descriptor.counted or not isinstance(config, PlainContraction):
        return None
    tile = config.cut(workload)
    kind = workload.family, tile.half > 0, "" if workload.family == "matmul_dynamic" else workload.path
    codes = [code for code in load_codes(descriptor.counted) if (code.family, code.half > 0, code.memory_path) == kind]
    if not codes:
        return None
    code = min(codes, key=lambda each: abs(each.rows - tile.rows) + abs(each.columns - tile.columns))
    counted = replace(tile, rows=code.rows, columns=code.columns)
    busy = sorted(cycles_of(code, pipelines).values())
    slots = pipelines.lanes * (busy[-1] + _EXPOSED * sum(busy[:-1])) * tile.slots(device) / counted.slots(device)
    registers = round(code.registers * tile.registers / counted.registers)
    return CompiledCost(slots, registers, code.spills > 0 if tile == counted else device.spills(registers))
