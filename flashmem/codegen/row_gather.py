"""Embedding tables: rows that the host picks, so that a table of any size costs only the rows asked for.

A table that also feeds a matmul (a tied head) is read from that matmul's panels, and stands in the bundle once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from flashmem.codegen.emitter import RESIDENT_CONSTANT_BYTES, Emitter
from flashmem.graph.ir import Graph, Node, Value
from flashmem.program import RowGather

ROWS_AT_ONCE = 4096
"""Rows copied at a time while the table is written, to bound the compiler's memory; whole pages, so that no gap is left."""


def host_indices(node: Node, graph: Graph) -> str | None:
    """The model input whose elements pick the rows, if `node` gathers rows of a large constant table by such an input."""
    if node.op != "Gather" or node.attributes["axis"] != 0:
        return None
    table, indices = node.input(0), node.input(1)
    if table.constant is None or len(table.shape) != 2 or table.dtype != "float32":
        return None
    if 4 * table.size <= RESIDENT_CONSTANT_BYTES:
        return None
    source: Value = indices
    while source.producer is not None and source.producer.op == "Reshape":
        source = source.producer.input(0)
    return next((port.name for port in graph.inputs if port.value is source), None)


def place_rows(emitter: Emitter, node: Node, indices: str, tensor: str) -> RowGather:
    """The table's place in the weight file: inside a matmul's panels if they hold it whole, else written row by row."""
    table = node.input(0)
    rows, columns = table.shape
    for (weight, packing), parts in emitter.packed.items():
        if (
            weight is not table
            or packing.path != "buffer"
            or packing.storage not in ("float32", "float16")
            or packing.depth != columns
            or packing.group_columns != rows
        ):
            continue
        places = [next(s for s in emitter.slices if s.name == name) for name, _ in parts]
        ends = [place.offset + place.nbytes for place in places]
        if all(end == place.offset for end, place in zip(ends, places[1:], strict=False)):
            pitch = packing.row_bytes
            return RowGather(
                indices, tensor, places[0].offset, rows, columns, pitch * columns, pitch,
                "float16" if packing.storage == "float16" else "float32", packing.panel,
            )  # fmt: skip
    dtype = np.dtype(np.float16 if emitter.half else np.float32)
    assert table.constant is not None
    read = table.constant.array
    starts = range(0, rows, ROWS_AT_ONCE)

    def pieces() -> Iterator[NDArray[np.floating]]:
        array = read()
        return (np.ascontiguousarray(array[first : first + ROWS_AT_ONCE], dtype) for first in starts)

    sizes = [min(ROWS_AT_ONCE, rows - first) * columns * dtype.itemsize for first in starts]
    offsets = emitter.weights.place(table.name, sizes, pieces)
    return RowGather(
        indices, tensor, offsets[0], rows, columns, columns * dtype.itemsize, dtype.itemsize,
        "float16" if emitter.half else "float32",
    )  # fmt: skip
