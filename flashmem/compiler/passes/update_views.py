"""Update views: a scatter reads its updates where they are, without a copy.

Parts of a packed projection, and Transposes, before a ScatterAt or a ScatterQuantised disappear. So a decoder's new keys and
values are read from its products, or from what rotates them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from flashmem.compiler.ir.builder import Rewriter, replaced
from flashmem.compiler.ir.graph import Graph, Node
from flashmem.compiler.ir.strided import Dimension, Factor, StridedView, merged
from flashmem.compiler.ir.view_nodes import view_of

KEPT = 16
"""A Slice of less than 1 / KEPT of its source is copied. One head of keys of a projection with seven of queries is a ninth."""


def fold_update_views(graph: Graph) -> Graph:
    """`graph`, in which each scatter reads its updates from the farthest tensor whose memory it can describe."""
    found = {node: view for node in graph.nodes if (view := _folded(node)) is not None}
    return replaced(graph, found, lambda rewriter, view: _write(rewriter, view))


def _folded(node: Node) -> tuple[Node, StridedView, dict[str, object]] | None:
    """A scatter with the view that it can read its updates through, and its attributes for that; None if nothing changes."""
    if node.op not in ("ScatterAt", "ScatterQuantised"):
        return None
    given, view = node.attributes, _farther(node)
    if view is None:
        return None
    factors = view.factors
    if node.op == "ScatterQuantised" and not _has_columns(factors, given["size"]):
        return None
    steps = _all_strides(factors, given["update_step"])
    items = _all_strides(factors, zip(given["items"], given["update"], strict=True))
    if steps is None or items is None or any(len(dimension) > 1 for dimension in items):
        return None
    return (
        node,
        view,
        {
            **given,
            "update": tuple(dimension[0][1] if dimension else 0 for dimension in items),
            "update_step": merged([factor for dimension in steps for factor in dimension]),
            "update_start": given["update_start"] + view.start,
        },
    )


def _farther(node: Node) -> StridedView | None:
    """The updates of a scatter as a view of an activation, which is not the one that the scatter writes to; None if they are
    none.
    """
    updates = node.input(2)
    view = view_of(updates, KEPT)
    if view.root is updates or view.root is view_of(node.input(0), KEPT).root:
        return None
    return view if view.root.constant is None and view.scale == 1.0 else None


def _has_columns(factors: tuple[Factor, ...], size: int) -> bool:
    """Whether the last `size` elements of a view with `factors` are neighbours in its root."""
    columns = _strides(factors, size, 1)
    return columns is not None and all(stride == 1 for _, stride in columns)


def _all_strides(factors: tuple[Factor, ...], wanted: Iterable[Factor]) -> list[Dimension] | None:
    """`_strides` of each count and stride of `wanted`; None if one has none."""
    found = [_strides(factors, *each) for each in wanted]
    known = [each for each in found if each is not None]
    return known if len(known) == len(found) else None


def _write(rewriter: Rewriter, found: tuple[Node, StridedView, dict[str, object]]) -> None:
    node, view, attributes = found
    rewriter.add(node.op, [node.input(0), node.input(1), view.root], node.outputs[0], node.name, **attributes)


def _strides(factors: tuple[Factor, ...], count: int, stride: int) -> Dimension | None:
    """`count` elements of a view with `factors`, every `stride`-th in its order, as factors in its root.

    None if they begin or end inside a factor.
    """
    if count == 1 or stride == 0:
        return merged([(count, 0)])
    inner = 1
    end = stride * count
    pieces: list[Factor] = []
    for size, step in reversed(factors):
        low = max(inner, stride)
        high = min(inner * size, end)
        if low < high:
            if low % inner or high % low or inner * size % high:
                return None
            pieces.insert(0, (high // low, step * (low // inner)))
        inner *= size
    return merged(pieces) if math.prod(size for size, _ in pieces) == count else None
