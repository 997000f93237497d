"""OpenCL vector types, and the parts of expressions that depend on them.

A tensor is *stored* in the width of its element type; floats may be stored as half, rounded to the nearest, ties to even. In
*registers* five types exist: float, int, uint, long and ulong. Booleans and integers narrower than 32 bits are computed as int.
After every operator they are truncated to their width (`wrap`), so that they overflow like their type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flashmem.base.types import DType, StoredType

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
        """Convert `value` from `source` to `target`, in registers: floats truncate, integers wrap, and for bool != 0."""
        if target == "bool":
            return value if source == "bool" else self.truth(source, f"{value} != {self.literal(source, 0)}")
        if REGISTER[source] == REGISTER[target]:
            return self.wrap(target, value)
        if source == "float32" and target == "uint32":  # through a wider type, so that negative numbers wrap
            return f"convert_{self.of(target)}(convert_{self.named('long')}_rtz({value}))"
        rounding = "_rtz" if source == "float32" else ""
        return self.wrap(target, f"convert_{self.of(target)}{rounding}({value})")


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
