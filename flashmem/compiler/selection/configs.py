"""Kernel configs for a workload: the device's configs that can compute it, with measured or estimated seconds."""

from __future__ import annotations

from dataclasses import replace

from flashmem.compiler.selection.tuning_database import load_database
from flashmem.target.descriptor import DeviceDescriptor
from flashmem.target.kernel_configs.config import KernelConfig
from flashmem.target.kernel_configs.contraction import Winograd
from flashmem.target.workload import Workload


def choose(descriptor: DeviceDescriptor, workload: Workload) -> KernelConfig:
    """The fastest config for `workload`; of equally fast ones, the first in the device's list."""
    times = seconds(descriptor, workload)
    return min(times, key=lambda config: times[config])


def candidates(descriptor: DeviceDescriptor, workload: Workload) -> tuple[KernelConfig, ...]:
    """The device's configs that can compute `workload`: `descriptor.only` alone, if that one can."""
    found = [each for each in descriptor.configs_of(workload.family) if each.fits(workload)]
    return tuple(found) or candidates(replace(descriptor, only=""), workload)


def seconds(descriptor: DeviceDescriptor, workload: Workload) -> dict[KernelConfig, float]:
    """Seconds of the device's configs for `workload`: measured on the nearest workload of the tuning database, else estimated.

    If a near workload was measured, configs that were not measured, or failed, are excluded. The gain of Winograd depends on
    caches, which no estimate models, so Winograd is used only if it was measured.

    Raises:
        UserError: the tuning database that the descriptor names is missing or damaged.
    """
    configs = candidates(descriptor, workload)
    if len(configs) > 1:
        database = load_database(descriptor)
        measured = database.seconds(workload, configs) if database else {}
        if measured:
            return measured
        configs = tuple(each for each in configs if not isinstance(each, Winograd)) or configs
    step = (
        descriptor.parallelism * 2 / descriptor.rates.flops_of(workload.family)
    )  # seconds for one multiplication on all work-items
    return {config: step * estimate(descriptor, workload, config) for config in configs}


def estimate(descriptor: DeviceDescriptor, workload: Workload, config: KernelConfig) -> float:
    """The estimated cost of `config`, without measurements, in multiplications of a full device."""
    return config.cost(workload, descriptor.parallelism)
