"""The kernel configs of a device: those that its descriptor lists and its driver can run, and the plain ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from flashmem.compiler.configs.config import KernelConfig
from flashmem.compiler.configs.kinds import config_of, plain_of, table_of
from flashmem.target.descriptor import ConfigTable, DeviceDescriptor, Feature


def listed_configs(descriptor: DeviceDescriptor) -> tuple[KernelConfig, ...]:
    """The configs in `descriptor` that its driver can run.

    Raises:
        UserError: one of them is not a config.
    """
    return _listed(descriptor.configs, descriptor.features, descriptor.name)


@lru_cache(maxsize=64)  # the configs of a device are asked for at every product
def _listed(tables: tuple[ConfigTable, ...], features: tuple[Feature, ...], name: str) -> tuple[KernelConfig, ...]:
    configs = (config_of(table, f"device {name}") for table in tables)
    return tuple(config for config in configs if config.needs <= {*features})


def plain_configs(descriptor: DeviceDescriptor, family: str) -> tuple[KernelConfig, ...]:
    """The configs for workloads of `family` that the listed ones cannot compute; none for a family without configs."""
    plain = plain_of(family)
    return () if plain is None else plain(descriptor, family)


def configs_of(descriptor: DeviceDescriptor, family: str) -> tuple[KernelConfig, ...]:
    """The configs of `family` on a device, the plain ones first; the one that it has to use alone, if that is among them."""
    plain = plain_configs(descriptor, family)
    configs = (*plain, *(each for each in listed_configs(descriptor) if family in each.families and each not in plain))
    return tuple(each for each in configs if each.name == descriptor.only) or configs


def with_configs(descriptor: DeviceDescriptor, configs: Iterable[KernelConfig]) -> DeviceDescriptor:
    """The same device that lists `configs` and no others."""
    return replace(descriptor, configs=tuple(map(table_of, configs)))
