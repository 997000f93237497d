"""Operator classes and their thresholds (FlashMem section 4.2, Table 5), and the roofline over a device's rates.

A layer may be slowed down by a share of its own latency that depends on its class; what can be streamed in that time is its
load capacity C_l (planning/capacity/model.py).
"""

from __future__ import annotations

from typing import Final

from flashmem.base.types import OperatorClass
from flashmem.program.launches import Launch
from flashmem.target.descriptor import DeviceDescriptor

THRESHOLDS: Final[dict[OperatorClass, float]] = {"hierarchical": 0.0, "reusable": 0.20, "elemental": 3.0}
"""Slowdown a class of operators may take from streaming, as a share of its own latency."""


def classify(op: str) -> OperatorClass:
    """The class of an operator type (FlashMem Table 5), as its declaration says.

    A type that is not declared is hierarchical: nothing is streamed beside an operator of which nothing is known.
    """
    from flashmem.compiler.operators import REGISTRY  # planning a program again needs no operator's declaration

    return REGISTRY[op].operator_class if op in REGISTRY else "hierarchical"


def predict_seconds(launch: Launch, descriptor: DeviceDescriptor, weight_bytes: int = 0) -> float:
    """Predicted latency of one launch, seconds: the slower of arithmetic and memory traffic, plus the launch itself.

    `weight_bytes`: bytes of weights it reads, beside the activations that the launch declares.
    """
    rates = descriptor.rates
    arithmetic = 2 * launch.macs / rates.flops_of(launch.shape.family)
    traffic = (launch.bytes + weight_bytes) / rates.memory_bandwidth
    return max(arithmetic, traffic) + rates.launch_seconds
