"""The passes that bring a graph as it was imported, or made, into the form that layers are fused from."""

from __future__ import annotations

from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.passes.attention import match_attention
from flashmem.compiler.passes.attention_views import fold_attention_views
from flashmem.compiler.passes.decompose import decompose
from flashmem.compiler.passes.layout import assign_layouts
from flashmem.compiler.passes.qdq_fusion import fuse_qdq
from flashmem.compiler.passes.split_matmul import split_matmuls
from flashmem.compiler.passes.transpose_hoisting import hoist_transposes
from flashmem.compiler.passes.transpose_sinking import sink_transposes


def prepare(graph: Graph) -> Graph:
    """`graph` in normal form, quantised operands read as they are, layouts assigned, without needless moves, products in
    the parts that are read, attention as one operator.
    """
    matched = match_attention(assign_layouts(fuse_qdq(decompose(graph))))
    return fold_attention_views(split_matmuls(sink_transposes(hoist_transposes(matched))))
