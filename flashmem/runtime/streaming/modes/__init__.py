"""The transfer modes in use: a `Transfer` for each class of `schedule.modes`, in a module of the mode's name.

A device with memory of its own has one transfer for all modes that copy (`streaming.copied_ahead`).
"""

from __future__ import annotations

from collections.abc import Callable

from flashmem.base.types import TransferMode
from flashmem.runtime.streaming.copied_ahead import AheadTransfer
from flashmem.runtime.streaming.modes.alias import AliasTransfer
from flashmem.runtime.streaming.modes.dma import DmaTransfer
from flashmem.runtime.streaming.modes.imported import ImportTransfer
from flashmem.runtime.streaming.modes.interleave import InterleaveTransfer
from flashmem.runtime.streaming.modes.map import MapTransfer
from flashmem.runtime.streaming.transfer import Transfer, TransferRequest
from flashmem.schedule.modes import ALIAS, DMA, INTERLEAVE, MAP, MODES


def _mapped(asked: TransferRequest) -> Transfer:
    return MapTransfer(asked) if asked.context.device.kind == "cpu" else ImportTransfer(asked)


TRANSFERS: dict[TransferMode, Callable[[TransferRequest], Transfer]] = {
    MAP.name: _mapped,
    ALIAS.name: AliasTransfer,
    DMA.name: DmaTransfer,
    INTERLEAVE.name: InterleaveTransfer,
}
"""By mode, what makes its transfer where the device shares the host's memory."""


def make_transfer(mode: TransferMode, asked: TransferRequest) -> Transfer:
    """The transfer of `mode`.

    Raises:
        RunError: the device or the budget refuses.
    """
    apart = MODES[mode].copies and not asked.context.device.unified_memory
    return AheadTransfer(asked) if apart else TRANSFERS[mode](asked)
