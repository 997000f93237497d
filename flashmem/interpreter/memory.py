"""Memory of a launch: buffers, local and private arrays, textures; and pointers of all work-items into it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flashmem.interpreter.errors import OutsideError, UnknownTextError
from flashmem.interpreter.syntax import Type
from flashmem.interpreter.values import DTYPES, Array, Number, chosen, known

_SHIFTS = {1: 0, 2: 1, 4: 2, 8: 3}
"""By the size of an element: what a byte offset is shifted by."""


class KernelMemory:
    """Bytes that work-items share: copies of `nbytes` each, of which a work-item has the one that begins at its `base`.

    `errors` and `written` have an element for each `unit` bytes, and are None until they are needed. Where `watched`, it is
    known which work-item wrote last: if two write different numbers to one place, the error there is infinite, because OpenCL
    does not say which comes last.
    """

    def __init__(self, name: str, data: Array, nbytes: int, base: Array, unit: int, *, watched: bool = False) -> None:
        self.name = name
        self.data = data
        self.nbytes = nbytes
        self.base = base
        self.unit = unit
        self.errors: Array | None = None
        self.watched = watched
        self.written: Array | None = np.zeros(len(data) // unit, bool) if watched else None
        self._writer: Array | None = np.zeros(len(data) // unit, np.int32) if watched else None
        self._contested = np.zeros(len(data) // unit if watched else 0, bool)
        self._views: dict[Any, Array] = {}

    def view(self, dtype: Any) -> Array:
        """The bytes as elements of a type."""
        if dtype not in self._views:
            self._views[dtype] = self.data[: len(self.data) // dtype.itemsize * dtype.itemsize].view(dtype)
        return self._views[dtype]

    def _places(self, offset: Array, type_: Type, mask: Array | None, width: int, how: str) -> Array:
        """Indices of elements, for work-items that do not take part those of the first."""
        size = DTYPES[type_.name].itemsize
        if mask is not None:
            offset = np.where(mask, offset, 0)
        if offset.min() < 0 or offset.max() + size * width > self.nbytes:
            inside = (offset >= 0) & (offset + size * width <= self.nbytes)
            at = int(offset[~inside][0])
            raise OutsideError(f"a work-item {how} byte {at} of {self.name!r}, which has {self.nbytes}")
        places = (offset + self.base) >> _SHIFTS[size]
        return np.asarray(places if width == 1 else places[:, None] + np.arange(width))

    def load(self, offset: Array, type_: Type, mask: Array | None, width: int) -> Number:
        """The numbers at a byte offset of each work-item."""
        places = self._places(offset, type_, mask, width, "reads")
        v = self.view(DTYPES[type_.name])[places]
        if self.errors is None:
            return Number(v)
        return Number(v, known(self.errors[places * DTYPES[type_.name].itemsize // self.unit].astype(np.float64)))

    def store(self, offset: Array, type_: Type, x: Number, mask: Array | None, items: int) -> None:
        """Write a number of each work-item that takes part. `items` is the number of all."""
        dtype = DTYPES[type_.name]
        width = x.width
        places = self._places(offset, type_, mask, width, "writes")
        shape = (items,) if width == 1 else (items, width)
        places = np.broadcast_to(places, shape)
        v = np.broadcast_to(x.v, shape)
        e = None if x.e is None else np.broadcast_to(x.e, shape)
        writers = np.arange(1, items + 1, dtype=np.int32)
        if mask is not None:
            places = places[mask]
            v = v[mask]
            writers = writers[mask]
            e = None if e is None else e[mask]
        view = self.view(dtype)
        units = places * dtype.itemsize // self.unit
        clash: Array | None = None
        if self.watched and self._writer is not None and self.written is not None:
            own = writers if width == 1 else writers[:, None]
            before = self._writer[units]
            clash = (before > 0) & (before != own) & (view[places] != v)
            self._writer[units] = own
            self.written[units] = True
            if dtype.itemsize > self.unit:
                for extra in range(1, dtype.itemsize // self.unit):
                    self.written[units + extra] = True
        view[places] = v
        if clash is not None:
            clash |= (view[places] != v) & (v == v)  # two in one step
            clash = clash if clash.any() else None
        if (e is not None or clash is not None) and self.errors is None:
            self.errors = np.zeros(len(self.data) // self.unit, np.float32)
        if self.errors is not None:
            self.errors[units] = 0.0 if e is None else np.nextafter(e.astype(np.float32), np.float32(np.inf)) * (e > 0)
            if clash is not None:
                self._contested[units[clash]] = True
            if self.watched:
                self.errors[units[self._contested[units]]] = np.inf  # whatever is written there later
            for extra in range(1, dtype.itemsize // self.unit):
                self.errors[units + extra] = self.errors[units]


@dataclass(frozen=True)
class Pointer:
    """A pointer of each work-item: a byte offset into a memory.

    `rows`: of an array of arrays, the elements in each of its rows, by dimension. `in_row`: it has been indexed less often than
    it has dimensions.
    """

    memory: KernelMemory
    offset: Array
    type: Type
    doubt: Array | None = None  # where the offset has an error
    rows: tuple[int, ...] = ()
    in_row: bool = False

    def moved(self, by: Number) -> Pointer:
        """The pointer some elements, or rows, on."""
        size = DTYPES[self.type.name].itemsize * self.type.width * (self.rows[0] if self.rows else 1)
        doubt = self.doubt if by.e is None else (by.e if self.doubt is None else self.doubt + by.e)
        offset = self.offset + by.v.astype(np.int64) * size
        return Pointer(self.memory, offset, self.type, doubt, self.rows[1:], bool(self.rows))

    def as_type(self, type_: Type) -> Pointer:
        """The same address of another type."""
        return replace(self, type=type_.target)

    def load(self, mask: Array | None, items: int, width: int = 0) -> Number:
        """The element, or a vector of `width` elements."""
        found = self.memory.load(self.offset, self.type, mask, width or self.type.width)
        return found if self.doubt is None else _unsure(found, self.doubt)

    def store(self, x: Number, mask: Array | None, items: int) -> None:
        """Write the element or vector."""
        self.memory.store(self.offset, self.type, x if self.doubt is None else _unsure(x, self.doubt), mask, items)


@dataclass(frozen=True)
class PointerChoice:
    """One of two pointers, by a condition."""

    condition: Number
    yes: Pointer | PointerChoice
    no: Pointer | PointerChoice

    @property
    def type(self) -> Type:
        """What it points to."""
        return self.yes.type

    def moved(self, by: Number) -> PointerChoice:
        """The pointer some elements on."""
        return replace(self, yes=self.yes.moved(by), no=self.no.moved(by))

    def as_type(self, type_: Type) -> PointerChoice:
        """The same address of another type."""
        return replace(self, yes=self.yes.as_type(type_), no=self.no.as_type(type_))

    def _masks(self, mask: Array | None, items: int) -> tuple[Array, Array]:
        holds = np.broadcast_to(self.condition.v != 0, (items,))
        return (holds, ~holds) if mask is None else (holds & mask, ~holds & mask)

    def load(self, mask: Array | None, items: int, width: int = 0) -> Number:
        """The element, or a vector of `width` elements."""
        yes, no = self._masks(mask, items)
        return chosen(self.condition, self.yes.load(yes, items, width), self.no.load(no, items, width))

    def store(self, x: Number, mask: Array | None, items: int) -> None:
        """Write the element or vector."""
        yes, no = self._masks(mask, items)
        self.yes.store(x, yes, items)
        self.no.store(x, no, items)


def _unsure(x: Number, doubt: Array) -> Number:
    """`x` from a place that has an error: nothing is known of it there."""
    rows = (doubt > 0).astype(np.float64)
    e = np.where(rows if x.v.ndim == 1 else rows[:, None], np.inf, 0.0)
    return Number(x.v, known(np.broadcast_to(e, np.broadcast_shapes(e.shape, x.v.shape))))


@dataclass
class Image:
    """A texture: `texels` of shape [rows, columns, 4] in their type. Coordinates outside are limited to the edge."""

    name: str
    texels: Array
    written: Array | None = None

    def load(self, x: Number, y: Number) -> Number:
        """The texels at (x, y) in their stored type."""
        rows, columns, _ = self.texels.shape
        return Number(self.texels[np.clip(y.v, 0, rows - 1), np.clip(x.v, 0, columns - 1)])

    def store(self, x: Number, y: Number, texel: Number, mask: Array | None, items: int) -> None:
        """Write a texel of each work-item that takes part."""
        rows, columns, _ = self.texels.shape
        across = np.broadcast_to(x.v, (items,))
        down = np.broadcast_to(y.v, (items,))
        v = np.broadcast_to(texel.v, (items, 4))
        if mask is not None:
            across = across[mask]
            down = down[mask]
            v = v[mask]
        if ((across < 0) | (across >= columns) | (down < 0) | (down >= rows)).any():
            raise OutsideError(f"a work-item writes outside of the texture {self.name!r}")
        if texel.e is not None:
            raise UnknownTextError("a texel with a rounding error")
        self.texels[down, across] = v
        if self.written is not None:
            self.written[down, across] = True
