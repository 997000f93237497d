"""Patch-based (fused-layer) tiling: computes a chain of operators one range of its result after the other.

A chain is a run of groups. A range of its last result determines, backwards, the parts of all earlier results that it needs
(`Operator.tiling`). Examples are whole windows of a window partition, or one more row on either side of a 3x3 convolution,
which is computed twice. Each patch is a copy of the chain's operators on such parts. It reads `Slice`s of tensors from before
the chain. `Concat` joins its results that the rest of the graph reads. Along the outermost axis both are ranges of memory and
cost nothing. Values that a patch needs whole, such as the keys of global attention, are computed before the first patch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from flashmem.compiler.ir.builder import Rewriter, derived
from flashmem.compiler.ir.fusion_group import FusedGraph, FusionGroup
from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.operators import REGISTRY
from flashmem.compiler.operators.tiling_interface import AxisRange, TiledNode
from flashmem.compiler.passes.row_parts import copied_row_parts


@dataclass(frozen=True)
class Chain:
    """A chain: groups `first` to `last` of a fused graph, counted from 0, in patches of the last one's result.

    Each patch extends from one of `starts` along `axis` to the next. The first start is 0.
    """

    first: int
    last: int
    axis: int
    starts: tuple[int, ...]

    def spans(self, size: int) -> list[AxisRange]:
        """The patches of a result that has `size` places along the axis."""
        return [AxisRange(self.axis, start, stop) for start, stop in itertools.pairwise((*self.starts, size))]


@dataclass
class Patch:
    """The range of each result inside the chain that one patch needs, and the operators' parts that compute it."""

    needs: dict[Value, AxisRange] = field(default_factory=dict)
    parts: dict[Node, TiledNode] = field(default_factory=dict)


Tile = Callable[[Node, AxisRange], TiledNode | None]
"""Returns the node that computes a range of a node's output: `tiled`."""


def units(graph: Graph, groups: Sequence[FusionGroup]) -> list[list[Node]]:
    """The nodes of each group, with the Reshapes of its result; Reshapes of inputs are before the first."""
    at = {node: i for i, group in enumerate(groups, start=1) for node in group.nodes}
    made: list[list[Node]] = [[] for _ in range(len(groups) + 1)]
    for node in graph.nodes:
        if node not in at:
            source = node.input(0).producer
            at[node] = 0 if source is None else at[source]
        made[at[node]].append(node)
    return made


def tiled(node: Node, span: AxisRange) -> TiledNode | None:
    """The node that computes `span` of the output of `node`; None if it cannot be computed separately."""
    return REGISTRY[node.op].tile_of(node, span)


def patch_of(
    nodes: Sequence[Node], made: Collection[Value], end: Value, span: AxisRange, whole: Collection[Value], tile: Tile = tiled
) -> tuple[Patch, set[Value]]:
    """The parts of `nodes` (in order) that compute `span` of `end`, and all values that must be computed whole before.

    The latter are `whole`, values that operators without such a part compute or need whole, and their own operands. `made`: the
    results of `nodes`. `tile`: `tiled`, or a cache of it.
    """
    patch = Patch({end: span})
    before = set(whole)
    for node in reversed(nodes):
        wanted = patch.needs.get(node.outputs[0])
        part = None
        if before.isdisjoint(node.outputs):
            if wanted is None:
                continue
            part = tile(node, wanted)
        if part is None:
            before.update(node.outputs)
            before.update(value for value in node.inputs if value is not None and value in made)
            continue
        patch.parts[node] = part
        if part.made is not None:
            patch.needs[node.outputs[0]] = part.made
        for value, needed in zip(node.inputs, part.needs, strict=True):
            if value is None or value not in made:
                continue
            known = patch.needs.get(value, needed)
            if needed is None or known is None or known.axis != needed.axis or needed.is_whole(value.shape):
                before.add(value)
            else:
                patch.needs[value] = known.hull(needed)
    return patch, before


def patches_of(nodes: Sequence[Node], end: Value, spans: Sequence[AxisRange], outside: Collection[Value]) -> list[Patch] | None:
    """The patches that compute `spans` of `end`, which cover it; None if patches are impossible.

    All patches divide the same operators. Their results that others read (`outside`, and the rest of `nodes`) consist of parts
    that do not overlap.
    """

    def overlapping(patches: Sequence[Patch]) -> Iterator[Value]:
        for value in joined(nodes, patches[0], outside):
            if not _tiles([patch.needs[value] for patch in patches], value):
                yield value

    return alike(nodes, end, spans, overlapping)


def alike(
    nodes: Sequence[Node],
    end: Value,
    spans: Sequence[AxisRange],
    overlapping: Callable[[Sequence[Patch]], Iterable[Value]],
    rounds: int | None = None,
    tile: Tile = tiled,
) -> list[Patch] | None:
    """The patches of `spans` of `end`, all of which divide the same operators.

    None if `end` has no such parts, or if the patches still differ after `rounds`. `overlapping`: results of such patches that
    must not be divided, since their parts overlap.
    """
    made = {value for node in nodes for value in node.outputs}
    whole: set[Value] = set()
    for _ in itertools.count() if rounds is None else range(rounds):
        patches = []
        found = set(whole)
        for span in spans:
            patch, before = patch_of(nodes, made, end, span, found, tile)
            patches.append(patch)
            found |= before
        if end in found:
            return None
        if found == whole:
            found.update(overlapping(patches))
        if found == whole:
            return patches
        whole = found
    return None


def joined(nodes: Sequence[Node], patch: Patch, outside: Collection[Value]) -> Iterator[Value]:
    """The results that patches compute in parts and that others read."""
    others = {value for node in nodes if node not in patch.parts for value in node.inputs}
    return (node.outputs[0] for node in patch.parts if node.outputs[0] in outside or node.outputs[0] in others)


def _tiles(spans: Sequence[AxisRange], value: Value) -> bool:
    """Whether `spans` cover `value` one after the other, without overlap."""
    size = value.shape[spans[0].axis]
    ends = [0, *(span.stop for span in spans)]
    return ends[-1] == size and all(span.start == end for span, end in zip(spans, ends, strict=False))


def in_patches(fused: FusedGraph, chains: Sequence[Chain]) -> Graph:
    """The graph of `fused` with `chains`, no two of which share a group, in patches. `fused` itself is unchanged.

    Raises:
        ValueError: a chain whose last operator has no such parts.
    """
    graph = fused.graph
    groups = fused.groups
    nodes = units(graph, groups)
    writer = _Writer()
    for node in nodes[0]:
        writer.copy(node)
    at = 0
    for chain in sorted(chains, key=lambda chain: chain.first):
        for group in range(at, chain.first):
            writer.copy_all(nodes[group + 1])
        inside = [node for unit in nodes[chain.first + 1 : chain.last + 2] for node in unit]
        end = groups[chain.last].output
        taken = set(inside)
        outside = {value for node in graph.nodes if node not in taken for value in node.inputs if value is not None}
        outside |= {port.value for port in graph.outputs}
        patches = patches_of(inside, end, chain.spans(end.shape[chain.axis]), outside)
        if patches is None:
            raise ValueError(f"{end.name} cannot be computed in patches along axis {chain.axis}")
        writer.write(inside, patches, list(joined(inside, patches[0], {*outside, end})))
        at = chain.last + 1
    for group in range(at, len(groups)):
        writer.copy_all(nodes[group + 1])
    return copied_row_parts(writer.rewriter.graph(graph))


class _Writer:
    """Copies nodes into a new graph, unchanged or in patches."""

    def __init__(self) -> None:
        self.rewriter = Rewriter()
        self._sliced: dict[tuple[Value, AxisRange], Value] = {}

    def copy_all(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self.copy(node)

    def copy(self, node: Node) -> None:
        """Copy `node` unchanged."""
        outputs = [replace(value, producer=None) for value in node.outputs]
        made = Node(node.op, node.name, [self.rewriter.now(value) for value in node.inputs], outputs, node.attributes)
        for old, new in zip(node.outputs, outputs, strict=True):
            new.producer = made
            self.rewriter.replaced[old] = new
        self.rewriter.nodes.append(made)

    def write(self, nodes: Sequence[Node], patches: Sequence[Patch], results: Sequence[Value]) -> None:
        """Write `nodes` in patches: operands they need whole, then each patch, then the readers of their joined `results`."""
        members = patches[0].parts
        behind: set[Value] = {node.outputs[0] for node in members}
        late: list[Node] = []
        for node in nodes:
            if node not in members and not behind.isdisjoint(node.inputs):
                behind.update(node.outputs)
                late.append(node)
            elif node not in members:
                self.copy(node)
        pieces = [self._patch(nodes, patch) for patch in patches]
        for value in results:
            joined = replace(value, producer=None)
            axis = patches[0].needs[value].axis
            self.rewriter.add("Concat", [made[value] for made in pieces], joined, f"{value.name}.patches", axis=axis)
            self.rewriter.replaced[value] = joined
        self.copy_all(late)

    def _patch(self, nodes: Sequence[Node], patch: Patch) -> dict[Value, Value]:
        """Write one patch; returns its parts by the values they are parts of."""
        made: dict[Value, Value] = {}
        for node in nodes:
            part = patch.parts.get(node)
            if part is None:
                continue
            inputs: list[Value | None] = []
            for value, needed in zip(node.inputs, part.needs, strict=True):
                if value in made:
                    assert value is not None and needed is not None
                    inputs.append(self._slice(made[value], needed.relative_to(patch.needs[value].start)))
                elif value is not None and needed is not None:
                    now = self.rewriter.now(value)
                    assert now is not None
                    inputs.append(self._slice(now, needed))
                else:
                    inputs.append(self.rewriter.now(value))
            [output] = node.outputs
            span = patch.needs[output]
            shape = span.of(output.shape)
            name = f"[{span.start}:{span.stop}]"
            if node.op == "Slice" and inputs[0] is not None and inputs[0].shape == shape:
                made[output] = inputs[0]
                continue
            result = Value(f"{output.name}{name}", shape, output.dtype)
            made[output] = self.rewriter.add(node.op, inputs, result, f"{node.name}{name}", **part.attributes)
        return made

    def _slice(self, value: Value, span: AxisRange) -> Value:
        """`span` of `value`, or `value` itself if the span covers it."""
        if span.is_whole(value.shape):
            return value
        if (value, span) not in self._sliced:
            shape = span.of(value.shape)
            name = f"{value.name}[{span.start}:{span.stop}]"
            if value.constant is not None:
                index = (*[slice(None)] * span.axis, slice(span.start, span.stop))
                self._sliced[value, span] = derived(value, name, shape, lambda array: array[index])
            else:
                starts = tuple(span.start if axis == span.axis else 0 for axis in range(len(shape)))
                steps = (1,) * len(shape)
                self._sliced[value, span] = self.rewriter.emit(
                    "Slice", [value], shape, value.dtype, name, starts=starts, steps=steps
                )
        return self._sliced[value, span]
