"""Load capacity: how long a launch takes alone, and how long with bytes streamed beside it (FlashMem section 4.2).

Two models answer: the `Roofline` over a descriptor's rates, and the `Predictor` (planning/capacity/predictor.py) trained on
what `flashmem profile` measured. `default_model` chooses by the descriptor; what it chose stands in every plan's notes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from flashmem.base.resources import names
from flashmem.base.types import MemoryPath, TransferMode
from flashmem.planning.capacity.classes import THRESHOLDS, predict_seconds
from flashmem.program.launches import Launch
from flashmem.target.descriptor import DeviceDescriptor

SECONDS, SLOWDOWN = ".seconds.ubj", ".slowdown.ubj"
"""How the two files of a trained model end."""


class CapacityModel(Protocol):
    """What the planner asks. Seconds and bytes; `weight_bytes` are read by the launch beside its activations."""

    @property
    def note(self) -> str:
        """What the numbers rest on, for a plan's notes."""
        ...

    def seconds(self, launch: Launch, weight_bytes: int = 0) -> float:
        """Latency with nothing streamed beside it."""
        ...

    def loaded_seconds(self, launch: Launch, weight_bytes: int, streamed_bytes: float, mode: TransferMode) -> float:
        """Latency with `streamed_bytes` streamed beside it; never falls as they grow."""
        ...

    def streamable_bytes(self, launch: Launch, weight_bytes: int, slowdown: float, mode: TransferMode) -> float:
        """The most bytes with which `loaded_seconds` stays within (1 + `slowdown`) times `seconds`."""
        ...


class Roofline:
    """The analytic model: the slower of arithmetic and traffic, delayed by the mode's contention while bytes are
    transferred."""

    def __init__(self, descriptor: DeviceDescriptor, why: str = "") -> None:
        """`why`: why there is no better model, for the note."""
        self._descriptor = descriptor
        self._why = why or f"descriptor {descriptor.name} has no trained model"

    @property
    def note(self) -> str:
        """Says that it is the roofline, and why."""
        return f"load capacities from the roofline over the descriptor's rates ({self._why})"

    def seconds(self, launch: Launch, weight_bytes: int = 0) -> float:
        """See `planning.capacity.classes.predict_seconds`."""
        return predict_seconds(launch, self._descriptor, weight_bytes)

    def loaded_seconds(self, launch: Launch, weight_bytes: int, streamed_bytes: float, mode: TransferMode) -> float:
        """The same, and the share of the transfer's time by which `mode` delays what computes."""
        rates = self._descriptor.rates
        delay = rates.contention_of(mode) * streamed_bytes / rates.transfer_bandwidth(mode)
        return self.seconds(launch, weight_bytes) + delay

    def streamable_bytes(self, launch: Launch, weight_bytes: int, slowdown: float, mode: TransferMode) -> float:
        """What delays it by no more than the slowdown admits, and can be transferred while it runs."""
        rates, alone = self._descriptor.rates, self.seconds(launch, weight_bytes)
        share = min(slowdown / max(rates.contention_of(mode), 1e-9), 1.0 + slowdown)
        return share * alone * rates.transfer_bandwidth(mode)


def load_capacity(model: CapacityModel, launch: Launch, weight_bytes: int, mode: TransferMode) -> float:
    """C_l in bytes: what `launch` takes along within the slowdown its class may take."""
    threshold = THRESHOLDS[launch.operator_class]
    if threshold == 0:
        return 0.0
    return model.streamable_bytes(launch, weight_bytes, threshold, mode)


def default_model(descriptor: DeviceDescriptor, memory_path: MemoryPath) -> CapacityModel:
    """The trained model that lies beside the descriptor, or the roofline with the reason in its note.

    Raises:
        UserError: the descriptor names a model that is not there or not one of ours.
    """
    name = descriptor.capacity_model
    if not name:
        return Roofline(descriptor)
    if not Path(name).is_absolute() and name not in names("devices", SECONDS):  # of a bundle from another machine
        return Roofline(descriptor, f"the trained model {name} is not here")
    try:
        from flashmem.planning.capacity.predictor import Predictor
    except ImportError:
        return Roofline(descriptor, "xgboost is not installed; it comes with flashmem[compile]")
    return Predictor.load(name, memory_path)
