"""Decomposition: rewrites the ONNX operator set, in all its versions, into fewer and simpler operators.

Each operator's declaration has its rewrite (`compiler.operators`). After this pass every change of shape without data movement
is a `Reshape`, and tensors without elements are constants. Every node has an expression or a kernel.
"""

from __future__ import annotations

import numpy as np

from flashmem.compiler.ir.builder import Rewriter, constant
from flashmem.compiler.ir.graph import Graph, Node
from flashmem.compiler.operators import REGISTRY


def decompose(graph: Graph) -> Graph:
    """`graph` (as imported) in operators that have an expression or a kernel."""
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
