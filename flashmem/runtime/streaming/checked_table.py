"""The table of a row gather in the weight file, whose checksums are compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flashmem.bundle.checksums import Checksum, ChecksummedRange, checksum
from flashmem.runtime.opencl.context import Bytes
from flashmem.runtime.streaming.weight_file import WeightFile


class CheckedTable:
    """The table of one row gather, read by blocks whose checksums are compared."""

    def __init__(self, file: WeightFile, blocks: list[ChecksummedRange], checksums: tuple[Checksum, ...]) -> None:
        self._file = file
        self._blocks = blocks
        self._checksums = checksums
        self._size = blocks[0].nbytes  # size of all blocks but the last
        self._held: int | None = None  # index of the block in `_scratch`
        self._scratch = np.empty(self._size, np.uint8)

    def expect(self, offset: int, nbytes: int) -> None:
        """Announce that these bytes will be read soon."""
        self._file.expect(offset, nbytes)

    def read_each(self, places: Sequence[Bytes], offsets: Sequence[int]) -> None:
        """See `Reader`."""
        for data, offset in zip(places, offsets, strict=True):
            self.read_into(data, offset)

    def read_into(self, data: Bytes, offset: int) -> None:
        """Fill `data` with the bytes at `offset`. Raises like `read_each`."""
        done = 0
        start = self._blocks[0].offset
        while done < data.nbytes:
            number, within = divmod(offset + done - start, self._size)
            block = self._block(number)[within:][: data.nbytes - done]
            data[done : done + block.nbytes] = block
            done += block.nbytes

    def _block(self, number: int) -> Bytes:
        part = self._blocks[number]
        content = self._scratch[: part.nbytes]
        if self._held != number:
            self._held = None
            self._file.read_into(content, part.offset)
            self._file.compare_checksum(part.name, checksum(content.data), self._checksums[number])
            self._held = number
        return content
