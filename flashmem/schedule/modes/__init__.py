"""The transfer modes, each a class in a module of its name: its lifetimes, its memory, its rates.

What executes them is in `flashmem.runtime.streaming.modes`. The plan checker (`schedule.check`) asks none of these classes: its
arithmetic is its own.
"""

from __future__ import annotations

from flashmem.base.types import TransferMode
from flashmem.schedule.modes.alias import AliasMode
from flashmem.schedule.modes.dma import DmaMode
from flashmem.schedule.modes.interleave import InterleaveMode
from flashmem.schedule.modes.kind import TransferKind
from flashmem.schedule.modes.map import MapMode

MAP = MapMode()
ALIAS = AliasMode()
DMA = DmaMode()
INTERLEAVE = InterleaveMode()

MODES: dict[TransferMode, TransferKind] = {kind.name: kind for kind in (MAP, ALIAS, DMA, INTERLEAVE)}
"""The transfer modes by name."""
