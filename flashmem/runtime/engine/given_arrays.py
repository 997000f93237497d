"""Values that a caller gives as inputs, as numpy arrays: arrays, tensors of other libraries, numbers and lists of numbers.

An array or a tensor has a type of its own, which must be the model's: it is never cast. Numbers have none, or any: they become
the model's type where that is exact. Python's floats are also rounded, to the nearest number of a model's float type, as
`numpy.array(values, dtype)` rounds them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flashmem.program.tensors import numpy_dtype
from flashmem.runtime.engine.output_values import OutputValue

Array = NDArray[Any]
Input = Array | OutputValue
"""An input that is ready for a run: in host memory, or an output of an earlier run on a device."""

_KINDS = "give a numpy array, a tensor on the CPU, or a list of numbers"


class Typed(Protocol):
    """An input or a state: its name, and the name of its element type."""

    @property
    def name(self) -> str:
        """The name in the model."""

    @property
    def dtype(self) -> str:
        """The name of the element type, as numpy has it."""


def described(value: object) -> str:
    """The kind of a value, for a message."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def arrays_by_name(inputs: Any, ports: Iterable[Typed]) -> dict[str, Input]:
    """The inputs as a dict of numpy arrays, and of `OutputValue`s on a device.

    Reads each one once: an .npz file reads an array again at each access.
    Shares memory with arrays and with tensors of the CPU. An input without a port stays unchanged; `check_inputs` refuses it.

    Raises:
        ValueError: not a mapping from names, or a value that is no array and cannot become one of its port's type exactly. Or a
            masked array, whose mask the device would ignore.
    """
    if not isinstance(inputs, Mapping):
        raise ValueError(f"the inputs are {described(inputs)}; give a dict of numpy arrays by name")
    for name in inputs:
        if not isinstance(name, str):
            raise ValueError(f"the inputs are called by {described(name)}; call them by their names as text")
    dtypes = {port.name: port.dtype for port in ports}
    return {name: _array(name, inputs[name], dtypes[name]) if name in dtypes else inputs[name] for name in inputs}


def _array(name: str, value: Any, dtype: str) -> Input:
    if "numpy.ma" in sys.modules and isinstance(value, np.ma.MaskedArray):  # else its import would take 10 ms
        raise ValueError(f"input {name!r} is a masked array; give one without a mask, for instance with filled")
    if isinstance(value, OutputValue):
        return value if value.host is None else value.host
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, np.generic):
        return _exact_scalar(value, numpy_dtype(dtype))
    if isinstance(value, bool | int | float | list | tuple | range):
        return _numbers(name, value, dtype)
    if hasattr(value, "__dlpack__") or hasattr(value, "__array__"):
        return _tensor(name, value)
    raise ValueError(f"input {name!r} is {described(value)}; {_KINDS}")


def _tensor(name: str, value: Any) -> Array:
    """A tensor of another library, in the same memory if it is on the CPU."""
    reason: Exception | None = None
    for protocol, take in (("__dlpack__", np.from_dlpack), ("__array__", np.asarray)):
        if hasattr(value, protocol):
            try:
                return take(value)
            except Exception as error:  # any library's: memory of a GPU, a gradient, a type that numpy lacks
                reason = error
    raise ValueError(f"input {name!r} is {described(value)} that numpy cannot read ({reason}); {_KINDS}") from reason


def _exact_scalar(value: np.generic, target: np.dtype[Any]) -> Array:
    """A numpy scalar, in the type `target` if that is exact; otherwise in its own, which `check_inputs` refuses."""
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" or array.dtype == target:
        return array
    cast = _cast(array, target)
    return cast if _is_exact(array, cast) else array


def _numbers(name: str, value: Any, dtype: str) -> Array:
    """Python's numbers, or lists of numbers, in the type `dtype`."""
    target = numpy_dtype(dtype)
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(f"input {name!r} is {described(value)} whose rows have different lengths; {_KINDS}") from None
    if array.dtype.kind not in "biuf":
        raise ValueError(f"input {name!r} is {described(value)} that does not hold numbers of at most 64 bits; {_KINDS}")
    cast = _cast(array, target)
    if array.dtype.kind == "f" and target.kind not in "biu":  # between floats
        wrong = np.isfinite(array) & ~np.isfinite(cast.astype(np.float64))
    else:
        wrong = ~_equal(array, cast)
    if wrong.any():
        raise ValueError(f"input {name!r} holds {array[wrong].flat[0]}, which is no {dtype}; the model takes {dtype}")
    return cast


def _cast(array: Array, target: np.dtype[Any]) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):
        return array.astype(target)


def _is_exact(array: Array, cast: Array) -> bool:
    return bool(_equal(array, cast).all())


def _equal(array: Array, cast: Array) -> NDArray[np.bool_]:
    """Which elements of `cast` are those of `array`: by comparison, and after the way back, as each alone may round."""
    back = _cast(cast, array.dtype)
    equal: NDArray[np.bool_] = (array == cast) & (array == back) | (array != array) & (cast != cast)
    return equal
