"""The kinds of kernel configs, and their form in a device descriptor: a table with a `kind` and the fields of its class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from flashmem.base.errors import UserError
from flashmem.base.tables import build
from flashmem.target.kernel_configs.attention import KeyBlockConfig, QueryRowsConfig, SharedWeightsConfig, SplitKeysConfig
from flashmem.target.kernel_configs.config import KernelConfig
from flashmem.target.kernel_configs.contraction import (
    PlainContraction,
    SlicedContraction,
    StagedContraction,
    StagedWinograd,
    Winograd,
)
from flashmem.target.kernel_configs.rows import RowConfig
from flashmem.target.kernel_configs.tensor_cores import (
    CodesContraction,
    TensorAttention,
    TensorContraction,
    Tf32Contraction,
)

_CLASSES: tuple[type[KernelConfig], ...] = (
    PlainContraction,
    StagedContraction,
    SlicedContraction,
    TensorContraction,
    Tf32Contraction,
    CodesContraction,
    Winograd,
    StagedWinograd,
    QueryRowsConfig,
    KeyBlockConfig,
    SharedWeightsConfig,
    SplitKeysConfig,
    TensorAttention,
    RowConfig,
)
KINDS: Mapping[str, type[KernelConfig]] = {each.kind: each for each in _CLASSES}


def config_from(table: Mapping[str, Any], where: str) -> KernelConfig:
    """The kernel config of a table; `where` names its file.

    Raises:
        UserError: an unknown kind, an unknown key, or a missing one.
    """
    values = dict(table)
    kind, name = values.pop("kind", None), values.get("name")
    if kind not in KINDS:
        raise UserError(f"{where}: the kind of kernel config {name!r} is {kind!r}; name one of: {', '.join(KINDS)}")
    return build(KINDS[kind], values, where)


def table_of(config: KernelConfig) -> dict[str, Any]:
    """The table that `config_from` reads."""
    return {"kind": config.kind} | {each.name: getattr(config, each.name) for each in fields(config) if each.init}
