"""Load capacity C_l: the bytes that can be streamed during a launch within the slowdown its class tolerates (FlashMem 4.2).

The planner uses the protocol `CapacityModel`. Three models implement it: `roofline.Roofline` over the rates of a descriptor,
`predictor.Predictor`, trained on measurements of `flashmem profile`, and `family.FamilyPredictor`, trained on compiled code of
a GPU family. `choice.default_model` selects one for a descriptor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from flashmem.base.types import OperatorClass, TransferMode
from flashmem.program.launches import Launch

SECONDS, SLOWDOWN = ".seconds.ubj", ".slowdown.ubj"
"""Suffixes of the two files of a trained model."""

THRESHOLDS: Final[dict[OperatorClass, float]] = {"hierarchical": 0.0, "reusable": 0.20, "elemental": 3.0}
"""The slowdown that streaming may cause in each class of operators, as a share of their own latency (FlashMem Table 5)."""


class CapacityModel(Protocol):
    """Latency of a launch, alone and with bytes streamed during it.

    Seconds and bytes. `weight_bytes`: weights that the launch reads, in addition to its activations.
    """

    @property
    def note(self) -> str:
        """The source of the numbers, for the notes of a plan."""
        ...

    def prepare(self, launches: Iterable[tuple[Launch, int]], mode: TransferMode) -> None:
        """Predict launches, each with the bytes of its weights, ahead and together, where that is faster."""
        ...

    def seconds(self, launch: Launch, weight_bytes: int = 0) -> float:
        """Latency with no bytes streamed during it."""
        ...

    def loaded_seconds(self, launch: Launch, weight_bytes: int, streamed_bytes: float, mode: TransferMode) -> float:
        """Latency with `streamed_bytes` streamed during it. It never falls as they grow."""
        ...

    def streamable_bytes(self, launch: Launch, weight_bytes: int, slowdown: float, mode: TransferMode) -> float:
        """The most bytes for which `loaded_seconds` is no more than (1 + `slowdown`) times `seconds`."""
        ...


def load_capacity(model: CapacityModel, launch: Launch, weight_bytes: int, mode: TransferMode) -> float:
    """C_l in bytes: the bytes that can be streamed beside `launch` within the threshold of its class."""
    threshold = THRESHOLDS[launch.operator_class]
    if threshold == 0:
        return 0.0
    return model.streamable_bytes(launch, weight_bytes, threshold, mode)
