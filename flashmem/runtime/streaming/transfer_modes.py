"""Creates the transfer of a mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from flashmem.base.types import TransferMode
from flashmem.bundle.checksums import Checksum
from flashmem.program.tensors import Slice
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.streaming.copied import DmaTransfer, InterleaveTransfer
from flashmem.runtime.streaming.copied_ahead import AheadTransfer
from flashmem.runtime.streaming.host_tier import HostTier
from flashmem.runtime.streaming.imported import ImportTransfer
from flashmem.runtime.streaming.in_place import AliasTransfer, MapTransfer
from flashmem.runtime.streaming.shared_pages import SharedSlices
from flashmem.runtime.streaming.transfer import Transfer
from flashmem.runtime.streaming.weight_file import WeightFile
from flashmem.schedule.plan import PoolLayout


def make_transfer(
    mode: TransferMode,
    context: Context,
    ledger: Ledger,
    file: WeightFile,
    slices: Sequence[Slice],
    layout: PoolLayout,
    places: SharedSlices,
    content_hashes: Mapping[str, bytes],
    checksums: Mapping[str, Checksum] | None = None,
    together: Mapping[str, Slice] = MappingProxyType({}),
    after: Transfer | None = None,
    tier: HostTier | None = None,
) -> Transfer:
    """The transfer of `mode`, which compares slices with `checksums`.

    Args:
        together: by slice, the whole slice, for requests to `joined`.
        after: a transfer of the same mode for another shape variant of the bundle, after its `leave` (not if it stays in use
            too). The new one reuses its memory: in mode "map" the pages, else the objects that both layouts have
            (`schedule.shared_memory`).
        tier: keeps slices in host memory in modes "dma" and "interleave", and counts the memory that loads pass through.

    Raises:
        RunError: the device or the budget refuses.
    """
    made: Transfer
    if mode == "map":
        kind = MapTransfer if context.device.kind == "cpu" else ImportTransfer
        made = kind(context, ledger, file, slices, places, content_hashes, together, cast(Any, after))
    elif mode == "alias":
        made = AliasTransfer(context, ledger, file, slices, layout, cast(AliasTransfer | None, after))
    elif not context.device.unified_memory:
        made = AheadTransfer(context, ledger, file, slices, layout, cast(AheadTransfer | None, after), tier)
    elif mode == "dma":
        made = DmaTransfer(context, ledger, file, slices, layout, cast(DmaTransfer | None, after))
    else:
        made = InterleaveTransfer(context, ledger, file, slices, layout, cast(InterleaveTransfer | None, after))
    made.checksums = checksums
    return made
