"""Mode `map` on a GPU: the device imports the pages of the mapped file (`runtime/opencl/importing.py`)."""

from __future__ import annotations

from collections.abc import Container

from flashmem.program.tensors import Slice
from flashmem.runtime.opencl.context import release
from flashmem.runtime.opencl.handles import DeviceMemory
from flashmem.runtime.opencl.importing import HostImports
from flashmem.runtime.streaming.modes.map import MapTransfer
from flashmem.runtime.streaming.transfer import TransferLoad, TransferRequest, view


class ImportTransfer(MapTransfer):
    """`map` by imports: a slice is imported when its pages are loaded, and released before they are dropped.

    An import reads in and pins all its pages. So a slice cannot be imported before its load, nor stay imported after its last
    use. Otherwise the file would be in memory as a whole. Each slice is imported alone: a weight is never one buffer.
    """

    binds_late = True

    def __init__(self, asked: TransferRequest) -> None:
        self._context = asked.context
        self._importer = HostImports(asked.context)
        self._imports: dict[str, tuple[DeviceMemory, ...]] = {}  # by slice: what to release, in that order
        super().__init__(asked)
        after: ImportTransfer | None = asked.after
        if after is not None:
            self._imports = after._imports
            self.memories.update({name: objects[0] for name, objects in self._imports.items()})

    def complete(self, part: Slice, turn: TransferLoad) -> None:
        """Import the loaded slice."""
        buffer = self._importer.buffer(self._places[part.name].mapped)
        try:
            memory = view(self._context, buffer, part)
        except BaseException:
            release(buffer)
            raise
        self._imports[part.name] = (memory,) if memory is buffer else (memory, buffer)
        self.memories[part.name] = memory
        turn.did("copy")

    def free(self, part: Slice) -> None:
        """Release the import, then drop the pages."""
        self._release(part.name)
        super().free(part)

    def leave(self) -> None:
        """Forget the memories. Imports of resident slices stay, for the transfer made after this one."""
        self.memories.clear()

    def _release(self, name: str) -> None:
        self.memories.pop(name, None)
        release(*self._imports.pop(name, ()))

    def _give_places_up(self, but: Container[str] = ()) -> None:
        for name in [name for name in self._imports if name not in but]:
            self._release(name)
        super()._give_places_up(but)
