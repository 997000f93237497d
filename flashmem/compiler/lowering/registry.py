"""Registry of lowerings by kernel name: each turns a group into launches.

Kernel families (`flashmem/compiler/kernels/<family>/lowering.py`) fill it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flashmem.compiler.configs.families import load_families
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.lowering.context import LoweringContext
from flashmem.compiler.operators import REGISTRY

Lowering = Callable[[LoweringContext, FusionGroup], None]
"""Appends the launches of a group to the program."""

_LOWERINGS: dict[str, Lowering] = {}


def lowers(kernel: str) -> Callable[[Lowering], Lowering]:
    """Register a lowering by the kernel name in operator declarations (`compiler.operators.registry.Operator.kernel`).

    That of elementwise operators, which name none, is "".
    """

    def registered(lowering: Lowering) -> Lowering:
        assert kernel not in _LOWERINGS, f"{kernel} is lowered twice"
        _LOWERINGS[kernel] = lowering
        return lowering

    return registered


def lowerings() -> Mapping[str, Lowering]:
    """The lowerings by kernel name."""
    load_families("lowering")
    return _LOWERINGS


def lower_group(context: LoweringContext, group: FusionGroup) -> None:
    """Append the launches of `group` to the program."""
    lowerings()[REGISTRY[group.main.op].kernel](context, group)
