"""Attention views: attention reads queries, keys and values, and writes its answer, through strided views.

Transposes, parts of one packed projection, repeated heads and constant factors before a FusedAttention
(`compiler.passes.attention`) disappear, and so does the Transpose after it.
"""

from __future__ import annotations

from flashmem.compiler.ir.builder import Rewriter, replaced
from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.ir.strided import StridedView
from flashmem.compiler.ir.users import Readers
from flashmem.compiler.ir.view_nodes import view_of
from flashmem.compiler.kernels.attention.operators import access, stack


def fold_attention_views(graph: Graph) -> Graph:
    """`graph`, in which each FusedAttention reads and writes the farthest tensors that views can reach."""
    readers = Readers(graph)
    found = {}
    for node in graph.nodes:
        if node.op == "FusedAttention":
            end, answer = _target(node, readers)
            found[end] = (node, end, answer)
    return replaced(graph, found, _replace)


def _replace(rewriter: Rewriter, found: tuple[Node, Node, StridedView]) -> None:
    """Append the attention in place of `end`, the last node that moves its answer; `answer` is a view of `end`'s output."""
    node, end, answer = found
    given = {name: attribute for name, attribute in node.attributes.items() if name != "stacks"}
    scores, answers = node.attributes["stacks"]
    query, key, value = (_matrices(node.input(i), batch, swap=i == 1) for i, batch in enumerate((scores, scores, answers)))
    rewriter.add(
        node.op,
        [query.root, key.root, value.root, *node.inputs[3:]],
        end.outputs[0],
        node.name,
        **{
            **given,
            "query": access(query),
            "key": access(key),
            "value": access(value),
            "answer": access(answer),
            "scale": query.scale * given["scale"] * key.scale,
            "value_scale": given["value_scale"] * value.scale,
        },
    )


def _matrices(value: Value, batch: tuple[int, ...], *, swap: bool) -> StridedView:
    """`value` as a stack of matrices for `batch`, read from the farthest tensor in which the channels have one stride."""
    made = (stack(view, batch, swap=swap) for view in (view_of(value), StridedView.of(value)))
    return next(view for view in made if len(view.dimensions[-1]) < 2)


def _target(product: Node, readers: Readers) -> tuple[Node, StridedView]:
    """The last node that moves the answer as a kernel can write it, and the answer as a view of that node's output."""
    node = product
    moves = [product]
    best = 0
    while (reader := readers.single(node.outputs[0])) is not None and reader.op in ("Reshape", "Transpose"):
        node = reader
        moves.append(node)
        if node.op == "Transpose":
            best = len(moves) - 1
    for end in (best, 0):
        view: StridedView | None = StridedView.of(moves[end].outputs[0])
        for move in reversed(moves[1 : end + 1]):
            if view is not None and move.op == "Transpose":
                view = view.untransposed(move.attributes["perm"])
            elif view is not None:
                view = view.reshaped(move.input(0).shape)
        if view is not None and len(view.dimensions[-1]) < 2:
            return moves[end], view
    raise AssertionError("a tensor is a view of itself")
