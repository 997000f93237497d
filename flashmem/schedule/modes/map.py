"""Transfer mode `map`: kernels read pages of the mapped weight file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashmem.schedule.modes.kind import Pools, TransferKind

if TYPE_CHECKING:
    from flashmem.schedule.plan import PoolLayout
    from flashmem.target.descriptor import Rates


class MapMode(TransferKind):
    """A load brings pages of the file into memory, and a free returns them to the system."""

    name = "map"
    what = "kernels read the mapped weight file"
    by_pages = True

    def host_bandwidth(self, rates: Rates) -> float:
        """The rate of bringing pages in."""
        return rates.copy_bandwidth

    def last_bandwidth(self, rates: Rates) -> float:
        """The rate of bringing pages in."""
        return rates.copy_bandwidth

    def lay_out(self, pools: Pools) -> PoolLayout:
        """Pages of the file."""
        return pools.pages()
