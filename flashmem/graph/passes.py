"""The passes that bring a graph as it was imported, or made, into the form that layers are fused from."""

from __future__ import annotations

from flashmem.graph.attention import fuse_attention
from flashmem.graph.dequantised import read_integers
from flashmem.graph.ir import Graph
from flashmem.graph.layout import assign_layouts
from flashmem.graph.normalize import normalize


def prepare(graph: Graph) -> Graph:
    """`graph` in normal form, quantised operands read as they are, layouts assigned, attention as one operator."""
    return fuse_attention(assign_layouts(read_integers(normalize(graph))))
