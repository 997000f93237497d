"""The transfer modes in use: a `Transfer` for each class of `schedule.modes`, in a module of the mode's name.

A device with memory of its own has one transfer for all modes that copy (`streaming.copied_ahead`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flashmem.base.types import TransferMode
from flashmem.bundle.checksums import Checksum
from flashmem.runtime.streaming.copied_ahead import AheadTransfer
from flashmem.runtime.streaming.modes.alias import AliasTransfer
from flashmem.runtime.streaming.modes.dma import DmaTransfer
from flashmem.runtime.streaming.modes.imported import ImportTransfer
from flashmem.runtime.streaming.modes.interleave import InterleaveTransfer
from flashmem.runtime.streaming.modes.map import MapTransfer
from flashmem.runtime.streaming.modes.request import TransferRequest
from flashmem.runtime.streaming.transfer import Transfer
from flashmem.schedule.modes import ALIAS, DMA, INTERLEAVE, MAP, MODES


def _transfer_by_map(asked: TransferRequest) -> Transfer:
    kind = MapTransfer if asked.context.device.kind == "cpu" else ImportTransfer
    return kind(*asked.of_memory, asked.places, asked.content_hashes, asked.together, asked.after)


TRANSFERS: dict[TransferMode, Callable[[TransferRequest], Transfer]] = {
    MAP.name: _transfer_by_map,
    ALIAS.name: lambda asked: AliasTransfer(*asked.of_memory, asked.layout, asked.after),
    DMA.name: lambda asked: DmaTransfer(*asked.of_memory, asked.layout, asked.after),
    INTERLEAVE.name: lambda asked: InterleaveTransfer(*asked.of_memory, asked.layout, asked.after),
}
"""By mode, what makes its transfer where the device shares the host's memory."""


def make_transfer(mode: TransferMode, asked: TransferRequest, checksums: Mapping[str, Checksum] | None = None) -> Transfer:
    """The transfer of `mode`, which compares slices with `checksums`.

    Raises:
        RunError: the device or the budget refuses.
    """
    if MODES[mode].copies and not asked.context.device.unified_memory:
        made: Transfer = AheadTransfer(*asked.of_memory, asked.layout, asked.after, asked.tier)
    else:
        made = TRANSFERS[mode](asked)
    made.checksums = checksums
    return made
