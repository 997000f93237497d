"""The roofline as a capacity model: rates of a descriptor, and no training."""

from __future__ import annotations

from collections.abc import Iterable

from flashmem.base.types import TransferMode
from flashmem.program.launches import Launch
from flashmem.schedule.modes import MODES
from flashmem.target.descriptor import DeviceDescriptor


def predict_seconds(launch: Launch, descriptor: DeviceDescriptor, weight_bytes: int = 0) -> float:
    """Predicted latency of one launch in seconds: the slower of arithmetic and memory traffic, plus the launch itself.

    `weight_bytes`: bytes of weights it reads, in addition to the activations that the launch declares.
    """
    rates = descriptor.rates
    arithmetic = 2 * launch.macs / rates.flops_of(launch.shape.family)
    traffic = (launch.bytes + weight_bytes) / rates.memory_bandwidth
    return max(arithmetic, traffic) + rates.launch_seconds


class Roofline:
    """Capacity model without training: the roofline, delayed by the mode's contention while bytes are transferred."""

    def __init__(self, descriptor: DeviceDescriptor, why: str = "") -> None:
        """`why`: why there is no better model, for the note."""
        self._descriptor = descriptor
        self._why = why or f"descriptor {descriptor.name} has no trained model"

    @property
    def note(self) -> str:
        """States that the model is the roofline, and why."""
        return f"load capacities from the roofline over the descriptor's rates ({self._why})"

    @property
    def tells_classes(self) -> bool:
        """No: all launches respond as the mode's contention says."""
        return False

    def prepare(self, launches: Iterable[tuple[Launch, int]], mode: TransferMode) -> None:
        """Nothing is predicted ahead."""

    def seconds(self, launch: Launch, weight_bytes: int = 0) -> float:
        """Latency alone: see `predict_seconds`."""
        return predict_seconds(launch, self._descriptor, weight_bytes)

    def loaded_seconds(self, launch: Launch, weight_bytes: int, streamed_bytes: float, mode: TransferMode) -> float:
        """Latency alone, plus the share of the transfer's time by which `mode` delays the launch."""
        rates = self._descriptor.rates
        delay = rates.contention_of(mode) * streamed_bytes / MODES[mode].last_bandwidth(rates)
        return self.seconds(launch, weight_bytes) + delay

    def streamable_bytes(self, launch: Launch, weight_bytes: int, slowdown: float, mode: TransferMode) -> float:
        """The most bytes that delay the launch by no more than `slowdown`, and can be transferred while it runs."""
        rates, alone = self._descriptor.rates, self.seconds(launch, weight_bytes)
        share = min(slowdown / max(rates.contention_of(mode), 1e-9), 1.0 + slowdown)
        return share * alone * MODES[mode].last_bandwidth(rates)
