"""Inputs that the caller fixes when a model is compiled: they become constants, and branches on them are folded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from flashmem.base.errors import UserError


def fix_inputs(
    model: onnx.ModelProto, constants: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], path: Path
) -> dict[str, tuple[int, ...]]:
    """Make constants of the inputs that `constants` names, in place; returns `shapes` without theirs.

    An input with a default, which is an initializer too, gets the value in its place. A value is a number, or nested sequences
    of numbers in the input's shape. One number fills an input of any static shape.

    Raises:
        UserError: no such input, or a value of another shape or that its type cannot hold.
    """
    defaults = {tensor.name: tensor for tensor in model.graph.initializer}
    inputs = {value.name: value for value in model.graph.input}
    for name, value in constants.items():
        if name not in inputs:
            needed = ", ".join(each for each in inputs if each not in defaults) or "none"
            raise UserError(f"{path} has no input {name!r} to make a constant of: its inputs are {needed}")
        declared = inputs[name]
        if not declared.type.HasField("tensor_type"):
            raise UserError(f"input {name!r} of {path} is not a tensor, and cannot be a constant")
        array = _converted(name, value, helper.tensor_dtype_to_np_dtype(declared.type.tensor_type.elem_type))
        array = _shaped(name, array, shapes.get(name), declared)
        if name in defaults:
            model.graph.initializer.remove(defaults[name])
        model.graph.initializer.append(numpy_helper.from_array(array, name))
        model.graph.input.remove(declared)
    return {name: shape for name, shape in shapes.items() if name not in constants}


def _converted(name: str, value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    try:
        given = np.asarray(value)
        with np.errstate(all="ignore"):
            array = given.astype(dtype)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"the constant for input {name!r} is no array of numbers") from None
    lost = array != given if dtype.kind in "iub" else ~np.isfinite(array) & np.isfinite(given)
    if given.dtype.kind not in "iubf" or np.any(lost):
        raise UserError(f"the constant for input {name!r} has a value that {dtype.name} cannot hold")
    return array


def _shaped(name: str, array: NDArray[Any], shape: tuple[int, ...] | None, declared: onnx.ValueInfoProto) -> NDArray[Any]:
    tensor = declared.type.tensor_type
    if shape is None and tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim):
        shape = tuple(dim.dim_value for dim in tensor.shape.dim)
    if shape is None:
        rank = len(tensor.shape.dim) if tensor.HasField("shape") else array.ndim
        if rank != array.ndim:
            raise UserError(
                f"the constant for input {name!r} has shape {array.shape}, and the input {rank} dimensions, some of them open; "
                f"give its shape too, with --shape"
            )
        return array
    if array.size == math.prod(shape):
        return array.reshape(shape)
    if array.size == 1:
        return np.full(shape, array.reshape(())[()])
    raise UserError(f"the constant for input {name!r} has shape {array.shape}, and the input has {shape}")
