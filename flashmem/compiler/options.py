"""A request, resolved: the device as data, the transfer mode, and the shapes of one variant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from flashmem.base.types import TransferMode
from flashmem.bundle.shape_variants import Shape
from flashmem.request.request import BundleRequest
from flashmem.target.descriptor import DeviceDescriptor


@dataclass(frozen=True)
class RefusedKernel:
    """A kernel that the driver of the device miscompiles: how, and whether it is right without optimisation."""

    wrong: str
    unoptimised: bool


@dataclass(frozen=True)
class Options:
    """What a shape variant is compiled for: the device as data, `mode` to plan for, what else was asked, and its `shapes`.

    `refused`: kernels that the driver of the device miscompiles, by name.
    """

    descriptor: DeviceDescriptor
    mode: TransferMode
    request: BundleRequest = field(default_factory=BundleRequest)
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    refused: Mapping[str, RefusedKernel] = field(default_factory=dict)

    def changed(self, **changes: Any) -> Self:
        """The same with other values of some fields of the request."""
        return replace(self, request=self.request.replace(**changes))
