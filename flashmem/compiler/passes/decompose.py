"""Operators in normal form: the ONNX operator set, with its variants over versions, rewritten into fewer and simpler forms.

Each operator's declaration says how (`compiler.operators`). After this pass `Reshape` stands for every change of shape that
moves no data, tensors without elements are constants, and every node has an expression or a kernel.
"""

from __future__ import annotations

import numpy as np

from flashmem.compiler.ir.builder import Rewriter, constant
from flashmem.compiler.ir.graph import Graph, Node
from flashmem.compiler.operators import REGISTRY


def decompose(graph: Graph) -> Graph:
    """`graph` in normal form."""
    rewriter = Rewriter()
    for node in graph.nodes:
        if all(output.size == 0 for output in node.outputs):
            for output in node.outputs:
                rewriter.replaced[output] = constant(output.name, np.zeros(output.shape, output.dtype))
            continue
        node = Node(node.op, node.name, [rewriter.now(value) for value in node.inputs], node.outputs, node.attributes)
        rewrite = REGISTRY[node.op].rewrite
        if rewrite is not None:
            rewrite(rewriter, node, graph.opset)
        else:
            node.outputs[0].producer = node
            rewriter.nodes.append(node)
    return rewriter.graph(graph)
