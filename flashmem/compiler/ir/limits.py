"""Limits on the size of a model, checked before anything is built from it.

A small file can request much: functions that call functions double with each level, and `Range` and `Tile` make tensors of any
size. Each limit is far above the needs of real models, and each error names its limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx

from flashmem.base.errors import UserError

NODES = 50_000
"""The most nodes of a model. The nodes of a function count for each call."""

DEPTH = 16
"""The deepest nesting of subgraphs, and of functions that call each other."""

UNROLLED = 20_000
"""The most nodes in all copies of the bodies of loops."""

CHOSEN = 128
"""The most nodes in the branches of an If that are all computed, because the condition is known at run time only."""

RANK = 16
"""The most dimensions of a tensor."""

ELEMENTS = 2**31 - 1
"""The most elements of one activation: kernels index them with 32 bits."""

TABLE = 1 << 20
"""The largest axis that is listed in a table: of Resize, of Pad other than by a constant, and of operators that compare
positions, such as Trilu and OneHot.
"""

FOLDED = 4 << 30
"""The most bytes of all constants that are computed at import, including intermediate ones."""

CONSTANTS = 1 << 30
"""The most bytes of all constants that are computed at import and kept."""


def check_size(model: onnx.ModelProto, path: Path) -> None:
    """Raise UserError for a model with too many nodes once its functions are inlined, nested too deeply, or recursive."""
    functions = {function_key(function.domain, function.name, function): function for function in model.functions}
    counted: dict[tuple[str, str, str], tuple[int, int]] = {}

    def size(key: tuple[str, str, str], callers: tuple[tuple[str, str, str], ...]) -> tuple[int, int]:
        """Nodes of a function with those it calls, and the depth of its calls."""
        if key in callers:
            raise UserError(f"{path}: function {key[1]!r} calls itself, which no ONNX model may")
        if len(callers) >= DEPTH:
            raise UserError(f"{path}: functions call each other more than {DEPTH} deep, the most that is read ({key[1]!r})")
        if key not in counted:
            counted[key] = total(nodes_of(functions[key].node, path), (*callers, key))
        nodes, depth = counted[key]
        if len(callers) + depth > DEPTH:
            raise UserError(f"{path}: functions call each other more than {DEPTH} deep, the most that is read ({key[1]!r})")
        return nodes, depth

    def total(nodes: Iterable[onnx.NodeProto], callers: tuple[tuple[str, str, str], ...]) -> tuple[int, int]:
        count = depth = 0
        for node in nodes:
            key = function_key(node.domain, node.op_type, node)
            inner, below = size(key, callers) if key in functions else (1, 0)
            count = count + inner
            depth = max(depth, below)
        return count, depth + 1

    count, _ = total(nodes_of(model.graph.node, path), ())
    if count > NODES:
        raise UserError(f"{path} has {count} nodes with its functions inlined, but at most {NODES} are read")


def nodes_of(nodes: Iterable[onnx.NodeProto], path: Path, depth: int = 0) -> Iterator[onnx.NodeProto]:
    """Yield `nodes` and those in their subgraphs. Raises UserError if subgraphs are nested too deeply."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            if depth == DEPTH:
                raise UserError(f"{path}: subgraphs are nested more than {DEPTH} deep, the most that is read ({node.name!r})")
            yield from nodes_of(graph.node, path, depth + 1)


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs in the attributes of `node`: branches, bodies of loops."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def function_key(domain: str, name: str, owner: onnx.NodeProto | onnx.FunctionProto) -> tuple[str, str, str]:
    """What a call and its function have in common: domain, name and overload."""
    return ("" if domain == "ai.onnx" else domain), name, owner.overload
