"""A config that is the only one of its kernel family, on every device."""

from __future__ import annotations

import sys

import pytest

from flashmem.compiler.configs import listed
from flashmem.compiler.configs.config import KernelConfig
from flashmem.target.descriptor import DeviceDescriptor


def only_config(monkeypatch: pytest.MonkeyPatch, family: str, config: KernelConfig) -> None:
    """From now on `config` is the only one for workloads of `family`."""
    known = listed.configs_of

    def configs_of(descriptor: DeviceDescriptor, of: str) -> tuple[KernelConfig, ...]:
        return (config,) if of == family else known(descriptor, of)

    for module in [*sys.modules.values()]:
        if getattr(module, "configs_of", None) is known:
            monkeypatch.setattr(module, "configs_of", configs_of)
