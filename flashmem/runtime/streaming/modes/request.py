"""What a transfer is made of, for all modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashmem.program.tensors import Slice
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.streaming.host_tier import HostTier
from flashmem.runtime.streaming.shared_pages import SharedSlices
from flashmem.runtime.streaming.weight_file import WeightFile
from flashmem.schedule.plan import PoolLayout


@dataclass(frozen=True)
class TransferRequest:
    """What a transfer is made of; each mode uses what it needs.

    `places`, `content_hashes`: slices that other models on the device have too. `together`: by slice, the whole slice, for
    requests to `joined`. `after`: a transfer of the same mode for another shape variant of the bundle, after its `leave` (not
    if it stays in use too). The new one reuses its memory: the pages in a mode of pages, else the objects that both layouts
    have (`schedule.shared_memory`). `tier`: keeps slices in host memory in modes that copy, and counts the memory that loads
    pass through.
    """

    context: Context
    ledger: Ledger
    file: WeightFile
    slices: Sequence[Slice]
    layout: PoolLayout
    places: SharedSlices
    content_hashes: Mapping[str, bytes]
    together: Mapping[str, Slice] = field(default_factory=dict)
    after: Any = None
    tier: HostTier | None = None

    @property
    def of_memory(self) -> tuple[Context, Ledger, WeightFile, Sequence[Slice]]:
        """What every transfer needs."""
        return self.context, self.ledger, self.file, self.slices
