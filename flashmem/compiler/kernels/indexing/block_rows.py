"""Rows of a table in ggml's blocks: they are gathered in their own bits, and become floats afterwards.

`BlockRows` computes what rows of blocks stand for (`compiler.ir.blocks`), from uint8 [..., bytes of a row] in the order of
`BlockFormat.rows`, which a head's packed panels have too. `format`: the kind.
"""

from __future__ import annotations

from flashmem.compiler.ir.blocks.constant import BlockConstant, TableRows
from flashmem.compiler.ir.blocks.format import BlockFormat
from flashmem.compiler.ir.builder import Rewriter
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.operators.registry import Operator, Types, register

_BYTES: Types = frozenset({"uint8"})


def is_in_blocks(constant: object) -> bool:
    """Whether a constant is in blocks of several weights."""
    return isinstance(constant, BlockConstant) and isinstance(constant.format, BlockFormat)


def gather_blocks(rewriter: Rewriter, node: Node) -> None:
    """Rewrite a Gather of rows of a table in blocks: gather their bytes, then compute the result."""
    table = node.input(0)
    indices = node.input(1)
    output = node.outputs[0]
    blocks = table.constant
    assert isinstance(blocks, BlockConstant)
    stored = Value(f"{table.name}.blocks", blocks.data.shape, "uint8", TableRows(blocks))
    shape = (*indices.shape, blocks.data.shape[1])
    picked = rewriter.emit("Gather", [stored, indices], shape, "uint8", f"{node.name}.blocks", axis=0)
    rewriter.add("BlockRows", [picked], output, node.name, format=blocks.format.name)


register(
    __name__,
    Operator("BlockRows", (_BYTES,), kernel="block_rows", onnx=False),
)
