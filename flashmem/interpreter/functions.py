"""OpenCL's built-in functions on numbers of all work-items (OpenCL C 3.0, section 6.15), with their errors (section 7.4)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from flashmem.interpreter.errors import UnknownTextError
from flashmem.interpreter.values import (
    DTYPES,
    ROUNDS,
    Array,
    Number,
    add_errors,
    arithmetic,
    broadcast,
    chosen,
    common,
    convert,
    is_float,
    known,
    promote,
    reinterpret,
    rounded_apart,
    settle,
    unit,
)

Function = Callable[..., Number]

_NAMED: Final = re.compile(r"(convert|as)_([a-z]+?)(\d*)((?:_sat)?(?:_rt[ezpn])?)")


def function(name: str) -> Function | None:
    """The built-in function of this name, if it is known."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    match = _NAMED.fullmatch(name)
    if match is None or match[2] not in DTYPES:
        return None
    dtype = DTYPES[match[2]]
    width = int(match[3] or 1)
    if match[1] == "as":
        return lambda x: reinterpret(x, dtype, width)
    rounding = match[4]
    return lambda x: convert(x, dtype, rounding)


def _float(x: Number) -> Number:
    return x if is_float(x.v) else convert(x, DTYPES["float"])


def _monotone(f: Callable[[Array], Array], ulps: float, *, exact: bool = False) -> Function:
    """A function that only rises or only falls: its error is that of its argument's ends, and `ulps` of its own."""

    def apply(x: Number) -> Number:
        x = _float(x)
        wide = x.v.astype(np.float64)
        v = f(x.v) if exact else f(wide).astype(x.v.dtype)
        at = v.astype(np.float64)
        e: Array | None = 2 * ulps * unit(v) * np.abs(at) if ulps else None
        if x.e is not None:
            ends = [np.abs(f(wide + sign * x.e) - f(wide)) for sign in (-1, 1)]
            e = add_errors(e, np.nan_to_num(np.maximum(*ends), nan=np.inf, posinf=np.inf))
        return Number(v, settle(v, known(e), x))

    return apply


def _bounded_by_argument(f: Callable[[Array], Array], ulps: float) -> Function:
    """sin and cos: they change at most as much as their argument, and are at most 1."""

    def apply(x: Number) -> Number:
        x = _float(x)
        v = f(x.v.astype(np.float64)).astype(x.v.dtype)
        e = np.minimum(2 * ulps * unit(v) * np.abs(v.astype(np.float64)) + (0.0 if x.e is None else x.e), 2.0)
        return Number(v, e)

    return apply


def _tangent(x: Number) -> Number:
    x = _float(x)
    v = np.tan(x.v.astype(np.float64)).astype(x.v.dtype)
    slope = 1.0 + v.astype(np.float64) ** 2
    return Number(v, 10 * unit(v) * np.abs(v) + (0.0 if x.e is None else 2 * slope * x.e))


def _power(x: Number, y: Number) -> Number:
    x, y = common(_float(x), _float(y) if is_float(y.v) else convert(y, x.v.dtype))
    base = x.v.astype(np.float64)
    exponent = y.v.astype(np.float64)
    v = np.power(base, exponent).astype(x.v.dtype)
    size = np.abs(v.astype(np.float64))
    e = 32 * unit(v) * size
    if x.e is not None:
        e = e + np.where(x.e > 0, 2 * size * np.abs(exponent) * x.e / np.abs(base), 0.0)
    if y.e is not None:
        e = e + np.where(y.e > 0, 2 * size * np.abs(np.log(np.abs(base))) * y.e, 0.0)
    return Number(v, np.where(np.isfinite(v), np.where(np.isnan(e), np.inf, e), 0.0))


def _multiply_add(x: Number, y: Number, z: Number) -> Number:
    """x * y + z rounded once or twice: mad() may be anything near, and fma() of a device that has none is slow, not wrong."""
    if not x.v.dtype == y.v.dtype == z.v.dtype or not x.v.ndim == y.v.ndim == z.v.ndim:
        x, y = common(x, y)
        x, z = common(x, z)
        y, z = common(y, z)
    if not is_float(x.v):
        raise UnknownTextError("mad() of integers")
    product = np.multiply(x.v, y.v, dtype=np.float64)
    v = np.add(product, z.v).astype(x.v.dtype)
    if z.v.size == 1 and abs(z.v.item()) == ROUNDS:
        once = unit(v) * np.abs(product)
        carried = arithmetic("*", x, y).e if x.e is not None or y.e is not None else None
        return Number(v, settle(v, rounded_apart(v, product + z.v, once if carried is None else once + carried), x, y, z))
    bound = np.abs(product) + np.abs(v)
    bound *= unit(v)
    if x.e is not None or y.e is not None:
        bound = bound + arithmetic("*", x, y).e
    if z.e is not None:
        bound = bound + z.e
    return Number(v, settle(v, bound, x, y, z))


def _exact_multiply_add(x: Number, y: Number, z: Number) -> Number:
    """fma(x, y, z), rounded once."""
    made = _multiply_add(x, y, z)
    errors = [each.e for each in (x, y, z)]
    if all(e is None for e in errors):
        twice = 2.0**-28 * unit(made.v) * np.abs(made.v.astype(np.float64))  # NumPy has no fma: this one is rounded twice
        return Number(made.v, settle(made.v, twice))
    return made


def _larger(x: Number, y: Number) -> Number:
    x, y = common(x, y)
    f = np.fmax if is_float(x.v) else np.maximum
    return Number(f(x.v, y.v), _larger_error(x, y))


def _lesser(x: Number, y: Number) -> Number:
    x, y = common(x, y)
    f = np.fmin if is_float(x.v) else np.minimum
    return Number(f(x.v, y.v), _larger_error(x, y))


def _larger_error(x: Number, y: Number) -> Array | None:
    if x.e is None or y.e is None:
        return x.e if y.e is None else y.e
    return np.maximum(x.e, y.e)


def _within(x: Number, low: Number, high: Number) -> Number:
    return _lesser(_larger(x, low), high)


def _select(no: Number, yes: Number, condition: Number) -> Number:
    """select(a, b, c): b where c is not zero, of vectors where its highest bit is set."""
    no, yes = common(no, yes)
    if condition.v.ndim == 2:
        condition = Number((condition.v < 0).astype(np.int32), condition.e)
    return chosen(condition, yes, no)


def _test(f: Callable[[Array], Array]) -> Function:
    def apply(x: Number) -> Number:
        x = _float(x)
        doubt = None if x.e is None else known((~np.isfinite(x.e)).astype(np.float64))
        holds = f(x.v)
        if holds.ndim == 1:
            return Number(holds.astype(np.int32), doubt)
        return Number(np.negative(holds.astype(np.int32 if x.v.dtype.itemsize == 4 else np.int16)), doubt)

    return apply


def _reduce_elements(x: Number, join: Any) -> Number:
    """any() and all(): of the highest bits of a vector's elements."""
    if x.v.ndim == 1:
        return Number((x.v < 0).astype(np.int32), x.e)
    doubt = None if x.e is None else np.asarray((x.e > 0).any(1), np.float64)
    return Number(np.asarray(join(x.v < 0, 1), np.int32), known(doubt))


def _any(x: Number) -> Number:
    return _reduce_elements(x, np.any)


def _all(x: Number) -> Number:
    return _reduce_elements(x, np.all)


def _remainder(x: Number, y: Number) -> Number:
    x, y = common(x, y)
    v = np.fmod(x.v, y.v)
    total = add_errors(x.e, y.e)
    if total is None:
        return Number(v)
    inside = (np.abs(v) > total) & (np.abs(v) + total < np.abs(y.v)) & (x.e is not None) & (y.e is None)
    return Number(v, known(np.where(total > 0, np.where(inside, total, np.inf), 0.0)))


def _dot(x: Number, y: Number) -> Number:
    total: Number | None = None
    for k in range(x.width):
        a = Number(x.v[:, k], None if x.e is None else x.e[:, k])
        b = Number(y.v[:, k], None if y.e is None else y.e[:, k])
        product = arithmetic("*", a, b)
        total = product if total is None else arithmetic("+", total, product, np.abs(product.v).astype(np.float64))
    assert total is not None
    return total


def _even_cosine(x: Number) -> Number:
    """cosh: even, so that it rises with the size of its argument."""
    return _monotone(np.cosh, 4)(_absolute(_float(x)))


def _sign(x: Number) -> Number:
    x = _float(x)
    doubt = None if x.e is None else known(np.where(np.abs(x.v) <= x.e, 2.0, 0.0) * (x.e > 0))
    return Number(np.where(np.isnan(x.v), 0, np.sign(x.v)).astype(x.v.dtype), doubt)


def _copysign(x: Number, y: Number) -> Number:
    x, y = common(x, y)
    e = x.e
    if y.e is not None:
        e = add_errors(e, np.where((np.abs(y.v) <= y.e) & (y.e > 0), 2 * np.abs(x.v).astype(np.float64), 0.0))
    return Number(np.copysign(x.v, y.v), known(e))


def _high_product(x: Number, y: Number) -> Number:
    x, y = common(x, y)
    if x.v.dtype.itemsize > 4:
        raise UnknownTextError("mul_hi() of 64 bits")
    wide = np.int64 if x.v.dtype.kind == "i" else np.uint64
    v = (x.v.astype(wide) * y.v.astype(wide) >> np.array(8 * x.v.dtype.itemsize, wide)).astype(x.v.dtype)
    return Number(v, None if x.e is None and y.e is None else np.full(v.shape, np.inf))


def _absolute(x: Number) -> Number:
    if is_float(x.v):
        return Number(np.abs(x.v), x.e)
    x = promote(x)
    return Number(np.abs(x.v).astype(x.v.dtype.name.replace("int", "uint").replace("uuint", "uint")), x.e)


def _saturate(sign: str) -> Function:
    def apply(x: Number, y: Number) -> Number:
        x, y = common(x, y) if x.v.dtype != y.v.dtype else (x, y)
        limits = np.iinfo(x.v.dtype)
        wide = x.v.astype(np.int64) + y.v if sign == "+" else x.v.astype(np.int64) - y.v
        return Number(np.clip(wide, limits.min, limits.max).astype(x.v.dtype), add_errors(x.e, y.e))

    return apply


def _exact_table() -> dict[str, Function]:
    floor: dict[str, Any] = {"floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "rint": np.rint}
    return {name: _monotone(f, 0.0, exact=True) for name, f in floor.items()}


def _rounded_away(v: Array) -> Array:
    return np.copysign(np.floor(np.abs(v) + 0.5), v)


def _erf(v: Array) -> Array:
    made: Array = np.vectorize(math.erf, otypes=[np.float64])(v)
    return made


def _wide_product(x: Number, y: Number) -> Number:
    return arithmetic("*", x, y)


def _wide_multiply_add(x: Number, y: Number, z: Number) -> Number:
    return arithmetic("+", arithmetic("*", x, y), z)


def _scalbn(x: Number, n: Number) -> Number:
    if x.v.ndim == 2 and n.v.ndim == 1:
        n = broadcast(n)
    scale = np.exp2(n.v.astype(np.float64))
    return Number((x.v.astype(np.float64) * scale).astype(x.v.dtype), None if x.e is None else x.e * scale)


_FUNCTIONS: Final[dict[str, Function]] = {
    **_exact_table(),
    "round": _monotone(_rounded_away, 0.0, exact=True),
    "exp": _monotone(np.exp, 4),
    "exp2": _monotone(np.exp2, 4),
    "exp10": _monotone(lambda v: np.power(10.0, v), 4),
    "expm1": _monotone(np.expm1, 4),
    "log": _monotone(np.log, 4),
    "log2": _monotone(np.log2, 4),
    "log10": _monotone(np.log10, 4),
    "log1p": _monotone(np.log1p, 4),
    "sqrt": _monotone(np.sqrt, 4),
    "rsqrt": _monotone(lambda v: 1.0 / np.sqrt(v), 4),
    "cbrt": _monotone(np.cbrt, 4),
    "tanh": _monotone(np.tanh, 5),
    "sinh": _monotone(np.sinh, 4),
    "asin": _monotone(np.arcsin, 4),
    "acos": _monotone(np.arccos, 4),
    "atan": _monotone(np.arctan, 5),
    "asinh": _monotone(np.arcsinh, 4),
    "acosh": _monotone(np.arccosh, 4),
    "atanh": _monotone(np.arctanh, 5),
    "erf": _monotone(_erf, 16),
    "erfc": _monotone(lambda v: 1.0 - _erf(v), 16),
    "cosh": _even_cosine,
    "sin": _bounded_by_argument(np.sin, 4),
    "cos": _bounded_by_argument(np.cos, 4),
    "tan": _tangent,
    "pow": _power,
    "powr": _power,
    "fma": _exact_multiply_add,
    "mad": _multiply_add,
    "mad24": _wide_multiply_add,
    "mul24": _wide_product,
    "mul_hi": _high_product,
    "fmax": _larger,
    "max": _larger,
    "fmin": _lesser,
    "min": _lesser,
    "clamp": _within,
    "select": _select,
    "isnan": _test(np.isnan),
    "isinf": _test(np.isinf),
    "isfinite": _test(np.isfinite),
    "signbit": _test(np.signbit),
    "any": _any,
    "all": _all,
    "fmod": _remainder,
    "dot": _dot,
    "sign": _sign,
    "copysign": _copysign,
    "fabs": _absolute,
    "abs": _absolute,
    "add_sat": _saturate("+"),
    "sub_sat": _saturate("-"),
    "ldexp": _scalbn,
}
