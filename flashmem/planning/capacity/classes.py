"""The class of each launch, by the predicted response to streaming; without a prediction, that of FlashMem's Table 5.

A launch's *gain* is how many bytes it hides: those that slow it down by `MARKER`, over those that the mode moves in that time
alone. With a gain of 1 nothing is won by moving bytes during the launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flashmem.base.types import OperatorClass, TransferMode
from flashmem.planning.capacity.model import CapacityModel
from flashmem.program.launches import Launch
from flashmem.schedule.modes import MODES
from flashmem.target.descriptor import Rates

MARKER: Final = 0.20
"""The slowdown at which the response is read: the marker of FlashMem's Figure 2."""


@dataclass(frozen=True)
class Thresholds:
    """The slowdown that each class tolerates (FlashMem section 4.2), and the gains that separate the classes.

    A launch with a gain below `least_gain` is hierarchical, from `high_gain` on reusable, and elemental in between.
    """

    hierarchical: float = 0.0
    reusable: float = 0.20
    elemental: float = 3.0
    least_gain: float = 1.0
    high_gain: float = 2.0

    def slowdown(self, kind: OperatorClass) -> float:
        """What launches of a class tolerate."""
        return {"hierarchical": self.hierarchical, "reusable": self.reusable, "elemental": self.elemental}[kind]

    def class_of_gain(self, gain: float) -> OperatorClass:
        """The class of a launch with this gain."""
        if gain < self.least_gain:
            return "hierarchical"
        return "reusable" if gain >= self.high_gain else "elemental"


DEFAULT: Final = Thresholds()


def gain_of(model: CapacityModel, launch: Launch, weight_bytes: int, mode: TransferMode, rates: Rates) -> float:
    """The gain of a launch."""
    alone = model.seconds(launch, weight_bytes)
    hidden = model.streamable_bytes(launch, weight_bytes, MARKER, mode)
    return hidden / (MARKER * alone * MODES[mode].last_bandwidth(rates))


def class_of(
    model: CapacityModel, launch: Launch, weight_bytes: int, mode: TransferMode, rates: Rates, thresholds: Thresholds = DEFAULT
) -> OperatorClass:
    """The class by the predicted response, if the model tells classes, else that of Table 5."""
    if not model.tells_classes:
        return launch.operator_class
    return thresholds.class_of_gain(gain_of(model, launch, weight_bytes, mode, rates))


def load_capacity(
    model: CapacityModel,
    launch: Launch,
    weight_bytes: int,
    mode: TransferMode,
    kind: OperatorClass | None = None,
    thresholds: Thresholds = DEFAULT,
) -> float:
    """C_l in bytes: the bytes that can be streamed beside `launch` within the threshold of its class, by default Table 5's."""
    slowdown = thresholds.slowdown(kind or launch.operator_class)
    return model.streamable_bytes(launch, weight_bytes, slowdown, mode) if slowdown else 0.0
