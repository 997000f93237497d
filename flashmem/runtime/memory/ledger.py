"""Memory ledger: allocates and counts all memory of the runtime.

It counts every byte on the device and in host staging by category, refuses allocations beyond the budget, and keeps a history
(`flashmem.runtime.memory.accounts`). It counts host arrays, buffers, textures and resident pages of the mapped weight file.

Memory objects are released the latest first, sub-buffers too. NVIDIA's driver crashes when overlapping sub-buffers are released
in another order (docs/research/opencl-notes.md).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import TypeVar

from flashmem.base.errors import RunError
from flashmem.base.interrupts import held_back
from flashmem.base.threads import call_each
from flashmem.base.types import TEXEL_BYTES, Channel
from flashmem.runtime.memory.accounts import Account, Budget, Category
from flashmem.runtime.memory.arena import new_pages
from flashmem.runtime.opencl.context import Bytes, Context, Queue, release
from flashmem.runtime.opencl.handles import Buffer, DeviceMemory, Texture

AnyMemory = TypeVar("AnyMemory", bound=DeviceMemory)

_OF_TENSORS: tuple[Category, ...] = ("arena", "states", "outputs")
"""Memory that tensors share, and what is copied from it."""


class Ledger(Account):
    """The account of one bound program, and its memory objects. Thread-safe."""

    def __init__(self, context: Context, budget: int | Budget | None) -> None:
        """Open an account of a shared budget, or one with its own limit in bytes; None for no limit."""
        super().__init__(budget)
        self._context = context
        self._objects: list[tuple[DeviceMemory, Category, int]] = []
        self._parts: dict[tuple[int, int, int], Buffer] = {}  # sub-buffers by buffer, offset and bytes
        self._maps: list[tuple[Queue, Bytes]] = []  # memory that stays mapped
        self._guard = threading.RLock()  # of these three; a garbage collection in a call may close another ledger
        self._finalizer = weakref.finalize(self, _release, self._objects, self._maps)  # if nobody closes it
        self._finalizer.atexit = False

    def buffer(self, category: Category, nbytes: int, what: str, *, host_visible: bool = False) -> Buffer:
        """Allocate a device buffer, until `give_back`. Raises RunError beyond the budget or if the device refuses.

        One that is `host_visible` is on whole pages where kernels use host memory, so that a disk can write to it directly.
        """
        make = partial(self._context.buffer, nbytes, host_visible=host_visible, of_tensors=category in _OF_TENSORS)
        if host_visible and self._context.device.kind == "cpu":
            make = partial(self._context.scratch, new_pages(nbytes)[:nbytes])
        return self._allocate(category, nbytes, what, make)

    def wrapped(self, category: Category, data: Bytes, what: str) -> Buffer:
        """Wrap host memory for kernels without a copy, until `give_back`. Raises RunError like `buffer`."""
        return self._allocate(category, data.nbytes, what, lambda: self._context.scratch(data))

    def image(self, category: Category, width: int, height: int, channel: Channel, what: str) -> Texture:
        """Allocate a texture, until `give_back`. Raises RunError beyond the budget or if the device refuses."""
        nbytes = width * height * TEXEL_BYTES[channel]
        return self._allocate(category, nbytes, what, lambda: self._context.image(width, height, channel))

    def part(self, category: Category, whole: Buffer, offset: int, nbytes: int) -> Buffer:
        """The sub-buffer of `nbytes` bytes from byte `offset` on of `whole`, a buffer of this ledger, until `give_back`.

        Each byte range has one sub-buffer: a kernel that writes its output over an operand gets the same memory object twice.
        Two sub-buffers of the same bytes, one of them written, are undefined (clCreateSubBuffer).

        Raises:
            RunError: the device refuses.
        """
        key = (whole.int_ptr, offset, nbytes)
        with self._guard:
            made = self._parts.get(key)
            if made is None:
                made = self._parts[key] = self._context.sub_buffer(whole, offset, nbytes)
                self._objects.append((made, category, 0))
            return made

    def mapped(self, queue: Queue, buffer: Buffer, nbytes: int) -> Bytes:
        """Map a host-visible buffer of this ledger through `queue`, until `unmap`; the host view. Raises RunError."""
        view = queue.map(buffer, nbytes)
        with self._guard:
            self._maps.append((queue, view))
        return view

    def unmap(self, view: Bytes) -> None:
        """Unmap a view from `mapped`, before its buffer is released. Raises RunError."""
        with self._guard:
            number = next(number for number, (_, each) in enumerate(self._maps) if each is view)
            queue, _ = self._maps.pop(number)
        queue.unmap(view)

    def _allocate(self, category: Category, nbytes: int, what: str, make: Callable[[], AnyMemory]) -> AnyMemory:
        self.reserve(category, nbytes, what)
        try:
            handle = make()
        except BaseException:
            self.release(category, nbytes)
            raise
        with self._guard:
            self._objects.append((handle, category, nbytes))
        return handle

    def give_back(self, *categories: Category) -> None:
        """Release the memory objects of these categories, or all, the latest first."""
        self._release_if(lambda handle, category: not categories or category in categories)

    def free(self, memories: Collection[DeviceMemory]) -> None:
        """Release these memory objects and their sub-buffers, the latest first."""
        with self._guard:
            going = {handle.int_ptr for handle in memories}
            going |= {part.int_ptr for key, part in self._parts.items() if key[0] in going}
            self._release_if(lambda handle, category: handle.int_ptr in going)

    def _release_if(self, goes: Callable[[DeviceMemory, Category], bool]) -> None:
        with held_back(), self._guard:
            going = [each for each in self._objects if goes(each[0], each[1])]
            self._objects[:] = [each for each in self._objects if not goes(each[0], each[1])]
            released = {handle.int_ptr for handle, _, _ in going}
            self._parts = {key: part for key, part in self._parts.items() if key[0] not in released}
            calls = list[Callable[[], object]]()
            for handle, category, nbytes in reversed(going):
                calls += [partial(release, handle), partial(self.release, category, nbytes)]
            call_each(*calls)

    def close(self) -> None:
        """Release everything."""
        call_each(self.give_back, self.clear, self._finalizer.detach)


def _release(objects: list[tuple[DeviceMemory, Category, int]], maps: list[tuple[Queue, Bytes]]) -> None:
    """Unmap and release the objects of a ledger that was garbage-collected."""
    while maps:
        queue, view = maps.pop()
        with suppress(RunError):
            queue.unmap(view)
    while objects:
        with suppress(RunError):
            release(objects.pop()[0])
