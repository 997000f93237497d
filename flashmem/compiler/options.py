"""Options of a compilation: the device as data, limits, precision, shapes of inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashmem.base.types import Optimize, Precision, StatePrecision, States, TransferMode
from flashmem.planning.limits import Limits
from flashmem.target.descriptor import DeviceDescriptor


@dataclass(frozen=True)
class Options:
    """Resolved options of a bundle: the device as data, `mode` to plan for, sizes in bytes."""

    descriptor: DeviceDescriptor
    mode: TransferMode
    limits: Limits
    precision: Precision = "fp32"
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    optimize: Optimize = "cold"  # kernels for the first answer, or for later ones
    states: States | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)  # numbers and nested lists of numbers
    state_precision: StatePrecision = "fp32"
