"""Kernel configs as data: their tables, and their keys in the tuning database."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from typing import Any

import pytest

from flashmem.base.errors import UserError
from flashmem.base.resources import names, read_text
from flashmem.compiler.configs.config import KernelConfig
from flashmem.compiler.configs.kinds import config_of, kinds, table_of
from flashmem.compiler.configs.listed import configs_of
from flashmem.compiler.kernels.attention.configs import KeyBlockConfig, QueryRowsConfig, SharedWeightsConfig, SplitKeysConfig
from flashmem.compiler.kernels.attention.tensor_cores import TensorAttention
from flashmem.compiler.kernels.contraction.configs import (
    PlainContraction,
    SlicedContraction,
    StagedContraction,
    StagedWinograd,
    Winograd,
)
from flashmem.compiler.kernels.contraction.tensor_cores import CodesContraction, TensorContraction, Tf32Contraction
from flashmem.compiler.kernels.reduction.configs import RowConfig
from flashmem.target.descriptor import ConfigTable, descriptor_names, load_descriptor

CODES: dict[KernelConfig, str] = {
    PlainContraction("c", 8, 4, 4, (8, 8)): "8-4-4-8x8-0-0-1",
    PlainContraction("c", 8, 4, 4, (8, 8), half=16): "8-4-4-8x8-0-0-1-16",
    StagedContraction("c", 4, 8, (2, 16), k_block=64, two_stage=True, slice_k=8): "4-8-4-2x16-64-1-8",
    StagedContraction("c", 8, 8, (8, 8), k_block=32, two_stage=True, slice_k=2, split_k=4): "8-8-4-8x8-32-1-2-x4",
    SlicedContraction("c", 8, 8, lanes=128, steps=8): "8-8-4-1x1-0-0-128-8",
    TensorContraction("c", 2, 16, (32, 4), k_block=64, pipeline=3, slice_k=2): "2-16-4-32x4-64-2-2-t",
    Tf32Contraction("c", 4, 8, (16, 8), k_block=32, pipeline=3, slice_k=2): "4-8-4-16x8-32-2-2-tf",
    CodesContraction("c", 4, (8, 8), k_block=64, slice_k=2, split_k=8): "4-16-4-8x8-64-1-2-t-x8c",
    TensorContraction("c", 2, 16, (32, 4), k_block=64, pipeline=3, copiers=128): "2-16-4-32x4-64-2-1-t-128",
    Winograd("c", 7, 64, 16, channels=32): "7-64-16-1x1-0-0-1-w32",
    StagedWinograd("c", 4, 8, (2, 1), channels=4): "4-8-4-2x1-4-0-16-w4",
    QueryRowsConfig("c", 8, 4, 2, lanes=64): "8-4-2-1x1-0-0-64",
    KeyBlockConfig("c", 8, 2, (8, 16), channels=32): "8-2-2-8x16-32-0-1",
    SharedWeightsConfig("c", 4, 2, (1, 16), parts=4): "4-2-2-1x16-0-0-4",
    SplitKeysConfig("c", 8, 64, lanes=128, most=32): "8-64-64-128x1-0-32-128",
    TensorAttention("c", 32, 64, parts=2, pipeline=2): "32-64-2-128x1-1-1-2-t",
    RowConfig("c", 4, 64, subgroups=True): "1-4-4-1x1-0-0-64-subgroups",
}
"""One config of each kind, and its key in tuning databases: a change would make all measurements void."""


@pytest.mark.parametrize(("config", "code"), CODES.items(), ids=lambda each: getattr(each, "kind", ""))
def test_a_config_is_its_table_and_its_code(config: KernelConfig, code: str) -> None:
    assert config_of(table_of(config), "x") == config
    assert config.code == replace(config, name="other").code == code


def test_every_kind_is_tested() -> None:
    assert {config.kind for config in CODES} == set(kinds())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "tall"}, "x: the kind of kernel config 'c' is 'tall'; name one of: key-blocks, plain"),
        ({"k_block": 4}, "x: unknown key 'k_block' for PlainContraction; remove it"),
        ({"kind": "staged"}, "x: unknown key 'vector' for StagedContraction; remove it"),
        ({"kind": "winograd"}, "x: the key 'channels' of Winograd is missing; add it"),
    ],
)
def test_a_wrong_table_is_refused_in_one_sentence(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        config_of(ConfigTable.of({"kind": "plain", "name": "c", "rows": 8, "columns": 4, "vector": 4} | change), "x")


@pytest.mark.parametrize("name", names("devices", ".tuned.csv"))
def test_measured_codes_are_those_of_listed_configs(name: str) -> None:
    """Only these are read from a tuning database: a config whose code changed would silently be excluded."""
    lines = [line for line in read_text("devices", f"{name}.tuned.csv").splitlines() if not line.startswith("#")]
    measured = {(row["family"], row["config"], row["code"]) for row in csv.DictReader(lines)}
    descriptor = load_descriptor(name)
    families = {family for family, *_ in measured}
    assert measured <= {(family, each.name, each.code) for family in families for each in configs_of(descriptor, family)}


@pytest.mark.parametrize("name", descriptor_names())
def test_descriptors_keep_the_kinds_of_their_configs(name: str) -> None:
    descriptor = load_descriptor(name)
    assert type(descriptor).from_dict(descriptor.to_dict()).configs == descriptor.configs
