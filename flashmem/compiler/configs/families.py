"""Kernel families: the folders of `flashmem/compiler/kernels`, whose modules register what they have when they are imported."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

_FOLDER = "flashmem.compiler.kernels"


@cache
def load_families(*modules: str) -> None:
    """Import the modules of these names of every family that has them."""
    for family in pkgutil.iter_modules(import_module(_FOLDER).__path__, f"{_FOLDER}."):
        for module in pkgutil.iter_modules(import_module(family.name).__path__, f"{family.name}."):
            if module.name.rpartition(".")[2] in modules:
                import_module(module.name)
