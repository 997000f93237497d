"""Host embedding lookup: the host copies the rows of a table that a run needs, so that memory does not depend on the table.

A table that is also the weight of a matmul (a tied head) is in the bundle once, where panels are small: rows are read from the
matmul's panels, a whole panel each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.types import TableType
from flashmem.compiler.configs.workload import FLOATS
from flashmem.compiler.ir.blocks.constant import BlockConstant, TableRows
from flashmem.compiler.ir.blocks.floats import FloatFormat
from flashmem.compiler.ir.graph import NibbleConstant, Node, Value, pack_nibbles
from flashmem.compiler.lowering.context import LoweringContext
from flashmem.compiler.weights.packing import Packing
from flashmem.program.tensors import HostEmbeddingLookup

MATRIX = 2
"""Dimensions of a table."""

ROWS_AT_ONCE = 4096
"""Rows copied at a time while the table is written, which bounds the compiler's memory. Pieces are whole pages, without gaps.
"""


MOST_PANEL_BYTES = 128 << 10
"""Of panels that rows are read from. NVIDIA's have 128 columns: 128 tokens of GPT-2 would read 42 of its 494 MB before their
first launch."""


def place_rows(context: LoweringContext, node: Node, indices: str, tensor: str) -> HostEmbeddingLookup:
    """The table's place in the weight file: inside a matmul's panels if they contain all of it and are small, else written row
    by row.
    """
    shared = _in_panels(context, node.input(0), indices, tensor)
    return shared if shared is not None else _in_rows(context, node.input(0), indices, tensor)


def _in_panels(context: LoweringContext, table: Value, indices: str, tensor: str) -> HostEmbeddingLookup | None:
    """The lookup in panels of a matmul that contain the whole table, one after the other; None if there are none."""
    rows, columns = table.shape
    blocks = table.constant.format if isinstance(table.constant, TableRows) else None
    for (weight, packing), parts in context.packed.items():
        if not _is_of(weight, table) or any(part.width for _, part in parts) or not _holds(packing, weight):
            continue
        places = [next(s for s in context.slices if s.name == name) for name, _ in parts]
        ends = [place.offset + place.nbytes for place in places]
        if all(end == place.offset for end, place in zip(ends, places[1:], strict=False)):
            if blocks is not None:
                return HostEmbeddingLookup(
                    indices, tensor, places[0].offset, rows, columns, columns * packing.panel, 0, "uint8", packing.panel,
                    *blocks.packed_rows,
                )  # fmt: skip
            pitch = packing.row_bytes
            return HostEmbeddingLookup(
                indices, tensor, places[0].offset, rows, columns, pitch * columns, pitch,
                packing.storage, packing.panel,  # type: ignore[arg-type]  # floats, by `_holds`
            )  # fmt: skip
    return None


def _is_of(weight: Value, table: Value) -> bool:
    """Whether a weight has the numbers of a table."""
    return weight is table or (isinstance(table.constant, TableRows) and table.constant.source is weight.constant)


def _holds(packing: Packing, weight: Value) -> bool:
    """Whether packed panels are small, and have each row of the table `weight` as a column."""
    if len(weight.shape) != MATRIX or (packing.depth, packing.group_columns) != (weight.shape[1], weight.shape[0]):
        return False
    return (packing.format is not None or packing.storage in FLOATS) and packing.panel_bytes <= MOST_PANEL_BYTES


def _in_rows(context: LoweringContext, table: Value, indices: str, tensor: str) -> HostEmbeddingLookup:
    """The lookup in a table of its own, written row by row unless the file has it."""
    rows, columns = table.shape
    assert table.constant is not None
    read = _bits(table) or table.constant.array
    kind = _kind(context, table)
    dtype = np.dtype({"bfloat16": "uint16"}.get(kind, kind.replace("int4", "int8")))
    row_bytes = -(-columns // 2) if kind.endswith("int4") else columns * dtype.itemsize
    blocks = table.constant if isinstance(table.constant, TableRows) else None
    page = context.weights.page_bytes  # pieces start on pages, and no row may be split between pieces
    step = max(ROWS_AT_ONCE, page // math.gcd(page, row_bytes))
    starts = range(0, rows, step)

    def pieces() -> Iterator[NDArray[Any]]:
        array = blocks.source.data.array() if blocks else read()
        for first in starts:
            part = np.ascontiguousarray(array[first : first + step], dtype)
            part = blocks.format.rows(part) if blocks else part
            yield pack_nibbles(part) if kind.endswith("int4") else part

    offset = context.earlier.table_at(table, kind)
    if offset is None:
        offset = context.weights.place(table.name, [min(step, rows - first) * row_bytes for first in starts], pieces)[0]
    context.placements.tables.append((table, kind, offset))
    stride = 0 if kind.endswith("int4") else dtype.itemsize
    return HostEmbeddingLookup(indices, tensor, offset, rows, columns, row_bytes, stride, kind)


def _bits(table: Value) -> Callable[[], NDArray[Any]] | None:
    """Reads the numbers of a table as they are in their file, if they are floats of 16 bits."""
    constant = table.constant
    if not isinstance(constant, BlockConstant) or not isinstance(constant.format, FloatFormat):
        return None
    kind = constant.format
    return lambda: kind.elements(constant.data.array())


def _kind(context: LoweringContext, table: Value) -> TableType:
    """The element type of a table in the weight file."""
    if table.dtype == "float32":
        kind = table.constant.format if isinstance(table.constant, BlockConstant) else None
        return "float16" if context.half else kind.storage if isinstance(kind, FloatFormat) else "float32"
    unsigned = table.dtype == "uint8"
    if isinstance(table.constant, NibbleConstant):
        return "uint4" if unsigned else "int4"
    return "uint8" if unsigned else "int8"
