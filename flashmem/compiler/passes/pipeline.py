"""The passes that bring a graph as it was imported, or made, into the form that layers are fused from."""

from __future__ import annotations

from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.passes.attention import fuse_attention
from flashmem.compiler.passes.decompose import normalize
from flashmem.compiler.passes.dequantised import read_integers
from flashmem.compiler.passes.layout import assign_layouts
from flashmem.compiler.passes.split_matmul import split_products
from flashmem.compiler.passes.transpose_hoisting import hoist_moves
from flashmem.compiler.passes.transpose_sinking import drop_moves


def prepare(graph: Graph) -> Graph:
    """`graph` in normal form, quantised operands read as they are, layouts assigned, without needless moves, products in
    the parts that are read, attention as one operator.
    """
    return fuse_attention(split_products(drop_moves(hoist_moves(assign_layouts(read_integers(normalize(graph)))))))
