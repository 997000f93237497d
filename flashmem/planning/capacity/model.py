"""Load capacity C_l: the bytes that can be streamed during a launch within the slowdown its class tolerates (FlashMem 4.2).

The planner uses the protocol `CapacityModel`. Three models implement it: `roofline.Roofline` over the rates of a descriptor,
`predictor.Predictor`, trained on measurements of `flashmem profile`, and `family.FamilyPredictor`, trained on compiled code of
a GPU family. `choice.default_model` selects one for a descriptor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from flashmem.base.types import TransferMode
from flashmem.program.launches import Launch

SECONDS, SLOWDOWN = ".seconds.ubj", ".slowdown.ubj"
"""Suffixes of the two files of a trained model."""


class CapacityModel(Protocol):
    """Latency of a launch, alone and with bytes streamed during it.

    Seconds and bytes. `weight_bytes`: weights that the launch reads, in addition to its activations.
    """

    @property
    def note(self) -> str:
        """The source of the numbers, for the notes of a plan."""
        ...

    @property
    def tells_classes(self) -> bool:
        """Whether the response of every kind of launch is known well enough to tell its class (`capacity.classes`)."""
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
