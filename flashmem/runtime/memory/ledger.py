"""The ledger: the only way the runtime gets memory.

It counts every byte held on the device and in host staging by category, refuses what would pass the budget, and remembers the
total over time (`flashmem.runtime.memory.accounts`). Host arrays, buffers, textures and resident pages of the mapped weight
file all count.
"""

from __future__ import annotations

from collections.abc import Callable

from flashmem.base.errors import RunError
from flashmem.base.types import TEXEL_BYTES, Channel
from flashmem.runtime.memory.accounts import Account, Budget, Category
from flashmem.runtime.opencl.context import Bytes, Context, Memory, release


class Ledger(Account):
    """The account of one bound program, and the memory objects in it. Safe to use from several threads."""

    def __init__(self, context: Context, budget: int | Budget | None) -> None:
        """`budget`: one that several share, or the bytes of this one alone; None for no limit."""
        super().__init__(budget)
        self._context = context
        self._objects: list[tuple[Memory, Category, int]] = []

    def buffer(self, category: Category, nbytes: int, what: str, *, host_visible: bool = False) -> Memory:
        """A device buffer that lives until it is given back. Raises RunError past the budget or if the device refuses."""
        return self._allocate(category, nbytes, what, lambda: self._context.buffer(nbytes, host_visible=host_visible))

    def wrapped(self, category: Category, data: Bytes, what: str) -> Memory:
        """Host memory that kernels use where it is, until it is given back. Raises RunError as `buffer` does."""
        return self._allocate(category, data.nbytes, what, lambda: self._context.scratch(data))

    def image(self, category: Category, width: int, height: int, channel: Channel, what: str) -> Memory:
        """A texture that lives until it is given back. Raises RunError past the budget or if the device refuses."""
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
        """Give the memory objects of these categories back to the device, or all of them, the latest first."""
        going = [each for each in self._objects if not categories or each[1] in categories]
        self._objects = [each for each in self._objects if categories and each[1] not in categories]
        while going:
            handle, category, nbytes = going.pop()
            release(handle)
            self.release(category, nbytes)

    def close(self) -> None:
        """Give everything back to the device."""
        try:
            self.give_back()
        finally:
            self.clear()
