"""Operator classes, the roofline, load capacities, and the planning instance of a program."""

from __future__ import annotations

import pytest

from flashmem.base.types import OperatorClass
from flashmem.compiler.operators import REGISTRY
from flashmem.planning.capacity.classes import DEFAULT, load_capacity
from flashmem.planning.capacity.roofline import Roofline, predict_seconds
from flashmem.planning.instance import build_instance
from flashmem.program.launches import Arg, Launch
from flashmem.program.program import Program
from flashmem.program.tensors import Slice
from flashmem.target.descriptor import DeviceDescriptor, Rates

RATES = Rates(gemm_flops=100e9, memory_bandwidth=10e9, copy_bandwidth=4e9, disk_bandwidth=1e9, launch_seconds=10e-6)
DEVICE = DeviceDescriptor("test", rates=RATES)


def launch(kind: OperatorClass, macs: int, nbytes: int, *slices: str) -> Launch:
    args = (Arg("tensor", "x"), *(Arg("slice", name) for name in slices))
    return Launch("layer", "kernel", (1,), None, args, kind, ("op",), macs, nbytes)


@pytest.mark.parametrize(
    ("op", "kind"),
    [("MatMul", "reusable"), ("Conv", "reusable"), ("Gemm", "reusable"), ("Relu", "elemental"), ("Add", "elemental"),
     ("Transpose", "elemental"), ("Softmax", "hierarchical"), ("LayerNormalization", "hierarchical"),
     ("MaxPool", "hierarchical"), ("AveragePool", "hierarchical"), ("LpPool", "hierarchical"), ("MaxPoolAt", "hierarchical"),
     ("ReduceMean", "hierarchical")],
)  # fmt: skip
def test_classes_follow_table_5(op: str, kind: str) -> None:
    assert REGISTRY[op].operator_class == kind


def test_latency_is_the_slower_of_arithmetic_and_traffic() -> None:
    assert predict_seconds(launch("reusable", 50_000_000, 1000), DEVICE) == pytest.approx(1e-3 + 10e-6)
    assert predict_seconds(launch("elemental", 1000, 20_000_000), DEVICE) == pytest.approx(2e-3 + 10e-6)
    assert predict_seconds(launch("reusable", 1000, 0), DEVICE, weight_bytes=20_000_000) == pytest.approx(2e-3 + 10e-6)


def test_capacity_is_what_can_be_copied_within_the_threshold() -> None:
    roofline = Roofline(DEVICE)
    # 1.01 ms; 20 % of that at 4 GB/s are 808 000 bytes; 70 % of the copying time is a delay in mode map, 160 % in interleave
    assert load_capacity(roofline, launch("reusable", 50_000_000, 0), 0, "map") == pytest.approx(808_000 / 0.7)
    assert load_capacity(roofline, launch("reusable", 50_000_000, 0), 0, "interleave") == pytest.approx(808_000 / 1.6)
    # 300 % are 12 120 000 bytes; a smaller delay permits full copying speed during four times the latency
    assert load_capacity(roofline, launch("elemental", 50_000_000, 0), 0, "map") == pytest.approx(4 * 4_040_000)
    assert load_capacity(roofline, launch("elemental", 50_000_000, 0), 0, "interleave") == pytest.approx(12_120_000 / 1.6)
    assert load_capacity(roofline, launch("hierarchical", 50_000_000, 0), 0, "map") == 0
    assert [DEFAULT.slowdown(kind) for kind in ("hierarchical", "reusable", "elemental")] == [0.0, 0.2, 3.0]


def test_the_instance_of_a_program() -> None:
    program = Program(
        memory_path="buffer", precision="fp32", inputs=(), outputs=(), tensors=(), host_embeddings=(),
        slices=(Slice("a", "A", 0, 3_000_000), Slice("b", "B", 0, 500)),
        launches=(launch("reusable", 1000, 0, "a"), launch("hierarchical", 0, 0), launch("elemental", 0, 0, "b", "a")),
        arena_bytes=0, constants_offset=0, constants_bytes=0, weights_bytes=0,
    )  # fmt: skip
    instance = build_instance(program, DEVICE, chunk_bytes=1000, m_peak=77)
    assert [(w.name, w.nbytes, w.first_use, w.last_use) for w in instance.weights] == [("a", 3_000_000, 1, 3), ("b", 500, 3, 3)]
    assert [instance.chunks(w) for w in instance.weights] == [3000, 1]
    assert instance.load_bandwidth == 1e9 and instance.m_peak == 77
    assert instance.layers[0].seconds == pytest.approx(3e-4 + 10e-6)  # its weight counts as traffic
    assert [layer.capacity for layer in instance.layers] == [354, 0, 4960]
