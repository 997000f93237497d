"""Transfer mode `interleave`: kernels copy weights of later layers while they compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashmem.schedule.modes.kind import Pools, TransferKind

if TYPE_CHECKING:
    from flashmem.schedule.plan import PoolLayout
    from flashmem.target.descriptor import Rates


class InterleaveMode(TransferKind):
    """A load is read into staging, or copied there. Kernels with a stream lane move it to where later ones read it."""

    name = "interleave"
    what = "kernels copy weights of later layers while they compute"
    copies = True
    by_kernels = True

    def host_bandwidth(self, rates: Rates) -> float:
        """The rate of reads from the page cache into staging."""
        return rates.cached_bandwidth

    def last_bandwidth(self, rates: Rates) -> float:
        """The rate of the copy."""
        return rates.copy_bandwidth

    def lay_out(self, pools: Pools) -> PoolLayout:
        """Places and staging, and a ring for what the host cannot read into staging."""
        return pools.staged(pools.targets(self))
