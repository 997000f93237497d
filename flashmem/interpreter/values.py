"""Numbers of all work-items at a time, with their type and a bound of their rounding error.

A number has an array `v` of its OpenCL type: one element a work-item, or `width` in a row; of one row if all work-items have
the same. Arithmetic is that of the type: floats are rounded after each operation, integers wrap.

`e` bounds how far another correct implementation may be from `v` (running error analysis: Higham, Accuracy and Stability of
Numerical Algorithms, 2002, section 3.3). None is zero everywhere. An error begins where OpenCL leaves freedom: a product that
is added may be fused; a division and each function has the error in ULP that the specification allows (OpenCL 3.0, section 7.4,
the larger of the full and the embedded profile). From there it is carried on. An integer has an error if it comes from a number
that could be on the other side of a comparison or rounding: infinite, if what follows from it is not known.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashmem.interpreter.errors import UnknownTextError
from flashmem.interpreter.syntax import Type

Array = NDArray[Any]

DTYPES: Final[dict[str, Any]] = {
    "bool": np.dtype(np.int32), "char": np.dtype(np.int8), "uchar": np.dtype(np.uint8), "short": np.dtype(np.int16),
    "ushort": np.dtype(np.uint16), "int": np.dtype(np.int32), "uint": np.dtype(np.uint32), "long": np.dtype(np.int64),
    "ulong": np.dtype(np.uint64), "size_t": np.dtype(np.uint64), "float": np.dtype(np.float32), "half": np.dtype(np.float16),
    "double": np.dtype(np.float64),
}  # fmt: skip

INT: Final = DTYPES["int"]
_SIGNED: Final[dict[int, Any]] = {1: np.dtype(np.int8), 2: np.dtype(np.int16), 4: np.dtype(np.int32), 8: np.dtype(np.int64)}
_ROUNDING: Final = {2: 2.0**-11, 4: 2.0**-24, 8: 2.0**-53}  # half a unit in the last place of 1, by size
_RANK: Final = {
    np.dtype(t): rank for rank, t in enumerate((np.int32, np.uint32, np.int64, np.uint64, np.float16, np.float32, np.float64))
}


class Number:
    """A number of each work-item; see the module."""

    __slots__ = ("e", "v")

    def __init__(self, v: Array, e: Array | None = None) -> None:
        self.v = v
        self.e = e

    @property
    def width(self) -> int:
        """Elements of its vector; 1 for a scalar."""
        return self.v.shape[1] if self.v.ndim == 2 else 1

    @property
    def is_uniform(self) -> bool:
        """Whether all work-items have the same, known as one row."""
        return len(self.v) == 1


def number(value: float, kind: str) -> Number:
    """The same number for all work-items."""
    return Number(np.array([value]).astype(DTYPES[kind]))


def known(e: Array | None) -> Array | None:
    """An error bound; None if it is zero everywhere."""
    return e if e is not None and e.any() else None


def add_errors(*errors: Array | None) -> Array | None:
    """The sum of error bounds."""
    total: Array | None = None
    for e in errors:
        if e is not None:
            total = e if total is None else total + e
    return total


def is_float(v: Array) -> bool:
    """Whether an array has floating-point numbers."""
    return bool(v.dtype.kind == "f")


def unit(v: Array) -> float:
    """The relative rounding error of one operation."""
    return _ROUNDING[v.dtype.itemsize]


def convert(x: Number, dtype: Any, rounding: str = "") -> Number:
    """`x` in another type: integers wrap, floats are rounded to even, and cut at the point on the way to integers.

    `rounding`: "rte" rounds a float to the next integer, ties to even; "sat" in it limits to the type's range.
    """
    v = x.v
    e = x.e
    if v.dtype == dtype:
        return x
    if is_float(v) and dtype.kind in "iu":
        whole = _whole(v, dtype, rounding)
        if e is None:
            return Number(whole)
        low, high = (_whole((v.astype(np.float64) + sign * e), dtype, rounding).astype(np.float64) for sign in (-1, 1))
        at = whole.astype(np.float64)
        return Number(whole, known(np.where(np.isfinite(e), np.maximum(at - low, high - at), np.inf)))
    if dtype.kind == "f" and v.dtype.kind == "f":
        new = v.astype(dtype)
        if e is None or dtype.itemsize >= v.dtype.itemsize:
            return Number(new, e)
        exact = v.astype(np.float64)
        near = [np.abs((exact + sign * e).astype(dtype).astype(np.float64) - new.astype(np.float64)) for sign in (-1, 1)]
        return Number(new, known(np.where(np.isfinite(e), np.nan_to_num(np.maximum(*near), nan=np.inf), np.inf)))
    if "sat" in rounding and v.dtype.kind in "iu":
        limits = np.iinfo(dtype)
        own = np.iinfo(v.dtype)
        v = np.clip(v, max(limits.min, own.min), min(limits.max, own.max))
    return Number(v.astype(dtype), e)


def _whole(v: Array, dtype: Any, rounding: str) -> Array:
    """Floats as integers, limited to the type's range: what OpenCL says of larger ones is nothing."""
    limits = np.iinfo(dtype)
    cut = (
        np.rint(v)
        if "rte" in rounding
        else np.floor(v)
        if "rtn" in rounding
        else np.ceil(v)
        if "rtp" in rounding
        else np.trunc(v)
    )
    wide = np.nan_to_num(cut.astype(np.float64), nan=0.0)
    inside = np.clip(wide, float(limits.min), float(limits.max))
    if dtype.itemsize < 8:
        return inside.astype(dtype)
    top = inside >= 2.0 ** (63 if dtype.kind == "i" else 64)
    return np.where(top, limits.max, np.where(top, 0, inside).astype(dtype))


def reinterpret(x: Number, dtype: Any, width: int) -> Number:
    """The same bits as another type."""
    v = np.ascontiguousarray(x.v)
    rows = v.shape[0]
    new = v.reshape(rows, -1).view(dtype)
    if new.shape[1] != width:
        raise UnknownTextError("as_type between types of different sizes")
    made = new if width > 1 else new[:, 0]
    if x.e is None:
        return Number(made)
    if v.dtype.itemsize != dtype.itemsize:
        doubtful = np.where(x.e.reshape(rows, -1).any(1), np.inf, 0.0)
        return Number(made, known(np.repeat(doubtful[:, None], width, 1) if width > 1 else doubtful))
    if is_float(v) and dtype.kind in "iu":  # neighbouring floats have neighbouring bits
        apart = np.ceil(x.e / np.spacing(np.abs(v) + np.array(0, v.dtype)).astype(np.float64)) + 1.0
        return Number(made, known(np.where(x.e > 0, apart, 0.0)))
    if dtype.kind == "f" and v.dtype.kind in "iu":
        return Number(
            made, known(np.where(x.e > 0, np.where(x.e < 2**20, (x.e + 1.0) * np.spacing(np.abs(made)), np.inf), 0.0))
        )
    return Number(made, x.e)


def common(a: Number, b: Number) -> tuple[Number, Number]:
    """Two operands in one type and width (ISO C99 6.3.1.8, OpenCL C 6.2.6)."""
    if a.v.ndim != b.v.ndim:
        if a.v.ndim == 1:
            return broadcast(convert(a, b.v.dtype)), b
        return a, broadcast(convert(b, a.v.dtype))
    if a.v.dtype == b.v.dtype and (a.v.ndim == 2 or a.v.dtype in _RANK):
        return a, b
    if a.v.ndim == 2:
        raise UnknownTextError("an operator between vectors of different types")
    a = promote(a)
    b = promote(b)
    dtype = a.v.dtype if _RANK[a.v.dtype] >= _RANK[b.v.dtype] else b.v.dtype
    return convert(a, dtype), convert(b, dtype)


def promote(x: Number) -> Number:
    """A scalar narrower than int as int."""
    return x if x.v.dtype in _RANK or x.v.ndim == 2 else convert(x, INT)


def broadcast(x: Number) -> Number:
    """A scalar as a vector of one column, which NumPy repeats."""
    return Number(x.v[:, None], None if x.e is None else x.e[:, None])


def of_width(x: Number, type_: Type) -> Number:
    """`x` as a value of a declared type: converted, a scalar repeated for a vector."""
    made = convert(x, DTYPES[type_.name])
    if type_.name == "bool":
        made = truth(made)
    if type_.width == 1:
        return made
    if made.v.ndim == 1:
        made = broadcast(made)
    if made.v.shape[1] == type_.width:
        return made
    if made.v.shape[1] != 1:
        raise UnknownTextError(f"a vector of {made.v.shape[1]} elements for {type_.width}")
    return Number(_repeat(made.v, type_.width), None if made.e is None else _repeat(made.e, type_.width))


def _repeat(column: Array, width: int) -> Array:
    """One column as `width` of them; several times faster than numpy.broadcast_to for a few work-items."""
    made = np.empty((len(column), width), column.dtype)
    made[...] = column
    return made


def truth(x: Number) -> Number:
    """1 where a scalar is not zero, else 0."""
    return Number((x.v != 0).astype(np.int32), _doubtful(x.v, np.zeros((), x.v.dtype), x.e))


def _doubtful(a: Array, b: Array, e: Array | None) -> Array | None:
    """1 where numbers are as near as their errors, so that a comparison may go either way."""
    if e is None:
        return None
    near = (np.abs(a.astype(np.float64) - b.astype(np.float64)) <= e) & (e > 0) | ~np.isfinite(e)
    return near.astype(np.float64) if near.any() else None


def compare(sign: str, a: Number, b: Number) -> Number:
    """A comparison: 1 for scalars and -1 for vectors where it holds."""
    a, b = common(a, b)
    holds = _COMPARE[sign](a.v, b.v)
    e = _doubtful(a.v, b.v, add_errors(a.e, b.e))
    if holds.ndim == 1:
        return Number(holds.astype(np.int32), e)
    return Number(np.negative(holds.astype(_SIGNED[a.v.dtype.itemsize])), e)


_COMPARE: Final = {
    "==": np.equal, "!=": np.not_equal, "<": np.less, ">": np.greater, "<=": np.less_equal, ">=": np.greater_equal,
}  # fmt: skip


def arithmetic(sign: str, a: Number, b: Number, fused: Array | None = None, literal: bool = False) -> Number:
    """a + b, a - b, a * b, a / b, a % b of numbers or vectors.

    `fused`: the size of a product among the operands of a sum, which a driver may leave unrounded. `literal`: an operand is
    written in the text, and the sum is rounded as the text wants it.
    """
    a, b = common(a, b)
    if not is_float(a.v):
        return _integers(sign, a, b)
    if sign in "+-":
        v = a.v + b.v if sign == "+" else a.v - b.v
        e = add_errors(a.e, b.e)
        if fused is not None:
            e = add_errors(e, unit(v) * fused)
        if e is not None and literal:
            e = rounded_apart(v, np.add(a.v, b.v if sign == "+" else -b.v, dtype=np.float64), e)
        elif e is not None:
            e = e + unit(v) * np.abs(v).astype(np.float64)
        return Number(v, settle(v, e, a, b))
    if sign == "*":
        v = a.v * b.v
        return Number(v, settle(v, _product_error(a, b), a, b))
    if sign == "/":
        return quotient(a, b, 3.0)
    raise UnknownTextError(f"the operator {sign} between floats")


def _product_error(a: Number, b: Number) -> Array | None:
    if a.e is None and b.e is None:
        return None
    parts: list[Array | None] = []
    if a.e is not None:
        parts.append(a.e * np.abs(b.v))
    if b.e is not None:
        parts.append(b.e * np.abs(a.v))
    if a.e is not None and b.e is not None:
        parts.append(a.e * b.e)
    return no_nan(add_errors(*parts))


def no_nan(e: Array | None) -> Array | None:
    """An error bound in which NaN (infinite times zero) is infinite."""
    return None if e is None else np.where(np.isnan(e), np.inf, e)


ROUNDS: Final = 12582912.0
"""1.5 * 2^23: a float that is added to it is rounded to an integer, which the last bits of the sum are."""


def rounded_apart(v: Array, exact: Array, e: Array) -> Array | None:
    """The error of `v`, an `exact` sum that is rounded, if the sum has the error `e`: none, unless it is near a tie.

    A sum with a number of the text may be meant to round (`ROUNDS`), so that `e` by itself says nothing of `v`.
    """
    ends = [np.abs((exact + sign * e).astype(v.dtype).astype(np.float64) - v) for sign in (-1, 1)]
    return known(np.maximum(*ends))


def settle(v: Array, e: Array | None, *operands: Number) -> Array | None:
    """An error bound; of results that are infinite or NaN it is zero, if the operands' are finite, as nothing is near them."""
    if e is None or math.isfinite(e.sum()):  # an infinite number has an infinite bound, or NaN
        return e
    known_operands = np.ones((1,) * v.ndim, bool)
    for x in operands:
        if x.e is not None:
            known_operands = known_operands & np.isfinite(x.e)
    return np.where(np.isfinite(v), np.where(np.isnan(e), np.inf, e), np.where(known_operands, 0.0, np.inf))


def quotient(a: Number, b: Number, ulps: float) -> Number:
    """a / b, at most `ulps` units wrong."""
    v = a.v / b.v
    size = np.abs(v).astype(np.float64)
    e = 2 * unit(v) * ulps * size
    if a.e is not None or b.e is not None:
        below = np.abs(b.v).astype(np.float64) - (0.0 if b.e is None else b.e)
        carried = ((0.0 if a.e is None else a.e) + size * (0.0 if b.e is None else b.e)) / np.where(below > 0, below, np.nan)
        e = e + np.where(np.isnan(carried), np.inf, carried)
    return Number(v, settle(v, no_nan(e), a, b))


def _integers(sign: str, a: Number, b: Number) -> Number:
    doubtful = a.e is not None or b.e is not None
    if sign == "+":
        return Number(a.v + b.v, add_errors(a.e, b.e))
    if sign == "-":
        return Number(a.v - b.v, add_errors(a.e, b.e))
    if sign == "*":
        return Number(a.v * b.v, _product_error(a, b) if doubtful else None)
    if sign not in "/%":
        raise UnknownTextError(f"the operator {sign}")
    divisor = np.where(b.v == 0, np.ones((), b.v.dtype), b.v)  # of work-items that do not take part
    rest = np.fmod(a.v, divisor)
    v = rest if sign == "%" else (a.v - rest) // divisor
    return Number(v, _unknown(a, b) if doubtful else None)


def _unknown(*given: Number) -> Array | None:
    """Infinite where an operand has an error."""
    total = add_errors(*(x.e for x in given))
    return None if total is None else known(np.where(total > 0, np.inf, 0.0))


def bitwise(sign: str, a: Number, b: Number) -> Number:
    """a & b, a | b, a ^ b, a << b, a >> b of integers."""
    if sign in ("<<", ">>"):
        a = promote(a)
        if a.v.ndim == 2 and b.v.ndim == 1:
            b = broadcast(b)
        amount = (b.v.astype(np.int64) & (8 * a.v.dtype.itemsize - 1)).astype(a.v.dtype)
        if sign == ">>":
            return Number(a.v >> amount, _unknown(a, b) if a.e is not None or b.e is not None else None)
        scaled = None if a.e is None else a.e * np.exp2(amount.astype(np.float64))
        return Number(a.v << amount, scaled if b.e is None else _unknown(a, b))
    a, b = common(a, b)
    if is_float(a.v):
        raise UnknownTextError(f"the operator {sign} between floats")
    v = a.v & b.v if sign == "&" else a.v | b.v if sign == "|" else a.v ^ b.v
    e = _unknown(a, b) if a.e is not None or b.e is not None else None
    if e is not None and ((a.v == 0) | (a.v == 1) | (a.v == -1)).all() and ((b.v == 0) | (b.v == 1) | (b.v == -1)).all():
        e = _logic_error(sign, a, b)  # results of comparisons
    return Number(v, e)


def _logic_error(sign: str, a: Number, b: Number) -> Array | None:
    """The doubt that remains when truths are joined: a known operand may decide alone."""
    left = np.zeros(()) if a.e is None else np.minimum(a.e, 1)
    right = np.zeros(()) if b.e is None else np.minimum(b.e, 1)
    if sign == "&":
        left, right = left * ((b.v != 0) | (right > 0)), right * ((a.v != 0) | (left > 0))
    if sign == "|":
        left, right = left * ((b.v == 0) | (right > 0)), right * ((a.v == 0) | (left > 0))
    return known(np.minimum(left + right, 1.0))


def chosen(condition: Number, yes: Number, no: Number) -> Number:
    """`yes` where a condition is not 0, else `no`, of one type; with their difference as error where it is doubtful."""
    holds = condition.v != 0
    if holds.ndim == 1 and (yes.v.ndim == 2 or no.v.ndim == 2):
        holds = holds[:, None]
    v = np.where(holds, yes.v, no.v)
    e: Array | None = None
    if yes.e is not None or no.e is not None:
        zero = np.zeros((1,) * v.ndim)
        e = np.where(holds, zero if yes.e is None else yes.e, zero if no.e is None else no.e)
    if condition.e is not None:
        doubt = condition.e if condition.e.ndim == v.ndim else condition.e[:, None]
        apart = np.abs(yes.v.astype(np.float64) - no.v.astype(np.float64))
        apart = np.where(np.isnan(apart), np.inf, apart)
        wide = add_errors(yes.e, no.e)
        e = np.where(doubt > 0, apart + (0.0 if wide is None else wide), 0.0 if e is None else e)
    return Number(v, known(e))
