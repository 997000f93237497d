"""The kinds of kernel configs, and their form in a device descriptor: a table with a `kind` and the fields of its class.

Each kernel family registers its kinds, and its plain configs, in the modules of `flashmem/compiler/kernels/<family>/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TypeVar

from flashmem.base.errors import UserError
from flashmem.base.tables import build
from flashmem.compiler.configs.config import KernelConfig
from flashmem.compiler.configs.families import load_families
from flashmem.target.descriptor import ConfigTable, DeviceDescriptor

_MODULES = ("configs", "tensor_cores")
"""The modules of a family that register configs."""

_KINDS: dict[str, type[KernelConfig]] = {}
_PLAIN: dict[str, Plain] = {}
_LEAST: dict[str, Callable[[str], KernelConfig]] = {}

Plain = Callable[[DeviceDescriptor, str], tuple[KernelConfig, ...]]
"""The configs of a device for workloads of a family (`Workload.family`) that the listed ones cannot compute."""

AnyConfig = TypeVar("AnyConfig", bound=KernelConfig)


def register(kind: type[AnyConfig]) -> type[AnyConfig]:
    """Register a class of configs by its `kind`."""
    assert kind.kind not in _KINDS, f"{kind.kind} is declared twice"
    _KINDS[kind.kind] = kind
    return kind


def register_plain(*families: str) -> Callable[[Plain], Plain]:
    """Register the function that makes the plain configs of kernel families."""

    def registered(plain: Plain) -> Plain:
        _PLAIN.update(dict.fromkeys(families, plain))
        return plain

    return registered


def register_least(*families: str) -> Callable[[Callable[[str], KernelConfig]], Callable[[str], KernelConfig]]:
    """Register the function that makes, for kernel families, the config that asks the least of a compiler."""

    def registered(least: Callable[[str], KernelConfig]) -> Callable[[str], KernelConfig]:
        _LEAST.update(dict.fromkeys(families, least))
        return least

    return registered


def kinds() -> Mapping[str, type[KernelConfig]]:
    """The classes of configs by kind."""
    load_families(*_MODULES)
    return _KINDS


def plain_of(family: str) -> Plain | None:
    """What makes the plain configs of `family`; None if it has no configs."""
    load_families(*_MODULES)
    return _PLAIN.get(family)


def least_config(family: str) -> KernelConfig | None:
    """The config of `family` that asks the least of a compiler; None if it has none but its plain one."""
    load_families(*_MODULES)
    return _LEAST[family](family) if family in _LEAST else None


def config_of(table: ConfigTable, where: str) -> KernelConfig:
    """The kernel config that a table describes; `where` names its device.

    Raises:
        UserError: an unknown kind, an unknown key, or a missing one.
    """
    values = dict(table.values)
    known = kinds()
    if table.kind not in known:
        name = values.get("name")
        names = ", ".join(sorted(known))
        raise UserError(f"{where}: the kind of kernel config {name!r} is {table.kind!r}; name one of: {names}")
    return build(known[table.kind], values, where)


def table_of(config: KernelConfig) -> ConfigTable:
    """The table that `config_of` reads."""
    return ConfigTable(config.kind, tuple((each.name, getattr(config, each.name)) for each in fields(config) if each.init))
