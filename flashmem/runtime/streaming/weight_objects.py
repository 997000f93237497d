"""The memory objects of a model's weights on the device (`schedule.shared_memory`), which shape variants have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from flashmem.program.tensors import Slice
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.handles import Buffer, DeviceMemory
from flashmem.runtime.streaming.transfer import in_pool
from flashmem.schedule.loads import whole_words
from flashmem.schedule.plan import PoolLayout
from flashmem.schedule.shared_memory import WeightMemory, weight_memory


class WeightObjects:
    """Buffers and textures, and the place of each slice in them (`places`)."""

    def __init__(
        self,
        ledger: Ledger,
        slices: Sequence[Slice],
        layout: PoolLayout,
        after: WeightObjects | None,
        *,
        apart: bool,
        host_visible: bool = False,
    ) -> None:
        """Allocate the memory objects of `layout` (`weight_memory`).

        Args:
            ledger: counts them.
            slices: those of the program.
            layout: where the slices are.
            after: the objects of another shape variant. Those that both have stay allocated, and its others are freed.
            apart: the device does not share the host's memory.
            host_visible: buffers are such that a disk can write to them.

        Raises:
            RunError: the device or the budget refuses.
        """
        self._ledger = ledger
        self._memory = weight_memory(layout, slices, apart=apart)
        memory = self._memory
        self._objects: dict[str, DeviceMemory] = {} if after is None else after._left_to(memory)
        for name, slot in memory.textures.items():
            if name not in self._objects:
                self._objects[name] = ledger.image("weights", slot.width, slot.height, slot.channel, name)
        for name, nbytes in memory.buffers.items():
            if name not in self._objects:
                self._objects[name] = ledger.buffer("weights", nbytes, name, host_visible=host_visible)
        self.places: dict[str, DeviceMemory] = {}
        for part in slices:
            name, offset = memory.place_of[part.name]
            alone = apart and not offset  # a sub-buffer would take memory of its own (docs/research/opencl-notes.md)
            parted = name in memory.buffers and not alone
            whole = self._objects[name]
            nbytes = whole_words(part.file_bytes)
            self.places[part.name] = ledger.part("weights", cast(Buffer, whole), offset, nbytes) if parted else whole

    def _left_to(self, memory: WeightMemory) -> dict[str, DeviceMemory]:
        """The objects that `memory` has too; frees the others. Raises RunError."""
        has = self._objects
        before = self._memory
        stays = {name for name in has if name in memory.buffers and before.buffers.get(name) == memory.buffers[name]}
        stays |= {name for name in has if name in memory.textures and before.textures.get(name) == memory.textures[name]}
        self._ledger.free([handle for name, handle in has.items() if name not in stays])
        return {name: handle for name, handle in has.items() if name in stays}

    def joined(self, parts: Sequence[Slice]) -> DeviceMemory | None:
        """A sub-buffer with all of `parts`, if the slices have the same order there as in the file."""
        name, _ = self._memory.place_of.get(parts[0].name, ("", 0))
        if name not in self._memory.buffers:
            return None
        offsets = {each: offset for each, (where, offset) in self._memory.place_of.items() if where == name}
        return in_pool(self._ledger, cast(Buffer, self._objects[name]), offsets, parts)
