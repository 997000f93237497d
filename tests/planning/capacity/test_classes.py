"""Classes by the predicted response, their thresholds, and where Table 5 is the prior."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from flashmem.base.types import OperatorClass, TransferMode
from flashmem.planning.capacity.classes import DEFAULT, Thresholds, class_of, gain_of, load_capacity
from flashmem.planning.capacity.roofline import Roofline
from flashmem.planning.instance import build_instance
from flashmem.program.launches import Launch
from flashmem.program.program import Program
from flashmem.target.descriptor import DeviceDescriptor, Rates

RATES = Rates(memory_bandwidth=10e9, copy_bandwidth=4e9, cached_bandwidth=2e9)
DEVICE = DeviceDescriptor("test", rates=RATES)


@dataclass
class Line:
    """A launch of 1 ms that each byte delays by `price` times the seconds that the mode needs for it alone."""

    price: float
    note: str = "a line"
    tells_classes: bool = True

    def prepare(self, launches: object, mode: TransferMode) -> None:
        """Nothing."""

    def seconds(self, launch: Launch, weight_bytes: int = 0) -> float:
        return 1e-3

    def loaded_seconds(self, launch: Launch, weight_bytes: int, streamed_bytes: float, mode: TransferMode) -> float:
        return 1e-3 + self.price * streamed_bytes / 4e9

    def streamable_bytes(self, launch: Launch, weight_bytes: int, slowdown: float, mode: TransferMode) -> float:
        return slowdown * 1e-3 * 4e9 / self.price


def launch(kind: OperatorClass = "hierarchical") -> Launch:
    return Launch("layer", "kernel", (1,), None, (), kind, ("op",), 1000, 1000)


@pytest.mark.parametrize(
    ("price", "kind"), [(1.01, "hierarchical"), (0.99, "elemental"), (0.51, "elemental"), (0.5, "reusable"), (0.01, "reusable")]
)
def test_the_response_decides(price: float, kind: OperatorClass) -> None:
    """A byte that costs its own time hides nothing; one that costs half of it hides as much again."""
    assert gain_of(Line(price), launch(), 0, "interleave", RATES) == pytest.approx(1 / price)
    assert class_of(Line(price), launch(), 0, "interleave", RATES) == kind


def test_thresholds_move_the_classes_and_what_they_tolerate() -> None:
    own = Thresholds(hierarchical=0.1, reusable=0.5, elemental=1.0, least_gain=4, high_gain=8)
    kinds = [class_of(Line(price), launch(), 0, "interleave", RATES, own) for price in (0.26, 0.2, 0.1)]
    assert kinds == ["hierarchical", "elemental", "reusable"]
    for kind, slowdown in (("hierarchical", 0.1), ("reusable", 0.5), ("elemental", 1.0)):
        assert load_capacity(Line(1), launch(), 0, "interleave", kind, own) == pytest.approx(slowdown * 4e6)  # type: ignore[arg-type]


def test_table_5_is_the_prior() -> None:
    assert class_of(replace(Line(0.1), tells_classes=False), launch(), 0, "interleave", RATES) == "hierarchical"
    assert class_of(Roofline(DEVICE), launch("elemental"), 0, "dma", RATES) == "elemental"


def test_a_plan_says_where_table_5_disagrees() -> None:
    program = Program(
        memory_path="buffer", precision="fp32", inputs=(), outputs=(), tensors=(), host_embeddings=(), slices=(),
        launches=(launch(), launch("reusable"), launch("elemental")), arena_bytes=0, constants_offset=0, constants_bytes=0,
        weights_bytes=0,
    )  # fmt: skip
    instance = build_instance(program, DEVICE, chunk_bytes=1000, m_peak=7, mode="interleave", model=Line(0.1))
    assert [layer.operator_class for layer in instance.layers] == ["reusable"] * 3
    assert [layer.capacity for layer in instance.layers] == [8000] * 3
    assert instance.notes[-1].endswith(
        "2 of 3 launches have another class than in Table 5: 1 from elemental to reusable, 1 from hierarchical to reusable"
    )
    strict = replace(DEFAULT, least_gain=100.0, high_gain=200.0)
    none = build_instance(program, DEVICE, chunk_bytes=1000, m_peak=7, mode="interleave", model=Line(0.1), thresholds=strict)
    assert [layer.capacity for layer in none.layers] == [0] * 3
