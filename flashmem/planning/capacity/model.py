"""Load capacity C_l: the bytes that can be streamed beside a launch within the slowdown its class tolerates (FlashMem 4.2).

`CapacityModel` is what the planner asks. Two models implement it: `roofline.Roofline` over the rates of a descriptor, and
`predictor.Predictor`, trained on what `flashmem profile` measured. `choice.default_model` picks one for a descriptor.
"""

from __future__ import annotations

from typing import Final, Protocol

from flashmem.base.types import OperatorClass, TransferMode
from flashmem.program.launches import Launch

SECONDS, SLOWDOWN = ".seconds.ubj", ".slowdown.ubj"
"""Suffixes of the two files of a trained model."""

THRESHOLDS: Final[dict[OperatorClass, float]] = {"hierarchical": 0.0, "reusable": 0.20, "elemental": 3.0}
"""Slowdown that streaming may cause a class of operators, as a share of their own latency (FlashMem Table 5)."""


class CapacityModel(Protocol):
    """Latency of a launch, alone and with bytes streamed beside it.

    Seconds and bytes; `weight_bytes` are what the launch reads of weights, beside its activations.
    """

    @property
    def note(self) -> str:
        """What the numbers are based on, for the notes of a plan."""
        ...

    def seconds(self, launch: Launch, weight_bytes: int = 0) -> float:
        """Latency with nothing streamed beside it."""
        ...

    def loaded_seconds(self, launch: Launch, weight_bytes: int, streamed_bytes: float, mode: TransferMode) -> float:
        """Latency with `streamed_bytes` streamed beside it; never falls as they grow."""
        ...

    def streamable_bytes(self, launch: Launch, weight_bytes: int, slowdown: float, mode: TransferMode) -> float:
        """The most bytes with which `loaded_seconds` is no more than (1 + `slowdown`) times `seconds`."""
        ...


def load_capacity(model: CapacityModel, launch: Launch, weight_bytes: int, mode: TransferMode) -> float:
    """C_l in bytes: what can be streamed beside `launch` within the threshold of its class."""
    threshold = THRESHOLDS[launch.operator_class]
    if threshold == 0:
        return 0.0
    return model.streamable_bytes(launch, weight_bytes, threshold, mode)
