"""Attention matching: softmax(f(Q K^T)) V becomes one operator, without scores in memory (`compiler.kernels.attention`).

Once it is decomposed, the graph of every exporter has this pattern. It is a product of two activations, elementwise operators
on its result (a scale, masks, biases, a soft cap), Softmax over the last axis, and another product. No other node may read a
score. Only this module matches the pattern. The operator reads whole queries, keys and values; a later pass folds the data
movement of its operands and its answer into it (`compiler.passes.attention_views`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from flashmem.compiler.ir.builder import Rewriter, replaced
from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.ir.strided import StridedView
from flashmem.compiler.ir.users import Readers
from flashmem.compiler.ir.view_nodes import constant_factor
from flashmem.compiler.kernels.attention.configs import LARGEST_HEAD
from flashmem.compiler.kernels.attention.operators import Scores, ScoreStep, access, stack
from flashmem.compiler.operators import is_elementwise
from flashmem.compiler.operators.rewriting import reshaped
from flashmem.compiler.passes.attention_band import LOWEST, split_band
from flashmem.compiler.passes.fusion import MAX_EPILOGUE, MAX_OPERANDS

MOST_ENDS = 256
"""The most ends of masks by position that every work-item looks at."""


@dataclass(frozen=True)
class _Operand:
    """A tensor that operators on scores read, and the shape in which it broadcasts to all scores."""

    value: Value
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Match:
    """A match of attention: its two products, the operators on its scores, and their operands; `scale`: of each score.

    `ends` and `filled`: see `compiler.kernels.attention.operators`.
    """

    first: Node
    second: Node
    scale: float
    scores: Scores
    operands: list[_Operand]
    dropped: bool
    ends: Value | None
    filled: str


def match_attention(graph: Graph) -> Graph:
    """`graph` (decomposed, layouts assigned) with a FusedAttention in place of each attention's second product."""
    readers = Readers(graph)
    matches = [match for node in graph.nodes if node.op == "Softmax" and (match := _attention(node, readers))]
    return replaced(graph, {match.second: match for match in matches}, _replace)


def _attention(softmax: Node, readers: Readers) -> _Match | None:
    """The attention around `softmax`; None if it is none, or no kernel can compute it."""
    keys = softmax.input(0).shape[-1]
    if softmax.attributes["axes"] != (len(softmax.input(0).shape) - 1,) or not softmax.input(0).size:
        return None
    behind = _behind(softmax.outputs[0], readers)
    before = _chain(softmax, readers)
    if behind is None or before is None:
        return None
    second, (first, chain) = behind.product, before
    product = first.outputs[0]
    made = second.outputs[0]
    if made.shape[-2] != product.shape[-2] or made.size * keys != product.size * made.shape[-1] or not made.size:
        return None
    parts = (first.input(0), first.input(1), second.input(1))
    if any(part.dtype != "float32" for part in parts) or any(part.constant is not None for part in parts[1:]):
        return None
    if not 0 < first.input(0).shape[-1] <= LARGEST_HEAD or made.shape[-1] > LARGEST_HEAD:
        return None
    score, chain, scale = _scaled(product, chain)
    steps = _scores(score, softmax, chain, behind)
    if steps is None:
        return None
    filled = _filled(chain, *product.shape[-2:])
    return _Match(first, second, scale, *steps, behind.dropped is not None, *(filled or (None, "")))


@dataclass(frozen=True)
class _Behind:
    """The nodes after softmax: the product with its weights, and changes to some weights before it.

    `guarded`: weights that are NaN become 0. `dropped`: a condition; weights of the queries for which it is true become 0. It
    broadcasts to weights of `shape`.
    """

    product: Node
    guarded: bool
    dropped: Value | None
    shape: tuple[int, ...]


def _behind(weights: Value, readers: Readers) -> _Behind | None:
    """The nodes after softmax's `weights`; None if a kernel cannot compute them."""
    keys = weights.shape[-1]
    guarded = False
    shape = weights.shape
    dropped: Value | None = None
    while True:
        node = readers.single(weights)
        if node is None:
            guard = _guard(weights, readers)
            if guarded or guard is None:
                return None
            weights = guard
            guarded = True
        elif node.op == "Reshape" and node.outputs[0].shape[-1:] == (keys,):
            weights = node.outputs[0]
        elif dropped is None and _drops(node, weights):
            shape = weights.shape
            weights = node.outputs[0]
            dropped = node.input(0)
        elif _is_product(node) and node.input(0) is weights:
            return _Behind(node, guarded, dropped, shape)
        else:
            return None


def _drops(node: Node, weights: Value) -> bool:
    """Whether `node` is Where(condition, 0, weights) with one condition for all keys of a query, as in ONNX's Attention."""
    return (
        node.op == "Where"
        and node.input(2) is weights
        and _is_zero(node.input(1))
        and node.input(0).shape[-1:] in ((), (1,))
        and node.outputs[0].shape == weights.shape
    )


def _is_zero(value: Value) -> bool:
    return value.constant is not None and value.size == 1 and not value.constant.array().any()


def _guard(weights: Value, readers: Readers) -> Value | None:
    """The result of Where(IsNaN(weights), 0, weights), if nothing else reads the weights."""
    nodes = readers.of(weights)
    tests = [node for node in nodes if node.op == "IsNaN"]
    choices = [node for node in nodes if node.op == "Where"]
    if len(nodes) != 2 or len(tests) != 1 or len(choices) != 1 or not readers.only(weights, nodes):
        return None
    (test,), (choice,) = tests, choices
    condition, zero, other = (choice.input(i) for i in range(3))
    fits = condition is test.outputs[0] and other is weights and choice.outputs[0].shape == weights.shape
    return choice.outputs[0] if _is_zero(zero) and fits and readers.only(condition, [choice]) else None


def _is_product(node: Node) -> bool:
    """Whether `node` is a MatMul of two activations, not transposed or dequantised."""
    return node.op == "MatMul" and len(node.inputs) == 2 and not node.attributes["transposed"]


def _chain(softmax: Node, readers: Readers) -> tuple[Node, tuple[Node, ...]] | None:
    """The product whose result `softmax` reads, and the operators between them, in order."""
    keys = softmax.input(0).shape[-1]
    found: dict[Value, bool] = {}  # whether a value depends on the product
    inside: list[Node] = []
    products: list[Node] = []

    def visit(value: Value | None, rows: int) -> bool:
        """Whether `value` depends on the product; if so, it holds scores of `rows` queries."""
        node = None if value is None else value.producer
        if value is None or node is None or value.constant is not None or value.size != rows * keys:
            return False
        if value.shape[-1:] != (keys,) or len(inside) > MAX_EPILOGUE:
            return False
        if value in found:
            return found[value]
        found[value] = False
        if _is_product(node) and (not products or node is products[0]):
            products[:] = [node]
            found[value] = True
        elif node.op == "Reshape":
            found[value] = visit(node.input(0), rows)
        elif is_elementwise(node):
            found[value] = any([visit(each, rows) for each in node.inputs])
        if found[value] and not _is_product(node):
            inside.append(node)
        return found[value]

    if not visit(softmax.input(0), softmax.input(0).size // keys) or len(inside) > MAX_EPILOGUE:
        return None
    made = [value for value, of_product in found.items() if of_product]
    return (products[0], tuple(inside)) if all(readers.only(value, [*inside, softmax]) for value in made) else None


def _scaled(score: Value, chain: tuple[Node, ...]) -> tuple[Value, tuple[Node, ...], float]:
    """Split off the constant factors with which `chain` begins: the score after them, the rest of the chain, their product."""
    scale = 1.0
    while chain and (multiplied := constant_factor(chain[0])) is not None:
        if multiplied[0] is not score or any(score in node.inputs for node in chain[1:]):
            break
        score = chain[0].outputs[0]
        chain = chain[1:]
        scale = scale * multiplied[1]
    return score, chain, scale


def _scores(product: Value, softmax: Node, chain: Sequence[Node], behind: _Behind) -> tuple[Scores, list[_Operand]] | None:
    """The operators between product and softmax as steps in registers, and all tensors that the attention reads on the way.

    These include the operands of the nodes after softmax. None if their shapes have no common refinement.
    """
    also = [behind.shape] if behind.dropped is not None else []
    shape = _refined([product.shape, softmax.input(0).shape, *(node.outputs[0].shape for node in chain), *also])
    if shape is None:
        return None
    inside = {product, *(node.outputs[0] for node in chain)}
    hiding, band = split_band(product, chain) or ([], None)
    operands: dict[tuple[Value, tuple[int, ...]], _Operand] = {}
    keys: dict[tuple[Node, Value], tuple[Value, tuple[int, ...]]] = {}
    steps = [node for node in chain if node.op != "Reshape" and node not in hiding]
    for node in steps:
        for value in node.inputs:
            if value is not None and value not in inside:
                operand = _operand(value, node.outputs[0].shape, shape)
                keys[node, value] = key = operand.value, operand.shape
                operands.setdefault(key, operand)
    if len(operands) > MAX_OPERANDS:
        return None
    at = {key: i for i, key in enumerate(operands, start=1)}
    registers: dict[Value, int] = {product: 0}
    made: list[ScoreStep] = []
    for node in chain:
        if node.op == "Reshape" or node in hiding:
            registers[node.outputs[0]] = next(registers[value] for value in node.inputs if value in inside)
            continue
        inputs = tuple(
            None if value is None else registers[value] if value in inside else at[keys[node, value]] for value in node.inputs
        )
        registers[node.outputs[0]] = 1 + len(operands) + len(made)
        made.append(ScoreStep(node.op, inputs, node.outputs[0].dtype, node.attributes))
    read = list(operands.values())
    if behind.dropped is not None:
        read.append(_operand(behind.dropped, behind.shape, shape))
    return Scores(shape, tuple(made), behind.guarded, band), read


def _filled(chain: Sequence[Node], rows: int, keys: int) -> tuple[Value, str] | None:
    """The ends of the keys that queries see, if one of `chain` replaces all scores from there on by the lowest number.

    "queries" if each of the `rows` queries of every matrix has one of its own, modulo their number, else "all".
    """
    for node in chain:
        if node.op == "Where" and node.input(0) is not None and _is_lowest(node.input(2)):
            found = _ends(node.input(0), keys)
            if found is None:
                continue
            ends, seen = found
            if ends.size == node.outputs[0].shape[-2] and rows % ends.size == 0 and seen.size == ends.size * keys:
                return ends, "queries"
            if ends.size <= MOST_ENDS:
                return ends, "all"
    return None


def _is_lowest(value: Value) -> bool:
    return value.constant is not None and value.size == 1 and bool(value.constant.array().max() <= LOWEST)


def _ends(seen: Value, keys: int) -> tuple[Value, Value] | None:
    """x, if `seen` is, or implies, that the number of a key is less than x, which is the same for all keys; and that result."""
    node = seen.producer
    if node is None or node.op not in ("And", "Less", "Expand", "Reshape"):
        return None
    if node.op == "And":
        return next((found for value in node.inputs if value is not None and (found := _ends(value, keys)) is not None), None)
    if node.op != "Less":
        return _ends(node.input(0), keys)
    numbers = node.input(0)
    ends = node.input(1)
    if (
        numbers.constant is None
        or numbers.size != keys
        or ends.shape[-1:] not in ((), (1,))
        or ends.dtype not in ("int32", "int64")
    ):
        return None
    return (ends, node.outputs[0]) if np.array_equal(numbers.constant.array().reshape(-1), np.arange(keys)) else None


def _refined(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The coarsest shape of scores from which each of `shapes` results by merging neighbours; None if none exists."""
    if len(set(shapes)) == 1:
        return shapes[0]
    ends = sorted({math.prod(shape[axis:-1]) for shape in shapes for axis in range(len(shape))}, reverse=True)
    if any(large % small for large, small in pairwise(ends)):
        return None
    return (*(large // small for large, small in pairwise(ends)), shapes[0][-1])


def _operand(value: Value, domain: tuple[int, ...], refined: tuple[int, ...]) -> _Operand:
    """`value`, which broadcasts to `domain`, in a shape that broadcasts to `refined`. The source of an Expand replaces it."""
    while value.constant is None and value.producer is not None and value.producer.op == "Expand":
        value = value.producer.input(0)
    if domain == refined or value.size == 1:
        return _Operand(value, value.shape)
    own = [1] * (len(domain) - len(value.shape)) + list(value.shape)
    shape: list[int] = []
    left = list(refined[:-1])
    for size, there in zip(domain[:-1], own[:-1], strict=True):
        while size > 1:
            part = left.pop(0)
            shape.append(part if there > 1 else 1)
            size //= part
    return _Operand(value, (*shape, own[-1]))


def _replace(rewriter: Rewriter, match: _Match) -> None:
    """Append a FusedAttention in place of the second product."""
    operands = [reshaped(rewriter, operand.value, operand.shape) for operand in match.operands]
    filled = [] if match.ends is None else [match.ends]
    query = match.first.input(0)
    key = match.first.input(1)
    value = match.second.input(1)
    answer = match.second.outputs[0]
    stacks = match.first.outputs[0].shape[:-2], answer.shape[:-2]
    rewriter.add(
        "FusedAttention",
        [query, key, value, *operands, *filled],
        answer,
        match.second.name,
        query=access(stack(StridedView.of(query), stacks[0])),
        key=access(stack(StridedView.of(key), stacks[0], swap=True)),
        value=access(stack(StridedView.of(value), stacks[1])),
        answer=access(StridedView.of(answer)),
        stacks=stacks,
        batches=math.prod(stacks[0]),
        rows=query.shape[-2],
        keys=key.shape[-1],
        scale=match.scale,
        value_scale=1.0,
        scores=match.scores,
        dropped=match.dropped,
        filled=match.filled,
    )
