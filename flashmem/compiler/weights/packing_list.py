"""Packing list: the layout of the weight file before it is written, with offsets and functions that make the pieces.

Planning needs the sizes of slices, not their contents. So a program is generated, planned, perhaps fused differently and
generated again, before the first weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from flashmem.base.types import DEFAULT_PAGE

Pieces = Callable[[], Iterable[NDArray[Any]]]
"""Makes the arrays of one weight in sequence; each may be discarded before the next is made."""


OnPiece = Callable[[str, int], None]
"""Progress callback: called with the weight and the bytes of each written piece."""


class WeightSink(Protocol):
    """Destination of packed weights: a bundle that is being written."""

    def append(self, data: NDArray[Any], alignment: int = ...) -> int:
        """Write `data` at the next multiple of `alignment` and return that offset."""
        ...


@dataclass(frozen=True)
class _Entry:
    name: str
    places: tuple[tuple[int, int], ...]  # offset and bytes of each piece
    pieces: Pieces


@dataclass
class PackingList:
    """Weights in the order of the file, each of one or more pieces that start at multiples of `page_bytes`.

    With an initial `size`, the list begins after that many bytes of other programs.
    """

    page_bytes: int = DEFAULT_PAGE
    size: int = 0
    _entries: list[_Entry] = field(default_factory=list)

    def place(self, name: str, sizes: Sequence[int], pieces: Pieces) -> list[int]:
        """Reserve room for pieces of `sizes` bytes, which `pieces()` will make in this order; returns their offsets."""
        offsets = []
        for nbytes in sizes:
            offset = -(-self.size // self.page_bytes) * self.page_bytes
            offsets.append(offset)
            self.size = offset + nbytes
        self._entries.append(_Entry(name, tuple(zip(offsets, sizes, strict=True)), pieces))
        return offsets

    def entries(self) -> Iterator[tuple[str, tuple[tuple[int, int], ...]]]:
        """The weights, in order, and the offset and bytes of each of their pieces."""
        return ((entry.name, entry.places) for entry in self._entries)

    def write(self, sink: WeightSink, on_piece: OnPiece = lambda name, nbytes: None) -> None:
        """Make every piece and append it to `sink`, which must already contain everything before them."""
        for entry in self._entries:
            for (offset, nbytes), piece in zip(entry.places, entry.pieces(), strict=True):
                written = sink.append(piece, self.page_bytes)
                assert (written, piece.nbytes) == (offset, nbytes), f"{entry.name} is not what was laid out"
                on_piece(entry.name, nbytes)
