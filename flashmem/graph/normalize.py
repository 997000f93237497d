"""Operators in normal form: the ONNX operator set, with its variants over opsets, rewritten into fewer and simpler ones.

After this pass:

- `Reshape` stands for every change of shape that moves no data (Flatten, Squeeze, Unsqueeze, Identity).
- `MatMul` has attribute `transposed` (1 if the constant second operand is stored [N, K]); Gemm is MatMul, Mul and Add.
- `Conv` and `ConvTranspose` are 2D, without bias, with attributes `strides`, `dilations`, `pads` (top, left, bottom, right),
  `group`; `MaxPool` and `AveragePool` likewise with `kernel`.
- `Softmax`, `LogSoftmax`, `Normalize` (zero mean, unit variance) and `Reduce*` have attribute `axes`, a run of adjacent ones.
- `Slice` has `starts` and `steps` for every dimension; `Pad` has `before`; `Tile` has `repeats`.
- `Clip`, `Pow`, `Cast` carry their constants as attributes.
"""

from __future__ import annotations

from collections.abc import Callable

from flashmem.graph.builder import Rewriter
from flashmem.graph.ir import Graph, Node
from flashmem.graph.rewrites.arithmetic import rewrite_cast, rewrite_clip, rewrite_mean, rewrite_pow
from flashmem.graph.rewrites.contraction import rewrite_convolution, rewrite_gemm, rewrite_matmul, rewrite_pool
from flashmem.graph.rewrites.movement import (
    rewrite_concat,
    rewrite_expand,
    rewrite_gather,
    rewrite_pad,
    rewrite_reshape,
    rewrite_resize,
    rewrite_slice,
    rewrite_split,
    rewrite_tile,
    rewrite_transpose,
)
from flashmem.graph.rewrites.reduction import (
    rewrite_batch_normalization,
    rewrite_global_pool,
    rewrite_group_normalization,
    rewrite_instance_normalization,
    rewrite_layer_normalization,
    rewrite_reduce,
    rewrite_softmax,
)

Rule = Callable[[Rewriter, Node, int], None]


def normalize(graph: Graph) -> Graph:
    """`graph` in normal form."""
    rewriter = Rewriter()
    for node in graph.nodes:
        node = Node(node.op, node.name, [rewriter.now(v) for v in node.inputs], node.outputs, node.attributes)
        RULES.get(node.op, _keep)(rewriter, node, graph.opset)
    return rewriter.graph(graph)


def _keep(rewriter: Rewriter, node: Node, opset: int) -> None:
    node.outputs[0].producer = node
    rewriter.nodes.append(node)


RULES: dict[str, Rule] = {
    "AveragePool": rewrite_pool,
    "BatchNormalization": rewrite_batch_normalization,
    "Cast": rewrite_cast,
    "Clip": rewrite_clip,
    "Concat": rewrite_concat,
    "Conv": rewrite_convolution,
    "ConvTranspose": rewrite_convolution,
    "Expand": rewrite_expand,
    "Flatten": rewrite_reshape,
    "Gather": rewrite_gather,
    "Gemm": rewrite_gemm,
    "GlobalAveragePool": rewrite_global_pool,
    "GlobalMaxPool": rewrite_global_pool,
    "GroupNormalization": rewrite_group_normalization,
    "Identity": rewrite_reshape,
    "InstanceNormalization": rewrite_instance_normalization,
    "LayerNormalization": rewrite_layer_normalization,
    "LogSoftmax": rewrite_softmax,
    "MatMul": rewrite_matmul,
    "MaxPool": rewrite_pool,
    "Mean": rewrite_mean,
    "Pad": rewrite_pad,
    "Pow": rewrite_pow,
    **{
        f"Reduce{kind}": rewrite_reduce
        for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
    },
    "Reshape": rewrite_reshape,
    "Resize": rewrite_resize,
    "Slice": rewrite_slice,
    "Softmax": rewrite_softmax,
    "Split": rewrite_split,
    "Squeeze": rewrite_reshape,
    "Tile": rewrite_tile,
    "Transpose": rewrite_transpose,
    "Unsqueeze": rewrite_reshape,
    "Upsample": rewrite_resize,
}
