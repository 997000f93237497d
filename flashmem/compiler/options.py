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
class Options:
    """What a shape variant is compiled for: the device as data, `mode` to plan for, what else was asked, and its `shapes`.

    `refused`: names of kernels that the driver of the device miscompiles, and the reason.
    """

    descriptor: DeviceDescriptor
    mode: TransferMode
    request: BundleRequest = field(default_factory=BundleRequest)
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    def changed(self, **changes: Any) -> Self:
        """The same with other values of some fields of the request."""
        return replace(self, request=self.request.replace(**changes))
