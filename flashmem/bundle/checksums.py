"""Checksums of the weight file: one for every slice, one for the constants, one for every block of an embedding table.

They are CRC-32: an accidental change is missed once in 2^32. They are computed faster than any disk reads, so that a session
can check streamed weights (docs/reference/bundles.md has the measurement). The manifest has a SHA-256 of the whole file.

`checksums.bin` holds four bytes for each, little endian: the constants, the slices in the program's order, the blocks of each
host embedding table. The *content hashes* of the slices follow, 16 bytes of BLAKE2b each. Where two slices have the same
content hash, in one bundle or in two, a runtime compares their bytes and keeps one copy (docs/how-to/many-models.md).
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from flashmem.base.errors import BundleError
from flashmem.program.program import Program
from flashmem.program.tensors import HostEmbeddingLookup

Checksum = int
TABLE_BLOCK = 64 << 10
"""Bytes of a table under one checksum: to check one row, one or two blocks are read."""

_DTYPE = np.dtype("<u4")
_CONTENT_HASH_BYTES = 16


@dataclass(frozen=True)
class ChecksummedRange:
    """A range of the weight file with its own checksum. `name` describes it in error messages."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Checksums:
    """The checksums of one program's weights. `tables` has the blocks of each host embedding table, in the program's order.

    `slices` and `content_hashes` are by the name of the slice.
    """

    constants: Checksum
    slices: Mapping[str, Checksum]
    tables: tuple[tuple[Checksum, ...], ...]
    content_hashes: Mapping[str, bytes]

    def all(self) -> Iterator[Checksum]:
        """Every checksum, in the order of `checksummed_ranges`."""
        return chain([self.constants], self.slices.values(), *self.tables)


def checksum(data: bytes | memoryview, before: Checksum = 0) -> Checksum:
    """The CRC-32 of contiguous bytes, or, given the checksum `before` of the preceding bytes, of both together."""
    return zlib.crc32(data, before)


def content_hash(blocks: Iterable[bytes | memoryview]) -> bytes:
    """The BLAKE2b hash of the concatenated `blocks`, 16 bytes."""
    made = hashlib.blake2b(digest_size=_CONTENT_HASH_BYTES)
    for block in blocks:
        made.update(block)
    return made.digest()


def checksummed_ranges(program: Program) -> Iterator[ChecksummedRange]:
    """Every range of the weight file that has a checksum, in the order of `checksums.bin`."""
    yield ChecksummedRange("the part with the constants", program.constants_offset, program.constants_bytes)
    for part in program.slices:
        yield ChecksummedRange(f"slice {part.name!r}", part.offset, part.file_bytes)
    for lookup in program.host_embeddings:
        yield from table_blocks(lookup)


def table_blocks(lookup: HostEmbeddingLookup) -> list[ChecksummedRange]:
    """The table of `lookup`, divided into blocks of `TABLE_BLOCK` bytes."""
    name = f"the table read by {lookup.indices!r}"
    end = table_end(lookup)
    starts = range(lookup.offset, end, TABLE_BLOCK)
    return [ChecksummedRange(name, start, min(TABLE_BLOCK, end - start)) for start in starts]


def table_end(lookup: HostEmbeddingLookup) -> int:
    """The offset in the weight file at which a table ends."""
    panels = -(-lookup.rows // lookup.panel)
    return lookup.offset + (panels - 1) * lookup.row_stride + lookup.panel_bytes


def pack_checksums(
    program: Program, checksum_of: Callable[[ChecksummedRange], Checksum], hash_of: Callable[[ChecksummedRange], bytes]
) -> bytes:
    """The content of `checksums.bin`, computed range by range."""
    slices = islice(checksummed_ranges(program), 1, 1 + len(program.slices))
    return np.fromiter(map(checksum_of, checksummed_ranges(program)), _DTYPE).tobytes() + b"".join(map(hash_of, slices))


def unpack_checksums(content: bytes, program: Program) -> Checksums:
    """The checksums in the content of `checksums.bin`.

    Raises:
        BundleError: the program has more or fewer ranges than `content` has checksums.
    """
    blocks = [len(range(lookup.offset, table_end(lookup), TABLE_BLOCK)) for lookup in program.host_embeddings]
    end = _DTYPE.itemsize * (1 + len(program.slices) + sum(blocks))
    if len(content) != end + _CONTENT_HASH_BYTES * len(program.slices):
        raise BundleError("the bundle is damaged: checksums.bin is for another program; compile the model again")
    values = iter(np.frombuffer(content[:end], _DTYPE).tolist())
    constants = next(values)
    slices = dict(zip((part.name for part in program.slices), islice(values, len(program.slices)), strict=True))
    starts = range(end, len(content), _CONTENT_HASH_BYTES)
    hashes = {name: content[start : start + _CONTENT_HASH_BYTES] for name, start in zip(slices, starts, strict=True)}
    return Checksums(constants, slices, tuple(tuple(islice(values, count)) for count in blocks), hashes)
