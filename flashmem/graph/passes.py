"""The passes that bring a graph as it was imported, or made, into the form that layers are fused from."""

from __future__ import annotations

from flashmem.compiler.ir.graph import Graph
from flashmem.graph.attention import fuse_attention
from flashmem.graph.dequantised import read_integers
from flashmem.graph.hoisting import hoist_moves
from flashmem.graph.layout import assign_layouts
from flashmem.graph.moves import drop_moves
from flashmem.graph.normalize import normalize
from flashmem.graph.parts import split_products


def prepare(graph: Graph) -> Graph:
    """`graph` in normal form, quantised operands read as they are, layouts assigned, without needless moves, products in
    the parts that are read, attention as one operator.
    """
    return fuse_attention(split_products(drop_moves(hoist_moves(assign_layouts(read_integers(normalize(graph)))))))
