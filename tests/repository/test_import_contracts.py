"""The list of forbidden packages in pyproject.toml (`lint-imports` reads it) is complete."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import grimp

import flashmem

ROOT = Path(flashmem.__file__).parents[1]
ON_DEVICE = {"numpy", "pyopencl"}


def test_the_contract_names_every_external_package_that_a_device_may_lack() -> None:
    """A contract forbids only what it lists: a package that flashmem imports and the list lacks would always pass."""
    graph = grimp.build_graph("flashmem", include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None)
    external = {module for module in graph.modules if not module.startswith("flashmem")} - sys.stdlib_module_names
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    (contract,) = (each for each in contracts if each["id"] == "on-device")
    listed = {module for module in contract["forbidden_modules"] if not module.startswith("flashmem")}
    assert external >= ON_DEVICE
    assert external - ON_DEVICE == listed
