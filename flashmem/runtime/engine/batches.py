"""Batches for a model of batch size 1: one run for each row, and the outputs stacked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from flashmem.program.tensors import Port, numpy_dtype
from flashmem.runtime.engine.given_arrays import Input
from flashmem.runtime.engine.ports import chosen_outputs, fitting_variant, on_host

Array = NDArray[Any]
Batch = Literal["loop"]


def check_batch(batch: Any) -> None:
    """Raise ValueError unless `batch` is "loop"."""
    if batch != "loop":
        raise ValueError(f"batch {batch!r} is unknown; give 'loop' to run a batch row by row, or None")


def looped(
    run: Callable[[Mapping[str, Input]], list[Array]],
    inputs: Mapping[str, Input],
    output_names: Sequence[str] | None,
    variants: Sequence[tuple[Sequence[Port], Sequence[Port]]],
) -> list[Array]:
    """The outputs of `run` for each row of a batch, stacked along the first dimension.

    An input is part of the batch if a variant has its shape with a first size of 1. The others go into each run unchanged.
    Without a batch, `run` is called once.

    Args:
        run: runs the model, for one row.
        inputs: the inputs, as `arrays_by_name` returns them.
        output_names: the outputs that `run` returns.
        variants: inputs and outputs of each shape variant.

    Raises:
        ValueError: the inputs of the batch have different numbers of rows, no variant fits a row, or a wanted output has no
            first dimension of size 1, or a size that depends on data.
    """
    counts = _counts(inputs, [ports for ports, _ in variants])
    if not counts:
        return run(inputs)
    rows = _equal(counts)
    arrays: dict[str, Array] = {name: on_host(value) for name, value in inputs.items()}
    row = {name: np.empty((1, *array.shape[1:]), array.dtype) if name in counts else array for name, array in arrays.items()}
    ports = {port.name: port for port in variants[fitting_variant([each for each, _ in variants], row)][1]}
    wanted = [ports[name] for name in chosen_outputs(list(ports.values()), output_names)]
    _check_stackable(wanted)
    stacked = [np.empty((rows, *port.shape[1:]), numpy_dtype(port.dtype)) for port in wanted]
    for number in range(rows):
        one = {name: array[number : number + 1] if name in counts else array for name, array in arrays.items()}
        for whole, part in zip(stacked, run(one), strict=True):
            whole[number : number + 1] = part
    return stacked


def _check_stackable(outputs: Sequence[Port]) -> None:
    """Raise ValueError for an output whose rows cannot be stacked."""
    for port in outputs:
        if port.shape[:1] != (1,):
            raise ValueError(
                f"output {port.name!r} has shape {port.shape}, and batch='loop' stacks outputs whose first size is 1; "
                "name other outputs, or leave batch out"
            )
        if port.count is not None:
            raise ValueError(
                f"output {port.name!r} has a size that depends on data, and batch='loop' stacks outputs of equal shapes; name "
                "other outputs, or leave batch out"
            )


def _equal(counts: Mapping[str, int]) -> int:
    """The rows of all inputs in `counts`. Raises ValueError if they differ."""
    (first, rows), *others = counts.items()
    for name, count in others:
        if count != rows:
            raise ValueError(f"input {first!r} has {rows} rows and input {name!r} has {count}; a batch has as many in each")
    return rows


def _counts(inputs: Mapping[str, Input], variants: Sequence[Sequence[Port]]) -> dict[str, int]:
    """The rows of each input that is part of the batch."""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for port in (port for ports in variants for port in ports):
        shapes.setdefault(port.name, set()).add(port.shape)
    counts = {}
    for name, array in inputs.items():
        known = shapes.get(name, set())
        shape = tuple(getattr(array, "shape", ()))
        if shape and shape not in known and (1, *shape[1:]) in known:
            counts[name] = shape[0]
    return counts
