"""Results derived from the operators' declarations: the page, the lowerings, ONNX's names."""

from __future__ import annotations

import onnx
import pytest

from flashmem.base.types import ITEMSIZE
from flashmem.compiler.lowering.registry import lowerings
from flashmem.compiler.operators import FAMILIES, REGISTRY
from flashmem.compiler.operators.vector import REGISTER, STORED, Vector
from tests.conformance.operators_page import PAGE, page


def test_the_page_is_what_the_declarations_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.conformance.operators_page"


def test_every_kernel_has_an_emitter_and_every_emitter_an_operator() -> None:
    assert {operator.kernel for operator in REGISTRY.values()} == set(lowerings())


def test_operators_are_onnx_operators_unless_they_say_otherwise() -> None:
    assert [name for name, operator in REGISTRY.items() if operator.onnx != onnx.defs.has(name)] == []


def test_every_operator_is_of_a_family() -> None:
    assert {operator.family for operator in REGISTRY.values()} == {family.__name__ for family in FAMILIES}


@pytest.mark.parametrize("width", [1, 4])
def test_every_type_is_stored_in_its_own_width(width: int) -> None:
    sizes = {"char": 1, "uchar": 1, "half": 2, "short": 2, "ushort": 2, "int": 4, "uint": 4, "float": 4, "long": 8, "ulong": 8}
    vector = Vector(width)
    for dtype, stored in STORED.items():
        assert sizes[stored] == ITEMSIZE[dtype]
        as_it_is = stored in (REGISTER[dtype], "half")  # a store rounds to half itself
        assert (vector.to_stored(dtype, "v") == "v") == as_it_is
