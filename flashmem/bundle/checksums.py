"""Digests of what is read from the weight file: one of every slice, one of the constants, one of every block of a table.

They are CRC-32: an accident changes one of them by chance once in 2^32, and they are made faster than any disk reads, so that
a session can check what it streams (docs/bundles.md has the measurement). The file as a whole has a SHA-256 in the
manifest. A bundle keeps them in `digests.bin`, four bytes each, little endian: the constants, the slices in the program's
order, the blocks of each row gather. Behind them stand the *identities* of the slices, 16 bytes of BLAKE2b each: of two slices
with one identity, whatever bundles they are in, a runtime compares the bytes, and holds them once (docs/many-models.md).
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
from flashmem.program.tensors import RowGather, panel_bytes

Digest = int
TABLE_BLOCK = 64 << 10
"""Bytes of a table that are checked together: a row costs reading one or two of these."""

_DTYPE = np.dtype("<u4")
_IDENTITY_BYTES = 16


@dataclass(frozen=True)
class Piece:
    """Bytes of the weight file with a digest of their own; `name` for a sentence."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Digests:
    """The digests of a bundle: of slices by name, of tables by the order of the program's row gathers. Identities by slice."""

    constants: Digest
    slices: Mapping[str, Digest]
    tables: tuple[tuple[Digest, ...], ...]
    identities: Mapping[str, bytes]

    def all(self) -> Iterator[Digest]:
        """In the order of `pieces`."""
        return chain([self.constants], self.slices.values(), *self.tables)


def digest(data: bytes | memoryview, before: Digest = 0) -> Digest:
    """The digest of contiguous bytes; of what `before` is the digest of, followed by them."""
    return zlib.crc32(data, before)


def identity(blocks: Iterable[bytes | memoryview]) -> bytes:
    """What no other bytes than those of `blocks`, one after the other, have."""
    made = hashlib.blake2b(digest_size=_IDENTITY_BYTES)
    for block in blocks:
        made.update(block)
    return made.digest()


def pieces(program: Program) -> Iterator[Piece]:
    """Everything that has a digest, in the order of `digests.bin`."""
    yield Piece("the part with the constants", program.constants_offset, program.constants_bytes)
    for part in program.slices:
        yield Piece(f"slice {part.name!r}", part.offset, part.file_bytes)
    for gather in program.row_gathers:
        yield from table_blocks(gather)


def table_blocks(gather: RowGather) -> list[Piece]:
    """The table of `gather`, cut into blocks."""
    name, end = f"the table read by {gather.indices!r}", table_end(gather)
    starts = range(gather.offset, end, TABLE_BLOCK)
    return [Piece(name, start, min(TABLE_BLOCK, end - start)) for start in starts]


def table_end(gather: RowGather) -> int:
    """The first byte of the weight file behind a table."""
    panels = -(-gather.rows // gather.panel)
    return gather.offset + (panels - 1) * gather.row_stride + panel_bytes(gather)


def make(program: Program, of: Callable[[Piece], Digest], identity_of: Callable[[Piece], bytes]) -> bytes:
    """The content of `digests.bin`."""
    slices = islice(pieces(program), 1, 1 + len(program.slices))
    return np.fromiter(map(of, pieces(program)), _DTYPE).tobytes() + b"".join(map(identity_of, slices))


def read(content: bytes, program: Program) -> Digests:
    """The digests in `digests.bin`.

    Raises:
        BundleError: there are more or fewer than the program has pieces.
    """
    blocks = [len(range(gather.offset, table_end(gather), TABLE_BLOCK)) for gather in program.row_gathers]
    end = _DTYPE.itemsize * (1 + len(program.slices) + sum(blocks))
    if len(content) != end + _IDENTITY_BYTES * len(program.slices):
        raise BundleError("the bundle is damaged: digests.bin is for another program; compile the model again")
    values = iter(np.frombuffer(content[:end], _DTYPE).tolist())
    constants = next(values)
    slices = dict(zip((part.name for part in program.slices), islice(values, len(program.slices)), strict=True))
    starts = range(end, len(content), _IDENTITY_BYTES)
    identities = {name: content[start : start + _IDENTITY_BYTES] for name, start in zip(slices, starts, strict=True)}
    return Digests(constants, slices, tuple(tuple(islice(values, count)) for count in blocks), identities)
