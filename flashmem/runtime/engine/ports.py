"""Inputs and outputs of a model: checks, and conversion to and from the types of the device.

The device keeps integers and booleans unchanged. All floats are float32 there, or float16 where the model has float16 and the
program stores it. No cast of an array is silent: an input must have the dtype that its port names. numpy has bfloat16 through
the package ml_dtypes, a dependency of onnx.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from flashmem.base.types import StoredType
from flashmem.bundle.shape_variants import which_fits
from flashmem.program.tensors import ONNX_NAMES, HostEmbeddingLookup, Port, State, Tensor, numpy_dtype
from flashmem.runtime.engine.given_arrays import Input, described
from flashmem.runtime.engine.output_values import OutputValue
from flashmem.runtime.streaming.weight_file import Reader

Array = NDArray[Any]

_SCRATCH_BYTES = 1 << 17  # of table rows that are converted together


def chosen_outputs(ports: Sequence[Port], output_names: Any) -> list[str]:
    """The requested outputs, or all for None. Raises ValueError for anything but a sequence of one or more names of `ports`."""
    outputs = [port.name for port in ports]
    if output_names is None:
        return outputs
    if not isinstance(output_names, Sequence) or isinstance(output_names, str | bytes):
        raise ValueError(f"the requested outputs are {described(output_names)}; give a list of names, or None for all")
    if not output_names:
        raise ValueError("no output is requested; name at least one, or give None for all")
    for name in output_names:
        if not isinstance(name, str):
            raise ValueError(f"the requested outputs contain {described(name)}; give their names as text")
        if name not in outputs:
            raise ValueError(f"the model has no output {name!r}; it gives: {', '.join(outputs)}")
    return list(output_names)


@dataclass(frozen=True)
class TensorInfo:
    """An input or output in the words of ONNX Runtime's `NodeArg`.

    `shape` has None for a size that depends on data, or that differs between the shape variants of a bundle. `type` is as in
    `tensor(float)`.
    """

    name: str
    shape: list[int | None]
    type: str


PROVIDER = "OpenCLExecutionProvider"
"""What runs a model, in the form of ONNX Runtime's names of its providers."""


def tensor_infos(variants: Sequence[Sequence[Port]]) -> list[TensorInfo]:
    """The ports of a bundle with these shape variants, which have the same names and types."""
    infos = []
    for ports in zip(*variants, strict=True):
        sizes = [set(each) for each in zip(*(port.shape for port in ports), strict=True)]
        shape = [size.pop() if len(size) == 1 else None for size in sizes]
        if ports[0].count is not None:
            shape[ports[0].axis] = None
        name = ONNX_NAMES.get(ports[0].dtype, ports[0].dtype)
        infos.append(TensorInfo(ports[0].name, shape, f"tensor({name})"))
    return infos


ArrayTypes = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""The dtype and the shape of arrays, by name."""


def array_types(ports: Sequence[Port]) -> ArrayTypes:
    """What `check_inputs` accepts for `ports`. Raises ValueError like `numpy_dtype`."""
    return {port.name: (numpy_dtype(port.dtype), port.shape) for port in ports}


def are_exactly(types: ArrayTypes, inputs: Any) -> bool:
    """Whether `inputs` is a dict of exactly such numpy arrays, which need no other check. Most inputs of later runs are."""
    if type(inputs) is not dict or len(inputs) != len(types):
        return False
    for name, (dtype, shape) in types.items():
        array = inputs.get(name)
        if type(array) is not np.ndarray or array.dtype != dtype or array.shape != shape:
            return False
    return True


def check_inputs(ports: Sequence[Port], inputs: Mapping[str, Input]) -> None:
    """Raise ValueError unless `inputs` has exactly the ports' names, shapes and dtypes."""
    names = [port.name for port in ports]
    extra = [name for name in inputs if name not in names]
    if extra:
        raise ValueError(f"the model has no input {extra[0]!r}; it takes: {', '.join(names)}")
    missing = [name for name in names if name not in inputs]
    if missing:
        raise ValueError(f"input {missing[0]!r} is missing; the model takes: {', '.join(names)}")
    for port in ports:
        array = inputs[port.name]
        if array.dtype != numpy_dtype(port.dtype):
            raise ValueError(f"input {port.name!r} is {array.dtype}; the model takes {port.dtype}: convert it with astype")
        if array.shape != port.shape:
            raise ValueError(f"input {port.name!r} has shape {array.shape}; the model was compiled for {port.shape}")


def fitting_variant(variants: Sequence[Sequence[Port]], inputs: Mapping[str, Input]) -> int:
    """The index of the shape variant whose ports accept exactly `inputs`. Raises ValueError if none does."""
    index = which_fits(variants, inputs) if len(variants) > 1 else 0
    check_inputs(variants[index], inputs)
    return index


def to_device(tensor: Tensor, array: Array) -> Array:
    """`array` in the type of `tensor` on the device: contiguous after a conversion; otherwise the same memory, in its own
    order.
    """
    dtype = np.dtype(tensor.dtype)
    return np.asarray(array) if array.dtype == dtype else np.ascontiguousarray(array, dtype)


def from_device(port: Port | State, array: Array) -> Array:
    """`array`, as read from the device, in the dtype of the port or state; the same memory if the dtype is equal."""
    dtype = numpy_dtype(port.dtype)
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):  # a value too large for float16 becomes infinite
        return array.astype(dtype)


def on_host(value: Input) -> Array:
    """`value` as an array in host memory. Raises RunError if the device fails."""
    return value.numpy() if isinstance(value, OutputValue) else value


def gather_rows(file: Reader, gather: HostEmbeddingLookup, indices: Array, stored: StoredType) -> Array:
    """Rows of a table in the weight file, read from disk, as elements of `stored`: shape `indices.shape` + (columns,).

    Reads each row (each panel, if the table is packed in panels) once, however often the indices repeat it. Negative indices
    count from the end, as in ONNX.

    Raises:
        ValueError: an index is outside the table.
        RunError: the file was truncated.
    """
    wanted = np.ravel(indices).astype(np.int64)
    wrapped = np.where(wanted < 0, wanted + gather.rows, wanted)
    outside = wanted[(wrapped < 0) | (wrapped >= gather.rows)]
    if outside.size:
        raise ValueError(f"input {gather.indices!r} holds index {outside[0]}; its table has {gather.rows} rows")
    nibbles = gather.dtype.endswith("int4")
    is_upper = gather.dtype == "bfloat16"  # the upper halves of floats
    dtype = np.dtype("uint16" if is_upper else gather.dtype.replace("int4", "int8"))
    result = np.empty((wrapped.size, gather.columns), np.dtype(stored))
    span = gather.panel_bytes
    panels, at, group = np.unique(wrapped // gather.panel, return_index=True, return_inverse=True)
    places = (gather.offset + panels * gather.row_stride).tolist()
    is_whole = span == dtype.itemsize * gather.columns and not (nibbles or gather.block)
    if is_whole and dtype == result.dtype:  # each row as it is stored
        file.read_each([result[first].view(np.uint8) for first in at.tolist()], places)
        again = np.flatnonzero(at[group] != np.arange(wrapped.size))
        result[again] = result[at[group[again]]]
        return result.reshape(*indices.shape, gather.columns)
    for place in places:
        file.expect(place, span)
    scratch = np.empty((min(max(1, _SCRATCH_BYTES // span), panels.size), -(-span // dtype.itemsize)), dtype)
    raw = scratch.view(np.uint8)[:, :span]
    count = len(scratch)
    rows = as_strided(
        scratch, (count, gather.panel, gather.columns), (scratch.strides[0], dtype.itemsize, gather.column_stride)
    )
    order = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[order], np.arange(panels.size + 1))
    for first in range(0, panels.size, max(1, count)):
        several = places[first : first + count]
        file.read_each(list(raw[: len(several)]), several)
        here = order[starts[first] : starts[first + len(several)]]
        which = group[here] - first
        column = wrapped[here] % gather.panel
        if gather.block:
            found = _rows_of_blocks(raw[which], column, gather)
        else:
            found = _unpacked(raw, gather)[which] if nibbles else rows[which, column]
        result[here] = (found.astype(np.uint32) << np.uint32(16)).view(np.float32) if is_upper else found
    return result.reshape(*indices.shape, gather.columns)


def _rows_of_blocks(panels: NDArray[np.uint8], column: NDArray[np.int64], gather: HostEmbeddingLookup) -> Array:
    """What packed panels of ggml's blocks [n, bytes] have of one `column` each: [n, columns]."""
    across = gather.panel
    blocks = panels.reshape(len(panels), -1, gather.block * across)
    ends = [2 * gather.block_halves, 2 * gather.block_halves + gather.block_bytes]
    halves, plain, fours = np.split(blocks, [end * across for end in ends], axis=2)

    def picked(part: NDArray[np.uint8], columns: int, nbytes: int, of: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The `nbytes` of column `of` in each row of `columns`: [n, blocks, rows * nbytes]."""
        rows = part.reshape(*blocks.shape[:2], part.shape[2] // (columns * nbytes), columns, nbytes)
        return rows[np.arange(len(rows)), :, :, of].reshape(*blocks.shape[:2], -1)

    is_high = (column >= across // 2)[:, None, None]
    shift = np.where(is_high, np.uint8(4), np.uint8(0))
    nibbles = picked(fours, across // 2, 1, column % (across // 2)) >> shift & np.uint8(15)
    both = nibbles[:, :, 0::2] | nibbles[:, :, 1::2] << np.uint8(4)
    found = [picked(halves, across, 2, column), picked(plain, across, 1, column), both]
    return np.concatenate(found, axis=2).reshape(len(panels), -1)


def _unpacked(rows: NDArray[np.uint8], gather: HostEmbeddingLookup) -> Array:
    """Unpack rows of 4-bit integers, low nibble first."""
    both = np.stack((rows & 15, rows >> 4), axis=-1).reshape(len(rows), -1)[:, : gather.columns]
    return both if gather.dtype == "uint4" else (both ^ 8).view(np.int8) - np.int8(8)
