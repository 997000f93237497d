"""Memory ledger: allocates and counts all memory of the runtime.

It counts every byte on the device and in host staging by category, refuses allocations beyond the budget, and keeps a history
(`flashmem.runtime.memory.accounts`). It counts host arrays, buffers, textures and resident pages of the mapped weight file.
"""

from __future__ import annotations

from collections.abc import Callable

from flashmem.base.errors import RunError
from flashmem.base.types import TEXEL_BYTES, Channel
from flashmem.runtime.memory.accounts import Account, Budget, Category
from flashmem.runtime.opencl.context import Bytes, Context, Memory, release


class Ledger(Account):
    """The account of one bound program, and its memory objects. Thread-safe."""

    def __init__(self, context: Context, budget: int | Budget | None) -> None:
        """Open an account of a shared budget, or one with its own limit in bytes; None for no limit."""
        super().__init__(budget)
        self._context = context
        self._objects: list[tuple[Memory, Category, int]] = []

    def buffer(self, category: Category, nbytes: int, what: str, *, host_visible: bool = False) -> Memory:
        """Allocate a device buffer, until `give_back`. Raises RunError beyond the budget or if the device refuses."""
        return self._allocate(category, nbytes, what, lambda: self._context.buffer(nbytes, host_visible=host_visible))

    def wrapped(self, category: Category, data: Bytes, what: str) -> Memory:
        """Wrap host memory for kernels without a copy, until `give_back`. Raises RunError like `buffer`."""
        return self._allocate(category, data.nbytes, what, lambda: self._context.scratch(data))

    def image(self, category: Category, width: int, height: int, channel: Channel, what: str) -> Memory:
        """Allocate a texture, until `give_back`. Raises RunError beyond the budget or if the device refuses."""
        nbytes = width * height * TEXEL_BYTES[channel]
        return self._allocate(category, nbytes, what, lambda: self._context.image(width, height, channel))

    def _allocate(self, category: Category, nbytes: int, what: str, make: Callable[[], Memory]) -> Memory:
        self.reserve(category, nbytes, what)
        try:
            handle = make()
        except RunError:
            self.release(category, nbytes)
            raise
        self._objects.append((handle, category, nbytes))
        return handle

    def give_back(self, *categories: Category) -> None:
        """Release the memory objects of these categories, or all, the latest first."""
        going = [each for each in self._objects if not categories or each[1] in categories]
        self._objects = [each for each in self._objects if categories and each[1] not in categories]
        while going:
            handle, category, nbytes = going.pop()
            release(handle)
            self.release(category, nbytes)

    def close(self) -> None:
        """Release everything."""
        try:
            self.give_back()
        finally:
            self.clear()
