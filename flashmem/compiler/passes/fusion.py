"""Operator fusion: each group is a main operator with elementwise operators before and after it.

The epilogue of a group is an acyclic graph of elementwise operators on the main operator's output. All have its shape, and only
one of their values is used elsewhere. So bias, activation (GELU and SiLU, which use one value several times) and residual sums
run in registers.

The prologue of a reduction or a normalization of rows is an elementwise group whose result it reads. If others read the result
later, such as a residual sum before a norm, the kernel writes both.

If the model returns a product's result with columns first, like images in ONNX, the product stores it so, element by element. A
separate Transpose would need the memory of the result twice.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from flashmem.compiler.ir.broadcast import place
from flashmem.compiler.ir.fusion_group import FusedGraph, FusionGroup
from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.ir.strided import Factor, StridedView, merged
from flashmem.compiler.ir.view_nodes import through
from flashmem.compiler.kernels.reduction.operators import whole_rows
from flashmem.compiler.operators import REGISTRY, is_elementwise

MAX_EPILOGUE = 24
"""The most operators in one epilogue: with more, a kernel has too few registers."""

MAX_OPERANDS = 8
"""The most tensors that an epilogue reads in addition to the main operator's operands."""


_PARALLEL = 64
"""Rows of a reduction that keep a device busy. An elementwise launch over fewer rows is parallel in their elements too."""

_SHORT = 1 << 14
"""Elements of a tensor whose elementwise operators take less time than a launch, on any device."""


def fuse(graph: Graph) -> FusedGraph:
    """`graph` with its fusion groups, in execution order.

    A Reshape forms no group, because it moves no data. A Slice forms one. If its result is an alias, it is not launched
    (`compiler.memory.aliases`); that depends on the stored type of its source.
    """
    groups = tuple(_groups(graph, set()))
    return FusedGraph(graph, groups, groups)


def split(fused: FusedGraph, cuts: Collection[Node]) -> FusedGraph:
    """`fused` with other groups, in which operators of `cuts` join no epilogue.

    An elementwise one begins a group, which has its own epilogue.
    """
    if not cuts:
        return fused
    return replace(fused, groups=tuple(_groups(fused.graph, set(cuts))), cuts=frozenset(cuts), order=None)


def _groups(graph: Graph, cut: set[Node]) -> list[FusionGroup]:
    """The fusion groups of `graph`, in execution order; operators of `cut` join no epilogue."""
    consumers = graph.consumers()
    outputs = {port.value for port in graph.outputs}
    position = {node: i for i, node in enumerate(graph.nodes)}
    taken: set[Node] = set()
    groups: list[FusionGroup] = []
    # From last to first, so that a sum of two branches joins the one that is computed later.
    for node in reversed(graph.nodes):
        if node in taken or node.op == "Reshape" or is_elementwise(node):
            continue
        groups.append(_grow(FusionGroup(node), position, consumers, outputs, taken | cut))
        taken.update(groups[-1].nodes)
    for node in graph.nodes:
        if is_elementwise(node) and node not in taken:
            groups.append(_grow(FusionGroup(node), position, consumers, outputs, taken | cut))
            taken.update(groups[-1].nodes)
    groups = _with_prologues(sorted(groups, key=lambda group: position[group.nodes[-1]]), cut, consumers, outputs)
    return _stored_moved(groups, consumers, outputs)


def _with_prologues(
    groups: list[FusionGroup], cut: set[Node], consumers: dict[Value, list[Node]], outputs: set[Value]
) -> list[FusionGroup]:
    """`groups`, in execution order, in which elementwise groups are the prologues of the reductions that read them."""
    at = {node: i for i, group in enumerate(groups) for node in group.nodes}

    def readers(value: Value) -> list[int]:
        """The groups that read `value`, possibly reshaped; the user of the model is after all groups."""
        found = [len(groups)] if value in outputs else []
        for node in consumers.get(value, ()):
            found += [at[node]] if node in at else readers(node.outputs[0])
        return found

    gone: set[FusionGroup] = set()
    for group in groups:
        first, *others = sorted(readers(group.output)) or [len(groups)]
        if not is_elementwise(group.main) or not cut.isdisjoint(group.nodes) or first == len(groups):
            continue
        if _may_precede(group, groups[first], keeps=bool(others)):
            groups[first].prologue = list(group.nodes)
            groups[first].keeps = bool(others)
            gone.add(group)
    return [group for group in groups if group not in gone]


def _may_precede(group: FusionGroup, reader: FusionGroup, *, keeps: bool) -> bool:
    """Whether the elementwise `group` can be the prologue of `reader`, which runs before all others that read its result.

    Unless the kernel `keeps` the result, it computes it again in each pass over a row.
    """
    node = reader.main
    value = group.output
    operator = REGISTRY[node.op]
    if not operator.prologue or reader.prologue or node.inputs[0] is not value or not whole_rows(node):
        return False
    if value.dtype != "float32" or value in reader.operands():
        return False
    split = node.attributes["axes"][0]
    if math.prod(value.shape[:split]) < _PARALLEL and value.size > _SHORT:
        return False
    if operator.columns is not None and not keeps and any(REGISTRY[each.op].special for each in group.nodes):
        return False
    operands = FusionGroup(node, prologue=list(group.nodes)).prologue_operands()
    fits = len(operands) + len(reader.operands()) <= MAX_OPERANDS
    return fits and all(place(each, value.shape, split) is not None for each in operands)


def _stored_moved(groups: list[FusionGroup], consumers: dict[Value, list[Node]], outputs: set[Value]) -> list[FusionGroup]:
    """`groups`, in which the groups of outputs with columns first replace the Transposes after them."""
    by_output = {group.output: group for group in groups}
    gone: set[FusionGroup] = set()
    for group in groups:
        if group.main.op != "Transpose" or not _is_given(group.output, consumers, outputs):
            continue
        chain = _moves(group.main, by_output)
        made = by_output.get(chain[0].input(0))
        if made is None or made.moved is not None or not _scatters(made.main):
            continue
        if any(each.input(0) in outputs or consumers[each.input(0)] != [each] for each in chain):
            continue
        places = _places_stored(made.output, chain)
        if places:
            made.moved = group.main
            made.places = places
            gone.add(group)
    return [group for group in groups if group not in gone]


def _moves(node: Node, by_output: Mapping[Value, FusionGroup]) -> list[Node]:
    """`node` and the Reshapes before it, up to the result of a group; in the order in which they run."""
    chain, value = [node], node.input(0)
    while value not in by_output and value.producer is not None and value.producer.op == "Reshape":
        chain.insert(0, value.producer)
        value = value.producer.input(0)
    return chain


def _places_stored(value: Value, chain: Sequence[Node]) -> int:
    """The number of rows of matrices of `value` that are stored with columns first after `chain`; 0 if none are."""
    view: StridedView | None = StridedView.of(value)
    for node in chain:
        view = None if view is None else through(node, view)
    return 0 if view is None else _places(merged(view.factors), value.shape[-1])


def _places(factors: Sequence[Factor], columns: int) -> int:
    """The number of rows of matrices of `columns` that are stored with columns first, from all factors; 0 if they are not."""
    batch, across, down = ((1, 0), *factors)[-3:] if len(factors) in (2, 3) else ((0, 0),) * 3
    is_batch = batch[0] == 1 or batch[1] == down[0] * columns
    return down[0] if is_batch and across == (columns, 1) and down[1] == columns else 0


def _is_given(value: Value, consumers: dict[Value, list[Node]], outputs: set[Value]) -> bool:
    """Whether `value` is an output of the model, or a part of one, possibly reshaped."""
    reshaped = (node for node in consumers.get(value, ()) if node.op in ("Concat", "Reshape"))
    return value in outputs or any(_is_given(node.outputs[0], consumers, outputs) for node in reshaped)


def _scatters(node: Node) -> bool:
    """Whether the kernel of `node` is a product with packed weights, which can store columns first."""
    if node.op not in ("Conv", "MatMul") or node.outputs[0].dtype != "float32":
        return False
    weight = node.input(1)
    if weight.constant is None or weight.dtype not in ("float32", "int8", "uint8"):
        return False
    return bool(node.attributes["group"] == 1) if node.op == "Conv" else math.prod(weight.shape[:-2]) == 1


def _grow(
    group: FusionGroup, position: dict[Node, int], consumers: dict[Value, list[Node]], outputs: set[Value], taken: set[Node]
) -> FusionGroup:
    """The longest epilogue, without `taken` nodes, of which the rest of the graph reads only one value."""
    operator = REGISTRY[group.main.op]
    if operator.expression is None and operator.columns is None:
        return group
    domain = group.main.outputs[0]
    columns = None if operator.columns is None else operator.columns(group.main)
    only_floats = columns is not None and not operator.epilogue_cast
    inside: dict[Value, None] = {domain: None}
    trial: list[Node] = []
    best: list[Node] = []
    frontier = list(consumers.get(domain, ()))
    while frontier and len(trial) < MAX_EPILOGUE:
        frontier.sort(key=position.__getitem__)
        node = frontier.pop(0)
        if node in trial or node in taken or not _joins(node, domain, columns, only_floats=only_floats):
            continue
        trial.append(node)
        inside[node.outputs[0]] = None
        frontier += consumers.get(node.outputs[0], ())
        ends = _escaping(inside, trial, consumers, outputs) == [node.outputs[0]]
        if ends and len(FusionGroup(group.main, trial).operands()) <= MAX_OPERANDS:
            best = list(trial)
    group.epilogue = best
    return group


def _escaping(
    values: Iterable[Value], nodes: Collection[Node], consumers: dict[Value, list[Node]], outputs: set[Value]
) -> list[Value]:
    """Those of `values` that anything but `nodes` reads, or nothing at all."""
    return [
        value
        for value in values
        if value in outputs or not consumers.get(value) or any(user not in nodes for user in consumers[value])
    ]


def _joins(node: Node, domain: Value, columns: int | None, *, only_floats: bool) -> bool:
    """Whether `node` can join an epilogue: it is elementwise over the same shape.

    In a kernel's epilogue, its operands must also match the order of the kernel's outputs from dimension `columns` on. If the
    kernel writes `only_floats`, everything must be float32.
    """
    if not is_elementwise(node) or node.outputs[0].shape != domain.shape:
        return False
    if columns is None:
        return True
    if only_floats and not node.outputs[0].dtype == domain.dtype == "float32":
        return False
    return all(value is None or place(value, domain.shape, columns) is not None for value in node.inputs)
