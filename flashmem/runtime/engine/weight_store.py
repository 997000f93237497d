"""Device memory for a model's weights, and the transfer that loads them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from flashmem.runtime.engine.device_state import DeviceInUse
from flashmem.runtime.engine.opened import OpenedBundle
from flashmem.runtime.memory.accounts import Category
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.handles import DeviceMemory
from flashmem.runtime.streaming.modes import make_transfer
from flashmem.runtime.streaming.transfer import Transfer, TransferRequest
from flashmem.schedule.loads import Schedule, make_schedule, staying
from flashmem.schedule.plan import OverlapPlan, PoolLayout
from flashmem.schedule.residency import share_places
from flashmem.schedule.shared_memory import WeightMemory, weight_memory

_STAGING = ("threads", "staging_bytes", "ring_bytes", "staging", "staging_slots", "staging_slot_of")
"""The fields of a layout about memory that loads pass through."""


class WeightStore:
    """Device memory for a model's weight slices, the transfer that loads them, and the names of the resident slices."""

    def __init__(
        self,
        device: DeviceInUse,
        opened: OpenedBundle,
        ledger: Ledger,
        plan: OverlapPlan,
        layout: PoolLayout,
        *,
        after: Transfer | None = None,
        beside: Transfer | None = None,
        resident: frozenset[str] = frozenset(),
    ) -> None:
        """Allocate places for the weights as `layout` says.

        Args:
            after: the transfer of another shape variant, whose memory this one reuses (`leave`, `has_room_for`).
            beside: the transfer of another shape variant, which this one uses too (`serves`).
            resident: the slices that are already loaded there.

        Raises:
            RunError: the device or the budget refuses.
        """
        self._opened = opened
        self.ledger = ledger
        self.plan = plan
        self.layout = layout
        self.resident = resident
        self._apart = not device.context.device.unified_memory
        self._last_schedule: tuple[object, Schedule] | None = None
        self._transfer: Transfer | None = beside or make_transfer(
            opened.mode,
            TransferRequest(
                device.context,
                ledger,
                opened.file,
                opened.program.slices,
                layout,
                device.shared_slices,
                opened.bundle.checksums.content_hashes,
                opened.together,
                after,
                opened.tier,
                opened.checksums,
            ),
        )

    @property
    def transfer(self) -> Transfer:
        """The transfer that loads slices."""
        assert self._transfer is not None
        return self._transfer

    def joined(self, whole: str, parts: Sequence[str]) -> DeviceMemory | None:
        """The memory of slices that are parts of the weight `whole`, as one buffer; None if they are not adjacent."""
        opened = self._opened
        return self.transfer.joined(opened.readable[whole], [opened.slices[name] for name in parts])

    def follow(self, plan: OverlapPlan, layout: PoolLayout) -> None:
        """Run the next run under another plan in the same places. For a mode of pages, where no place depends on it."""
        self.plan = plan
        self.layout = layout
        self._last_schedule = None

    def schedule(self, *, kept: Collection[str] | None = None, done: int = 0) -> Schedule:
        """The loads and frees of the next run after launch `done`; it leaves `kept` resident (None: as the plan says)."""
        opened = self._opened
        resident = self.resident
        tier = opened.tier
        key = (resident, None if kept is None else frozenset(kept), done, len(tier.complete) if tier is not None else 0)
        if self._last_schedule is None or self._last_schedule[0] != key:
            made = make_schedule(
                self.plan, opened.slices, self.layout, opened.mode,
                resident=resident, kept=kept, done=done, segmented=opened.segmented,
                undivided=() if tier is None else {part.name for part in opened.program.slices if tier.has_all(part)},
            )  # fmt: skip
            self._last_schedule = key, made
        return self._last_schedule[1]

    def look_at_memory(self) -> None:
        """Before loads begin: decide which of them pass through the page cache (`WeightFile.look_at_memory`)."""
        self.transfer.file.look_at_memory(self._streamed)

    def _streamed(self) -> tuple[list[tuple[int, int]], int] | None:
        """The ranges of the file that each run reads, and bytes that the ledger does not hold yet but a run will; None before
        all that stays is loaded.
        """
        stays = staying(self.plan)
        if not stays <= self.resident:
            return None
        names = {w.name for w in self.plan.weights} - stays
        tier = self._opened.tier
        parts = [part for part in self._opened.program.slices if part.name in names and not (tier and tier.keeps(part))]
        ranges = sorted({(part.offset, part.file_bytes) for part in parts})
        held = sum(self.ledger.by_category.get(category, 0) for category in ("weights", "staging"))
        return ranges, max(0, self.layout.total_bytes - held)

    def preload(self) -> None:
        """Load the preload set W, and wait for it. Raises RunError when a load fails."""
        loads = [load for load in self.schedule().loads if load.preload]
        if not loads:
            return
        self.look_at_memory()
        with self.guarded():
            loading = self.transfer.begin(loads, {}, threads=self.layout.threads)
            try:
                for load in loads:
                    loading.wait(load.part.name)
            finally:
                loading.stop()
        self.resident |= {load.part.name for load in loads}

    def drop(self, names: Collection[str]) -> None:
        """Free resident slices, in a mode that can free single slices. No run may be loading."""
        for name in names:
            self.transfer.free(self._opened.slices[name])
        self.resident -= frozenset(names)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Forbid changes of mapped files while kernels read them, as far as the system can."""
        with ExitStack() as held:
            for file in self.transfer.files if self.transfer.in_place else ():
                held.enter_context(file.guarded())
            yield

    def check_files(self) -> None:
        """Raise RunError if a mapped file is about to change, or was truncated."""
        for file in self.transfer.files:
            file.check()

    def keep_for(self, opened: OpenedBundle, plan: OverlapPlan, layout: PoolLayout) -> frozenset[str]:
        """The resident slices that stay for another shape variant with `plan` and `layout`; all others are freed where the
        mode can.
        """
        mode = self._opened.transfer
        stays = staying(plan) & self.resident
        if not mode.by_pages:
            stays = self._memory(self._opened, self.layout).at_same_place(self._memory(opened, layout), stays)
        if mode.by_kernels and stays != staying(plan):  # kernels would copy slices that are already in their places
            stays = frozenset()
        if mode.by_pages:
            self.drop(self._opened.slices.keys() - stays)
        return stays

    def serves(self, opened: OpenedBundle, layout: PoolLayout) -> bool:
        """Whether the transfer is that of another shape variant too, without a change."""
        before = self._opened
        transfer = self.transfer
        if transfer.binds_late or opened.transfer.by_kernels or opened.program.slices != before.program.slices:
            return False
        return share_places(self.layout, layout, opened.mode, slices=(before.slices, opened.slices)) and all(
            getattr(self.layout, name) == getattr(layout, name) for name in _STAGING
        )

    def has_room_for(self, opened: OpenedBundle, layout: PoolLayout) -> bool:
        """Whether the memory objects of weights, and the ring, are those of another shape variant too, so that both stay."""
        here = self._memory(self._opened, self.layout)
        there = self._memory(opened, layout)
        staged = all(getattr(self.layout, name) == getattr(layout, name) for name in _STAGING)
        fixed = not (opened.transfer.by_pages or opened.transfer.by_kernels)
        return fixed and staged and here.has_same_objects(there)

    def _memory(self, opened: OpenedBundle, layout: PoolLayout) -> WeightMemory:
        return weight_memory(layout, opened.program.slices, apart=self._apart)

    def leave(self) -> Transfer:
        """The transfer, whose memory another shape variant reuses. No run may be loading, and none can begin afterwards."""
        self.transfer.leave()
        self._give_back("staging")
        return self.transfer

    def release(self) -> None:
        """Return all places to the device. No run may be loading, and none can begin afterwards."""
        self.close()
        self._give_back("weights", "staging")

    def _give_back(self, *categories: Category) -> None:
        self.ledger.give_back(*categories)
        if self._opened.tier is not None:  # it counts the ring; its own places stay
            self._opened.tier.ledger.give_back("staging")

    def close(self) -> None:
        """End the transfer. The ledger still counts the memory."""
        self.resident = frozenset()
        transfer = self._transfer
        self._transfer = None
        if transfer is not None:
            transfer.close()
