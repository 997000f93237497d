"""Transfer mode `dma`: a copy engine, or the host, copies what was read to the place where kernels read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashmem.schedule.modes.kind import Pools, TransferKind

if TYPE_CHECKING:
    from flashmem.schedule.plan import PoolLayout
    from flashmem.target.descriptor import Rates


class DmaMode(TransferKind):
    """A load is read into a ring in host memory, and copied from there beside kernels."""

    name = "dma"
    what = "copies beside kernels"
    copies = True

    def host_bandwidth(self, rates: Rates) -> float:
        """The rate of the slower step: the read into the ring, or the copy."""
        return min(rates.cached_bandwidth, rates.copy_bandwidth)

    def last_bandwidth(self, rates: Rates) -> float:
        """The rate of the copy."""
        return rates.copy_bandwidth

    def lay_out(self, pools: Pools) -> PoolLayout:
        """Places, and a ring for all slices."""
        return pools.targets(self)
