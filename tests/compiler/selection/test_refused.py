"""What is selected in the place of kernels that a driver miscompiles."""

from __future__ import annotations

from flashmem.compiler.configs.config import KernelConfig
from flashmem.compiler.configs.kinds import least_config
from flashmem.compiler.configs.listed import configs_of
from flashmem.compiler.configs.workload import Workload
from flashmem.compiler.options import RefusedKernel
from flashmem.compiler.selection.selector import KernelSelector
from flashmem.target.descriptor import load_descriptor

PRODUCT = Workload("matmul", "buffer", 64, 96, 72)
LEAST = least_config("matmul")
assert LEAST is not None


def selected(device: str, *unoptimised: str) -> list[KernelConfig]:
    """The configs for a product while the kernel of each is refused; those with these names are right without optimisation."""
    listed = (*configs_of(load_descriptor(device), "matmul"), LEAST)
    refused = {each.name: RefusedKernel("wrong", each.name in unoptimised) for each in listed}
    selector = KernelSelector(load_descriptor(device), refused=refused)
    found = [selector.config(PRODUCT)]
    while selector.avoid(found[-1].name, selector.recent()):
        found.append(selector.config(PRODUCT))
    return found


def test_the_least_config_follows_two_that_are_wrong() -> None:
    first, second, third, *_ = selected("adreno750")
    assert first != second and LEAST not in (first, second) and third == LEAST


def test_the_least_config_follows_the_only_one() -> None:
    """A CPU has no other; and that is its own in the place of nothing else."""
    assert selected("pocl")[1] == LEAST
    assert LEAST not in configs_of(load_descriptor("pocl"), "matmul")


def test_what_is_right_without_optimisation_comes_last() -> None:
    first, second, _, *rest = selected("adreno750")
    assert rest[-1] == first, "which a session refuses"
    assert selected("adreno750", second.name)[-1] == second
    assert selected("adreno750", LEAST.name)[-1] == LEAST
