"""Weight sharing between the programs of one model that is compiled for several shapes.

The first program places its weights freely. A later one looks weights up by their content and reads them in their packed form.
It adds only weights that the file does not contain, or not in a form that its kernels read. Resident constants are one run of
bytes; each program uses a prefix of it, and later programs use longer ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.types import TableType
from flashmem.compiler.ir.blocks.constant import BlockConstant, TableRows
from flashmem.compiler.ir.graph import Constant, FileConstant, NibbleConstant, Node, Value
from flashmem.compiler.ir.quantised import HalvedConstant, MovedConstant, QuantizedConstant
from flashmem.compiler.weights.packing import PackedSlice, Packing, phases_of
from flashmem.program.launches import Arg
from flashmem.program.tensors import Slice

_ROWS_AT_ONCE = 1 << 20
"""Approximate number of elements that are made contiguous at a time to be hashed."""


class Identities:
    """Identities of constants, computed once for each: equal for equal contents."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Constant, Hashable]] = {}

    def of(self, constant: Constant) -> Hashable:
        """The identity of a constant: its place in the model's file, or a hash of computed contents."""
        if (place := _place(constant)) is not None:
            return place
        if id(constant) not in self._known:
            self._known[id(constant)] = constant, self._look_at(constant)
        return self._known[id(constant)][1]

    def _look_at(self, constant: Constant) -> Hashable:
        if isinstance(constant, QuantizedConstant):
            parts = (constant.codes, constant.scale, constant.zero, constant.minimum)
            return "quantized", *(part and self.of(part) for part in parts), constant.block, constant.bits
        return constant.shape, constant.dtype.str, _sha256(constant.array())


def _place(constant: Constant) -> Hashable | None:
    """The identity of what is at a place of the model's file, perhaps permuted or in half; None for other constants."""
    if isinstance(constant, FileConstant | NibbleConstant):
        return constant
    if isinstance(constant, BlockConstant):
        source = _place(constant.data)
        return None if source is None else (constant.format.name, source)
    if isinstance(constant, TableRows):
        source = _place(constant.source)
        return None if source is None else ("rows", source)
    if isinstance(constant, HalvedConstant | MovedConstant):
        source = _place(constant.source)
        return None if source is None else (type(constant), source, constant.shape, getattr(constant, "perm", None))
    return None


def _sha256(array: NDArray[Any]) -> bytes:
    """SHA-256 of the elements in order; copies at most a few rows at a time."""
    hashing = hashlib.sha256()
    rows = array.reshape(1) if not array.ndim else array
    step = max(1, _ROWS_AT_ONCE * len(rows) // max(1, rows.size))
    for first in range(0, len(rows), step):
        hashing.update(np.ascontiguousarray(rows[first : first + step]).reshape(-1).view(np.uint8).data)
    return hashing.digest()


@dataclass(frozen=True)
class PackedWeight:
    """Packed weights of a contraction, or their scales, in the file. `node` determines how their matrix is read."""

    node: Node
    packing: Packing
    slices: tuple[Slice, ...]
    parts: tuple[PackedSlice, ...]


@dataclass
class Placements:
    """The weights that one program has placed in the file, or found there."""

    packed: list[PackedWeight] = field(default_factory=list)
    plain: list[tuple[Slice, Callable[[], NDArray[Any]]]] = field(default_factory=list)
    tables: list[tuple[Value, TableType, int]] = field(default_factory=list)  # with the offset
    small: dict[bytes, Arg] = field(default_factory=dict)  # resident constants by content


@dataclass(frozen=True)
class StoredWeights:
    """Weights that earlier programs have placed: `size` bytes of the file, and `constants`. Empty for a single program."""

    size: int = 0
    constants: bytes = b""
    small: Mapping[bytes, Arg] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    _packed: Mapping[Hashable, Sequence[PackedWeight]] = field(default_factory=dict)
    _plain: Mapping[tuple[int, bytes], Slice] = field(default_factory=dict)
    _tables: Mapping[Hashable, int] = field(default_factory=dict)
    _identities: Identities = field(default_factory=Identities)

    def followed_by(self, placements: Placements, size: int, constants: bytes) -> StoredWeights:
        """These weights, and those that one more program has placed. Reads their contents."""
        packed = {key: list(found) for key, found in self._packed.items()}
        for weight in placements.packed:
            found = packed.setdefault(self._key(weight.node), [])
            if weight.slices not in [each.slices for each in found]:
                found.append(weight)
        plain = dict(self._plain)
        plain.update({(part.nbytes, _sha256(make())): part for part, make in placements.plain})
        tables: dict[Hashable, int] = dict(self._tables)
        tables.update({(self._of(table), kind): offset for table, kind, offset in placements.tables})
        placed = [part for weight in placements.packed for part in weight.slices] + [part for part, _ in placements.plain]
        names = self.names | {part.name for part in placed}
        return StoredWeights(size, constants, placements.small, names, packed, plain, tables, self._identities)

    def packed_as(self, node: Node, packing: Packing) -> PackedWeight | None:
        """The weights of `node` in the file in that packing, or None; images may be folded if `packing` allows it."""
        for weight in self._found(node):
            same = replace(weight.packing, fold_unit=packing.fold_unit) == packing
            if same and all(_may_be_folded(part, packing) for part in weight.parts):
                return weight
        return None

    def forms(self, node: Node) -> frozenset[tuple[int, int]]:
        """Columns of a panel and depth of each packed form of the weights of `node` in the file."""
        return frozenset((weight.packing.panel, weight.packing.depth) for weight in self._found(node))

    def plain_as(self, nbytes: int, make: Callable[[], NDArray[Any]]) -> Slice | None:
        """The slice with the unpacked data that `make` returns, or None; `nbytes` includes the slack after a slice."""
        if not any(size == nbytes for size, _ in self._plain):
            return None
        return self._plain.get((nbytes, _sha256(make())))

    def table_at(self, table: Value, kind: TableType) -> int | None:
        """The offset at which the rows of `table` are contiguous, or None."""
        return self._tables.get((self._of(table), kind)) if self._tables else None

    def _found(self, node: Node) -> Iterable[PackedWeight]:
        constant = node.input(1).constant
        return self._packed.get(self._key(node), ()) if self._packed and constant is not None else ()

    def _key(self, node: Node) -> Hashable:
        """The key of the weights of `node`: their identity, and the attributes that `packing.weight_columns` uses."""
        if node.op.startswith("MatMul"):
            how: Hashable = bool(node.attributes["transposed"])
        else:
            how = (node.attributes["group"], phases_of(node)) if node.op == "ConvTranspose" else None
        return node.op.startswith("MatMul"), how, self._of(node.input(1))

    def _of(self, value: Value) -> Hashable:
        assert value.constant is not None, f"{value.name} is not a constant"
        return self._identities.of(value.constant)


def _may_be_folded(part: PackedSlice, packing: Packing) -> bool:
    return not part.width or part.height >= packing.depth or part.height % packing.fold_unit == 0


NOTHING_STORED = StoredWeights()
"""The stored weights before the first program of a model."""
