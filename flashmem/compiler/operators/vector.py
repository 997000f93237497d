"""OpenCL vector types, and the parts of expressions that depend on them.

A tensor is *stored* in the width of its element type; floats may be stored as half, rounded to the nearest, ties to even. In
*registers* five types exist: float, int, uint, long and ulong. Booleans and integers narrower than 32 bits are computed as int.
After every operator they are truncated to their width (`wrap`), so that they overflow like their type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.types import ITEMSIZE, DType, StoredType

STORED: dict[StoredType, str] = {
    "bool": "uchar", "float16": "half", "float32": "float", "int8": "char", "int16": "short", "int32": "int", "int64": "long",
    "uint8": "uchar", "uint16": "ushort", "uint32": "uint", "uint64": "ulong",
}  # fmt: skip
"""OpenCL C types of elements in memory."""

REGISTER: dict[StoredType, str] = {
    "bool": "int", "float16": "float", "float32": "float", "int8": "int", "int16": "int", "int32": "int", "int64": "long",
    "uint8": "int", "uint16": "int", "uint32": "uint", "uint64": "ulong",
}  # fmt: skip
"""OpenCL C types of elements in registers."""

_NARROW = {dtype for dtype in STORED if REGISTER[dtype] not in (STORED[dtype], "float")}
_SUFFIX = {"int": "", "uint": "u", "long": "L", "ulong": "UL"}


@dataclass(frozen=True)
class Vector:
    """Vectors of `width` elements; width 1 is a scalar."""

    width: int

    def named(self, scalar: str) -> str:
        """The vector type of an OpenCL scalar type."""
        return f"{scalar}{self.width}" if self.width > 1 else scalar

    def of(self, dtype: StoredType) -> str:
        """The type in registers of elements of `dtype`."""
        return self.named(REGISTER[dtype])

    def load(self, dtype: StoredType, pointer: str, offset: str) -> str:
        """The vector stored as `dtype` at `pointer + offset`, in registers. Every device loads halves as floats."""
        if dtype == "float16":
            return f"vload_half{self.width if self.width > 1 else ''}(0, {pointer} + {offset})"
        raw = f"{pointer}[{offset}]" if self.width == 1 else f"vload{self.width}(0, {pointer} + {offset})"
        return f"convert_{self.of(dtype)}({raw})" if dtype in _NARROW else raw

    def to_stored(self, dtype: DType, value: str) -> str:
        """`value`, in registers, in its stored type; a float is unchanged, since the store rounds it."""
        return f"convert_{self.named(STORED[dtype])}({value})" if dtype in _NARROW else value

    def rounded(self, value: str) -> str:
        """A float `value` in registers, rounded as if it were stored as half and loaded again."""
        return f"fm_to_float16({value}, {self.named('uint')}, {self.named('float')})"

    def literal(self, dtype: DType, value: float | int) -> str:
        """A vector literal with `value` in every element."""
        return f"(({self.of(dtype)})({scalar_literal(dtype, value)}))"

    def wrap(self, dtype: DType, value: str) -> str:
        """`value` truncated to the width of `dtype`: overflow wraps around."""
        if dtype not in _NARROW or dtype == "bool":
            return value
        return f"convert_{self.of(dtype)}(convert_{self.named(STORED[dtype])}({value}))"

    def truth(self, dtype: DType, comparison: str) -> str:
        """A comparison of operands of `dtype` as int 0 or 1; in vectors, true is -1 in the width of their elements."""
        if self.width == 1:
            return f"({comparison})"
        if REGISTER[dtype] in ("long", "ulong"):
            return f"convert_{self.named('int')}(({comparison}) & 1)"
        return f"(({comparison}) & 1)"

    def choose(self, dtype: DType, condition: str, yes: str, no: str) -> str:
        """Select: `yes` where the int `condition` is not 0, else `no`; both of `dtype`."""
        if self.width == 1:
            return f"(({condition}) ? ({yes}) : ({no}))"
        mask = f"({condition}) != ({self.named('int')})(0)"
        if REGISTER[dtype] in ("long", "ulong"):
            wide = self.named("long")
            mask = f"convert_{wide}({condition}) != ({wide})(0)"
        return f"select({no}, {yes}, {mask})"

    def convert(self, source: DType, target: DType, value: str) -> str:
        """Convert the variable `value` from `source` to `target`, in registers: integers wrap, and for bool != 0.

        Floats truncate, see `truncated`.
        """
        if target == "bool":
            return value if source == "bool" else self.truth(source, f"{value} != {self.literal(source, 0)}")
        if REGISTER[source] == REGISTER[target]:
            return self.wrap(target, value)
        if source != "float32":
            return self.wrap(target, f"convert_{self.of(target)}({value})")
        wide: DType = "int64" if target in ("int64", "uint32", "uint64") else "int32"
        limit = 2.0 ** (8 * ITEMSIZE[wide] - 1)
        inside = self.truth(source, f"fabs({value}) < {self.literal(source, limit)}")
        whole = self.choose(wide, inside, f"convert_{self.of(wide)}_rtz({value})", self.literal(wide, -int(limit)))
        if target != "uint64":
            return whole if target == wide else self.convert(wide, target, whole)
        above, below = (self.truth(source, f"{value} {sign}") for sign in (f">= {self.literal(source, limit)}",
                                                                           f"< {self.literal(source, 2 * limit)}"))  # fmt: skip
        large = self.choose(target, below, f"convert_{self.of(target)}_rtz({value})", self.literal(target, 0))
        return self.choose(target, above, large, f"convert_{self.of(target)}({whole})")


def truncated(array: NDArray[Any], target: DType) -> NDArray[Any]:
    """Floats as `Vector.convert` converts them to integers of type `target`, on every machine.

    ONNX leaves NaN and numbers out of range undefined. Here numbers are truncated to int64, for targets of at most 16 bits and
    int32 to int32, and the lower bits count. NaN and what int64 or int32 cannot hold become its smallest number, as processors
    of x86 have it. But numbers from 2^63 on are converted to uint64 exactly, and those from 2^64 on to 0.
    """
    wide: DType = "int64" if target in ("int64", "uint32", "uint64") else "int32"
    limit = 2.0 ** (8 * ITEMSIZE[wide] - 1)
    x = array.astype(np.float64)
    whole = np.where(np.abs(x) < limit, x, -limit).astype(np.int64).astype(target)
    if target != "uint64":
        return whole
    above = x >= limit
    return np.where(above, np.where(above & (x < 2 * limit), x, 0).astype(target), whole)


def scalar_literal(dtype: DType, value: float | int) -> str:
    """`value` as a literal of `dtype` in registers."""
    if dtype == "float32":
        return _float(float(value))
    kind = REGISTER[dtype]
    number = int(value)
    if kind in ("int", "long") and number == -(2 ** (31 if kind == "int" else 63)):  # its absolute value has no literal
        return f"({number + 1}{_SUFFIX[kind]} - 1)"
    return f"{number}{_SUFFIX[kind]}" if number >= 0 else f"({number}{_SUFFIX[kind]})"


def _float(value: float) -> str:
    if math.isnan(value):
        return "NAN"
    with np.errstate(over="ignore"):
        number = np.float32(value)
    if np.isinf(number):
        return "INFINITY" if value > 0 else "(-INFINITY)"
    # Hexadecimal would be exact too; the shortest decimal that gives the same float is easier to read.
    text = np.format_float_scientific(number, unique=True, trim="0")
    return f"({text}f)" if math.copysign(1, value) < 0 else f"{text}f"
