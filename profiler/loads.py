"""Loads on the bench: the runtime's own transfers from a temporary file, removed when the profile ends."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from flashmem.base.pages import page_size
from flashmem.base.types import MemoryPath, TransferMode
from flashmem.program.tensors import Slice
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.streaming.loading import Loading
from flashmem.runtime.streaming.modes import make_transfer
from flashmem.runtime.streaming.transfer import Transfer, TransferRequest
from flashmem.runtime.streaming.weight_file import WeightFile
from flashmem.schedule.loads import Load, whole
from flashmem.schedule.modes import MODES
from flashmem.schedule.plan import PoolLayout, TextureSlot

CHUNK = 1 << 20
"""Bytes of a slice: the planner's usual chunk."""

PARTS = 64
"""Slices in each of the two sets that are loaded alternately."""

_WIDTH = 256  # texels in a row of a slice


class HeldLoads:
    """Loads of whole slices that begin at a signal, with the frees of others."""

    def __init__(self, transfer: Transfer, parts: Sequence[Slice], frees: Sequence[Slice], threads: int) -> None:
        self._transfer = transfer
        self._frees = frees
        self._threads = threads
        self._loads = [Load(part, whole(part)) for part in parts]
        self._loading: Loading | None = None

    def open(self) -> Loading:
        """Begin. No launch releases any of them."""
        self._loading = self._transfer.begin(self._loads, {0: self._frees}, threads=self._threads)
        self._loading.layer_done(0)
        return self._loading

    def wait(self) -> None:
        """Wait until all are loaded. Raises RunError."""
        assert self._loading is not None
        for load in self._loads:
            self._loading.wait(load.part.name)

    def stop(self) -> None:
        """End, if they have begun. Raises RunError if a load failed."""
        if self._loading is not None:
            self._loading.stop()


class Loads:
    """Slices to load on one memory path of one device, in any of its transfer modes. Close it."""

    def __init__(
        self, context: Context, ledger: Ledger, path: MemoryPath, folder: Path, content: NDArray[np.uint8], threads: int
    ) -> None:
        """`folder`: for the file, made of the first chunk of `content`. `threads`: the number of loader threads."""
        self._context = context
        self._ledger = ledger
        self._path = path
        self._threads = threads
        self._transfers: dict[TransferMode, Transfer] = {}
        with tempfile.NamedTemporaryFile(prefix=".flashmem-profile-", dir=folder) as file:
            for _ in range(2 * PARTS):
                file.write(content[:CHUNK].data)
            file.flush()
            self._file = WeightFile(Path(file.name), 2 * PARTS * CHUNK)
            # Once open, the file needs no name: nothing remains if this process is killed.
            self._descriptor = os.open(file.name, os.O_RDONLY)
        self._sets = [[self._slice(i) for i in range(k * PARTS, (k + 1) * PARTS)] for k in (0, 1)]
        self._turn = 0
        self._loaded: dict[TransferMode, list[Slice]] = {}

    def close(self) -> None:
        """Release all resources except those that the ledger counts."""
        for transfer in self._transfers.values():
            transfer.close()
        self._file.close()
        os.close(self._descriptor)

    def transfer(self, mode: TransferMode) -> Transfer:
        """The runtime's transfer of `mode`, for the slices of the profiling file."""
        if mode not in self._transfers:
            parts = [part for half in self._sets for part in half]
            layout = self._layout(mode, parts, CHUNK, places=PARTS, slots=8)
            self._transfers[mode] = self._make(mode, self._ledger, parts, layout)
        return self._transfers[mode]

    def _make(self, mode: TransferMode, ledger: Ledger, parts: Sequence[Slice], layout: PoolLayout) -> Transfer:
        apart = {part.name: part.name.encode() for part in parts}  # separate, because the file repeats its content
        asked = TransferRequest(self._context, ledger, self._file, parts, layout, content_hashes=apart)
        return make_transfer(mode, asked)

    def start(self, mode: TransferMode, count: int) -> tuple[HeldLoads, list[Slice]]:
        """Prepare loads of `count` slices, which begin at a signal, and free the slices of the last call."""
        self._turn ^= 1
        parts = self._sets[self._turn][:count]
        frees = self._loaded.get(mode, [])
        self._loaded[mode] = parts
        return HeldLoads(self.transfer(mode), parts, frees, self._threads), parts

    def load_seconds(self, mode: TransferMode, count: int) -> float:
        """Seconds to load `count` slices (from the page cache) while nothing else runs."""
        return _bring_in(*self.start(mode, count), self.transfer(mode))

    def transfer_rate(self, mode: TransferMode) -> float:
        """Bytes per second of a transfer alone: the median of several."""
        self.load_seconds(mode, PARTS)
        self.load_seconds(mode, PARTS)
        return PARTS * CHUNK / statistics.median(self.load_seconds(mode, PARTS) for _ in range(7))

    def cold_rate(self, mode: TransferMode) -> float:
        """Bytes per second of loads whose pages were dropped from the page cache: the median of several.

        A virtual machine's host may still cache the file; this cannot be detected here.
        """
        rates = []
        for _ in range(5):
            self._let_go(mode)
            os.fsync(self._descriptor)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            rates.append(PARTS * CHUNK / self.load_seconds(mode, PARTS))
        return statistics.median(rates)

    def slice_seconds(self, mode: TransferMode) -> float:
        """The cost of a slice in addition to its bytes: the time of loads of one page each."""
        parts = [self._slice(i, page_size()) for i in range(2 * PARTS)]
        layout = self._layout(mode, parts, page_size(), places=len(parts), slots=1)
        ledger = Ledger(self._context, None)
        transfer = self._make(mode, ledger, parts, layout)
        try:
            times = []
            for _ in range(7):
                run = HeldLoads(transfer, parts, (), self._threads)
                times.append(_bring_in(run, parts, transfer))
                for part in parts:
                    transfer.free(part)
            return statistics.median(times) / len(parts)
        finally:
            transfer.close()
            ledger.close()

    def _let_go(self, mode: TransferMode) -> None:
        """Free the slices of the last loads of `mode`."""
        for part in self._loaded.pop(mode, []):
            self.transfer(mode).free(part)

    def _slice(self, index: int, nbytes: int = CHUNK) -> Slice:
        if self._path == "buffer":
            return Slice(f"part{index}", "part", index * CHUNK, nbytes)
        return Slice(f"part{index}", "part", index * CHUNK, nbytes, _WIDTH, nbytes // (16 * _WIDTH), 16 * _WIDTH)

    def _layout(self, mode: TransferMode, parts: Sequence[Slice], nbytes: int, *, places: int, slots: int) -> PoolLayout:
        """A layout that assigns `parts` of `nbytes` each in rotation: to one of `places` in a pool, or to one of `slots`."""
        kind = MODES[mode]
        offsets = {part.name: i % places * nbytes for i, part in enumerate(parts)}
        layout = PoolLayout(pool_bytes=places * nbytes, offsets=offsets, threads=self._threads)
        if self._path == "texture" and kind.copies:
            slot = TextureSlot(parts[0].width, parts[0].height, "float", nbytes)
            slot_of = {part.name: i % slots for i, part in enumerate(parts)}
            layout = PoolLayout(slots=(slot,) * slots, slot_of=slot_of, threads=self._threads)
        if kind.by_engine:
            return replace(layout, ring_bytes=self._threads * nbytes)
        if kind.by_kernels and self._context.device.unified_memory:
            return replace(layout, staging_bytes=places * nbytes, staging=offsets)
        if kind.by_kernels:
            slot_of = {part.name: i % places for i, part in enumerate(parts)}
            ring = self._threads * nbytes
            return replace(layout, staging_slots=(nbytes,) * places, staging_slot_of=slot_of, ring_bytes=ring)
        return layout


def _bring_in(run: HeldLoads, parts: Sequence[Slice], transfer: Transfer) -> float:
    """Seconds until all `parts` of `run` are loaded and their copies are done."""
    begun = perf_counter()
    run.open()
    run.wait()
    for event in transfer.take_arrived([part.name for part in parts]):
        event.wait()
    elapsed = perf_counter() - begun
    run.stop()
    return elapsed
