"""The types of a bundle's fields: each field of a dataclass that was read has its declared type, and numbers are in range."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

from flashmem.base.errors import BundleError
from flashmem.program.launches import Arg

_LARGEST = 2**62  # keeps sums of offsets and sizes within 64 bits
_LARGEST_FLOAT = float(np.finfo(np.float32).max)

Checker = Callable[[Any], bool]


def check_types(data: Any, where: str) -> None:
    """Raise BundleError unless every field of the dataclass `data`, at any depth, has its declared type.

    Integers must be between 0 and 2**62, except numbers for kernels. Whole numbers among floats must be within 2**62 too.
    """
    kind: Any = type(data)
    if not _checker(kind)(data):
        raise BundleError(f"{where} of the bundle holds a value of the wrong type or range; compile the model again")


@functools.cache
def _checker(declared: Any) -> Checker:
    """A function that checks whether a value has the type `declared`, created once for each type."""
    origin = get_origin(declared)
    arguments = get_args(declared)
    if declared is int:
        return lambda value: type(value) is int and 0 <= value < _LARGEST
    if declared is float:  # JSON has whole numbers of any size; one of 400 digits is no float
        return lambda value: not math.isnan(value) if type(value) is float else type(value) is int and abs(value) < _LARGEST
    if origin is Literal:
        return lambda value: type(value) is str and value in arguments
    if origin in (Union, types.UnionType):
        options = [_checker(option) for option in arguments]
        return lambda value: any(option(value) for option in options)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            item = _checker(arguments[0])
            return lambda value: type(value) is tuple and all(map(item, value))
        items = [_checker(argument) for argument in arguments]
        return lambda value: (
            type(value) is tuple and len(value) == len(items) and all(ok(v) for ok, v in zip(items, value, strict=True))
        )
    if origin is dict:
        key, item = map(_checker, arguments)
        return lambda value: type(value) is dict and all(map(key, value)) and all(map(item, value.values()))
    if is_dataclass(declared):
        return _dataclass_checker(declared)
    return lambda value: type(value) is declared


def _dataclass_checker(declared: Any) -> Checker:
    if declared is Arg:
        return _is_arg
    hints = get_type_hints(declared)
    parts = [(field.name, _checker(hints[field.name])) for field in fields(declared)]
    return lambda value: type(value) is declared and all(ok(getattr(value, name)) for name, ok in parts)


_ARG_VALUES: dict[Any, tuple[type, ...]] = {
    "tensor": (str,), "slice": (str,), "constant": (int,), "int": (int,), "float": (int, float),
}  # fmt: skip


def _is_arg(value: Any) -> bool:
    """Whether an `Arg` has a value for its kind. Numbers may be negative, and must fit 32 bits; a float may be no number."""
    if type(value) is not Arg or type(value.kind) is not str or type(value.value) not in _ARG_VALUES.get(value.kind, ()):
        return False
    if type(value.nbytes) is not int or not 0 <= value.nbytes < _LARGEST:
        return False
    if value.kind == "float":
        number = cast(float, value.value)
        return abs(number) <= _LARGEST_FLOAT or (type(number) is float and not math.isfinite(number))
    return value.kind != "int" or -(2**31) <= cast(int, value.value) < 2**31
