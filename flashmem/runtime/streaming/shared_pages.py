"""Weight pages shared by several models on a device, for in-place use of weights (mode `map`).

Slices of equal content hash (`flashmem.bundle.checksums`) should have equal bytes. A bundle's hashes are not trusted: slices of
two bundles are compared byte by byte before they are shared. The first user provides the mapping, from its own file; others use
it. The first user that loads a segment reads it in and is charged for it. Others borrow it, and the last one to free it drops
its pages. If the holder frees it first, a borrower is charged, which has reserved those bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from contextlib import suppress

from flashmem.base.errors import RunError
from flashmem.base.pages import whole_pages
from flashmem.base.threads import Waiters
from flashmem.program.tensors import Slice
from flashmem.runtime.memory.accounts import Account
from flashmem.runtime.streaming.weight_file import Bytes, WeightFile
from flashmem.schedule.loads import Segment


class _Pages:
    """The pages of one segment: its users, the holder first, and whether they are in memory."""

    def __init__(self) -> None:
        self.users: list[tuple[Hashable, Account]] = []
        self.there = False


class SharedSlice:
    """A mapped slice and its users. `user` arguments identify users."""

    def __init__(self, file: WeightFile, part: Slice) -> None:
        self.file = file
        self.offset = part.offset
        self.nbytes = part.file_bytes
        self.uses = 0  # by users that may load it; see `SharedSlices`
        self._segments: dict[Segment, _Pages] = {}
        self._lock = threading.Lock()
        self._changed = Waiters()  # for the pages that another thread reads

    def is_in(self, file: WeightFile, offset: int) -> bool:
        """Whether this is the slice at `offset` of `file`."""
        return self.file is file and self.offset == offset

    @property
    def mapped(self) -> Bytes:
        """The mapped bytes."""
        return self.file.mapped[self.offset : self.offset + self.nbytes]

    def load(self, segment: Segment, user: Hashable, ledger: Account, what: str) -> None:
        """Read the pages of a segment in, and keep them until `user` frees the slice.

        Raises:
            RunError: the budget has no room, or the disk fails.
        """
        nbytes = whole_pages(segment.nbytes)
        while True:
            with self._lock:
                pages = self._segments.get(segment)
                if pages is None:
                    ledger.reserve("weights", nbytes, what)
                    pages = self._segments[segment] = _Pages()
                    pages.users.append((user, ledger))
                    break
                if pages.there:
                    ledger.borrow(nbytes, what)
                    pages.users.append((user, ledger))
                    return
                turn = self._changed.turn()
            turn.acquire()
        try:
            self.file.populate(self.offset + segment.first, segment.nbytes)
        except BaseException:
            with self._lock:
                del self._segments[segment]
                with suppress(RunError):  # report the first failure only
                    self.file.drop(self.offset + segment.first, segment.nbytes)
                ledger.release("weights", nbytes)
                self._changed.wake()
            raise
        with self._lock:
            pages.there = True
            self._changed.wake()

    def holds(self, segment: Segment) -> bool:
        """Whether the pages of a segment are in memory, or being read."""
        with self._lock:
            return segment in self._segments

    def free(self, user: Hashable) -> None:
        """Free all segments of `user`; drops pages without another user. None of them may be loading for it."""
        with self._lock:
            for segment, pages in list(self._segments.items()):
                mine = next((each for each in pages.users if each[0] == user), None)
                if mine is None:
                    continue
                nbytes = whole_pages(segment.nbytes)
                ledger = mine[1]
                held = pages.users[0] is mine
                pages.users.remove(mine)
                if not held:
                    ledger.give_up(nbytes)
                elif pages.users:
                    ledger.hand_to(pages.users[0][1], "weights", nbytes)
                else:
                    del self._segments[segment]
                    self.file.drop(self.offset + segment.first, segment.nbytes)
                    ledger.release("weights", nbytes)


class SharedSlices:
    """The mapped slices in use on a device, by content hash."""

    def __init__(self) -> None:
        self._places: dict[tuple[bytes, int], list[SharedSlice]] = {}  # several if a bundle's hashes are wrong
        self._lock = threading.Lock()

    def take(self, file: WeightFile, part: Slice, content_hash: bytes) -> SharedSlice:
        """The shared place of a slice: an existing one with the same bytes, or one in `file`, which stays open until `give_up`.

        Raises:
            RunError: the slice cannot be read for the comparison.
        """
        with self._lock:
            there = tuple(self._places.get((content_hash, part.file_bytes), ()))
            for place in there:
                place.uses += 1  # keeps it during the comparison
        try:
            found = next((place for place in there if file.has_same(part.offset, place.file, place.offset, place.nbytes)), None)
        except BaseException:
            for place in there:
                self.give_up(place, content_hash)
            raise
        for place in there:
            if place is not found:
                self.give_up(place, content_hash)
        if found is not None:
            return found
        with self._lock:
            made = SharedSlice(file, part)
            made.uses = 1
            file.keep()
            self._places.setdefault((content_hash, part.file_bytes), []).append(made)
            return made

    def give_up(self, place: SharedSlice, content_hash: bytes) -> None:
        """End the use of a place; the user holds no segments of it."""
        with self._lock:
            place.uses -= 1
            if place.uses:
                return
            key = (content_hash, place.nbytes)
            self._places[key].remove(place)
            if not self._places[key]:
                del self._places[key]
        place.file.close()
