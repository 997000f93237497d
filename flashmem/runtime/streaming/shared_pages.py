"""Pages of weights that several models on a device share, where weights are used in place (mode `map`).

Slices of one content hash (`flashmem.bundle.checksums`) should be the same bytes. What a bundle says of itself is not believed:
slices of two bundles are compared byte by byte before they are shared. Whoever is there first gives the place, in its own
file; others use it. A segment is brought in by the first who loads it and counted there; others borrow it, and the last one to
free it drops its pages. When its holder frees it before, a borrower holds it, which has counted on those bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from contextlib import suppress

from flashmem.base.errors import RunError
from flashmem.base.pages import whole_pages
from flashmem.program.tensors import Slice
from flashmem.runtime.memory.accounts import Account
from flashmem.runtime.streaming.weight_file import Bytes, WeightFile
from flashmem.schedule.loads import Segment


class _Pages:
    """The pages of one segment: who uses them, the one that holds them first, and whether they are there."""

    def __init__(self) -> None:
        self.users: list[tuple[Hashable, Account]] = []
        self.there = False


class SharedSlice:
    """A mapped slice, and who uses it. Users are distinguished by what they pass as `user`."""

    def __init__(self, file: WeightFile, part: Slice) -> None:
        self.file, self.offset, self.nbytes = file, part.offset, part.file_bytes
        self.uses = 0  # of those that may load it; see `SharedSlices`
        self._segments: dict[Segment, _Pages] = {}
        self._changed = threading.Condition()

    def is_in(self, file: WeightFile, offset: int) -> bool:
        """Whether this is where `file` has it."""
        return self.file is file and self.offset == offset

    @property
    def mapped(self) -> Bytes:
        """The bytes, where they are mapped."""
        return self.file.mapped[self.offset : self.offset + self.nbytes]

    def load(self, segment: Segment, user: Hashable, ledger: Account, what: str) -> None:
        """Have the pages of a segment there, until `user` lets the slice go.

        Raises:
            RunError: the budget has no room, or the disk fails.
        """
        nbytes = whole_pages(segment.nbytes)
        with self._changed:
            while (pages := self._segments.get(segment)) is not None and not pages.there:  # somebody brings them in
                self._changed.wait()
            if pages is not None:
                ledger.borrow(nbytes, what)
                pages.users.append((user, ledger))
                return
            ledger.reserve("weights", nbytes, what)
            pages = self._segments[segment] = _Pages()
            pages.users.append((user, ledger))
        try:
            self.file.populate(self.offset + segment.first, segment.nbytes)
        except BaseException:
            with self._changed:
                del self._segments[segment]
                with suppress(RunError):  # the first failure is the one to tell
                    self.file.drop(self.offset + segment.first, segment.nbytes)
                ledger.release("weights", nbytes)
                self._changed.notify_all()
            raise
        with self._changed:
            pages.there = True
            self._changed.notify_all()

    def holds(self, segment: Segment) -> bool:
        """Whether the pages of a segment are there, or about to be."""
        with self._changed:
            return segment in self._segments

    def free(self, user: Hashable) -> None:
        """`user` lets all its segments go; pages that nobody else uses are dropped. None of them may be loading for it."""
        with self._changed:
            for segment, pages in list(self._segments.items()):
                mine = next((each for each in pages.users if each[0] == user), None)
                if mine is None:
                    continue
                nbytes, ledger = whole_pages(segment.nbytes), mine[1]
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
    """The mapped slices on a device, by their content hash, while somebody uses them."""

    def __init__(self) -> None:
        self._places: dict[tuple[bytes, int], list[SharedSlice]] = {}  # more than one where a bundle's hashes are wrong
        self._lock = threading.Lock()

    def take(self, file: WeightFile, part: Slice, content_hash: bytes) -> SharedSlice:
        """The place of a slice: that of another one of the same bytes, or in `file`, which stays open until it is given up.

        Raises:
            RunError: the slice cannot be read, to compare it.
        """
        with self._lock:
            there = tuple(self._places.get((content_hash, part.file_bytes), ()))
            for place in there:
                place.uses += 1  # so that it stays while it is compared
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
        """Whoever took it uses it no longer, and holds nothing there."""
        with self._lock:
            place.uses -= 1
            if place.uses:
                return
            key = (content_hash, place.nbytes)
            self._places[key].remove(place)
            if not self._places[key]:
                del self._places[key]
        place.file.close()
