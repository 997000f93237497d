"""Transfer mode `alias`: the host reads into memory that it shares with the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashmem.schedule.modes.kind import Pools, TransferKind

if TYPE_CHECKING:
    from flashmem.schedule.plan import PoolLayout
    from flashmem.target.descriptor import Rates


class AliasMode(TransferKind):
    """A load is a read into the buffer that kernels read, also as textures over it. Nothing is copied."""

    name = "alias"
    what = "the host reads into buffers that kernels read"

    def host_bandwidth(self, rates: Rates) -> float:
        """The rate of reads from the page cache."""
        return rates.cached_bandwidth

    def last_bandwidth(self, rates: Rates) -> float:
        """The rate of reads from the page cache."""
        return rates.cached_bandwidth

    def lay_out(self, pools: Pools) -> PoolLayout:
        """One buffer."""
        return pools.one_buffer()
