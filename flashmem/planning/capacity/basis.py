"""The basis of a trained predictor: the device's rates, and the roofline over them. Needs no training library."""

from __future__ import annotations

from dataclasses import dataclass

from flashmem.base.errors import UserError
from flashmem.base.types import MemoryPath, TransferMode
from flashmem.planning.capacity.features import LaunchFeatures, roofline_seconds


@dataclass(frozen=True)
class Basis:
    """The rates that the two models were trained with, in FLOP and bytes per second. `mode_rates`: of transfers that run
    alone."""

    gemm_flops: float
    memory_bandwidth: float
    launch_seconds: float
    mode_rates: dict[str, float]  # "path mode", see `rate`
    source: str  # device, driver and date of the measurement

    def roofline(self, features: LaunchFeatures) -> float:
        """The roofline latency, in seconds, that the predictor corrects."""
        return roofline_seconds(features, self.gemm_flops, self.memory_bandwidth, self.launch_seconds)

    def limited_by_arithmetic(self, features: LaunchFeatures) -> bool:
        """Whether arithmetic limits the roofline, not memory traffic."""
        return 2 * features.macs / self.gemm_flops > (features.bytes + features.weight_bytes) / self.memory_bandwidth

    def rate(self, path: MemoryPath, mode: TransferMode) -> float:
        """Bytes per second of a transfer that runs alone.

        Raises:
            UserError: this mode was not profiled on this path.
        """
        key = f"{path} {mode}"
        if key not in self.mode_rates:
            raise UserError(f"the trained model knows no transfer mode {mode!r} on the {path} path; run flashmem profile again")
        return self.mode_rates[key]
