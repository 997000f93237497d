"""Equal layers of a model: where they are, and which of their names correspond.

A decoder or an encoder is one layer, written dozens of times with other weights. Here a layer is a run of nodes that repeats:
its cut may lie anywhere in what people call a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from flashmem.compiler.ir.limits import nodes_of, subgraphs

FEWEST = 6
"""Of fewer layers, none is left out: the checks would cost what they save."""


@dataclass(frozen=True)
class EqualLayers:
    """`count` layers of `period` nodes each, from node `start` of a model on. Layer 0 may read other values than the others do.

    Attributes:
        made: for each layer, the names of its nodes' outputs. Those at one place correspond.
        nodes: for each layer, the names of its nodes, in the same way.
        owned: for each layer but the first, whose is empty, its own weights and inputs, in the same way.
    """

    start: int
    period: int
    count: int
    made: tuple[tuple[str, ...], ...]
    nodes: tuple[tuple[str, ...], ...]
    owned: tuple[tuple[str, ...], ...]

    def span(self, layer: int) -> range:
        """The indices of a layer's nodes."""
        return range(self.start + layer * self.period, self.start + (layer + 1) * self.period)

    def names_in(self, layer: int) -> dict[str, str]:
        """What the names of layer 1 are in a later one, and those of layer 2 in the one behind that."""
        pairs: dict[str, str] = {}
        for names in (self.nodes, self.made, self.owned):
            pairs.update(zip(names[2], names[layer + 1], strict=True))
            pairs.update(zip(names[1], names[layer], strict=True))
        return pairs


def find_layers(model: onnx.ModelProto) -> EqualLayers | None:
    """The equal layers of `model` that have the most nodes; None if it has no `FEWEST` of them."""
    graph = model.graph
    kinds = _kinds(graph)
    found = _longest_run(kinds)
    if found is None:
        return None
    start, period, count = found
    made = tuple(_outputs(graph.node[start + at * period : start + (at + 1) * period]) for at in range(count))
    wiring = _Wiring(graph, start, period, count)
    owned = wiring.owned()
    if owned is None or not wiring.ends_with_the_last(made):
        return None
    nodes = tuple(
        tuple(node.name for node in graph.node[start + at * period : start + (at + 1) * period]) for at in range(count)
    )
    return EqualLayers(start, period, count, made, nodes, owned)


def _outputs(nodes: Sequence[onnx.NodeProto]) -> tuple[str, ...]:
    return tuple(name for node in nodes for name in node.output)


def _kinds(graph: onnx.GraphProto) -> NDArray[np.int64]:
    """A number for each node, equal for nodes of one operator with equal attributes and as many operands."""
    known: dict[tuple[object, ...], int] = {}
    kinds = []
    for index, node in enumerate(graph.node):
        has_body = next(iter(subgraphs(node)), None) is not None
        attributes = tuple(sorted(each.SerializeToString(deterministic=True) for each in node.attribute))
        metadata = tuple(sorted((each.key, each.value) for each in node.metadata_props))
        operands = (tuple(bool(name) for name in node.input), tuple(bool(name) for name in node.output))
        kind = (node.domain, node.op_type, node.overload, attributes, metadata, operands, index if has_body else -1)
        kinds.append(known.setdefault(kind, len(known)))
    return np.array(kinds, np.int64)


def _longest_run(kinds: NDArray[np.int64]) -> tuple[int, int, int] | None:
    """(start, period, count) of the run of equal layers with the most nodes; the shortest period of those."""
    best: tuple[int, int, int] | None = None
    most = 0
    for period in range(2, len(kinds) // FEWEST + 1):
        equal = np.concatenate(([0], (kinds[:-period] == kinds[period:]).astype(np.int8), [0]))
        edges = np.flatnonzero(np.diff(equal))
        starts = edges[::2]
        lengths = edges[1::2] - edges[::2]
        if not lengths.size:
            continue
        at = int(lengths.argmax())
        count = int(lengths[at]) // period + 1
        if count >= FEWEST and count * period > most:
            best = (int(starts[at]), period, count)
            most = count * period
    return best


class _Wiring:
    """What the nodes of each layer read."""

    def __init__(self, graph: onnx.GraphProto, start: int, period: int, count: int) -> None:
        self.graph = graph
        self.start = start
        self.period = period
        self.count = count
        self.producer = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
        self.places = {name: at for node in graph.node for at, name in enumerate(node.output) if name}
        weights = {tensor.name: (tensor.data_type, *tensor.dims) for tensor in graph.initializer}
        inputs = {value.name: value.type.SerializeToString(deterministic=True) for value in graph.input}
        self.given: Mapping[str, object] = {**inputs, **weights}

    def owned(self) -> tuple[tuple[str, ...], ...] | None:
        """The own weights and inputs of each layer but the first; None if two layers read in different ways."""
        read = [each for layer in range(1, self.count) if (each := self._read(layer)) is not None]
        if len(read) < self.count - 1 or any(wires != read[0][0] for wires, _ in read):
            return None
        outer = dict.fromkeys(zip(*(names for _, names in read), strict=True))
        own = [names for names in outer if len(set(names)) > 1]
        everything = [name for names in own for name in names]
        if len(everything) != len(set(everything)) or not self._read_outside().isdisjoint(everything):
            return None  # a weight of one layer has a part in another or elsewhere, or two parts
        if not all(self._are_given_alike(names) for names in own):
            return None
        return ((), *(zip(*own, strict=True) if own else [()] * (self.count - 1)))

    def _are_given_alike(self, names: Sequence[str]) -> bool:
        """Whether all of these are weights or inputs, of one type and shape."""
        return all(name in self.given for name in names) and len({self.given[name] for name in names}) == 1

    def _read(self, layer: int) -> tuple[list[tuple[int, int, int]], list[str]] | None:
        """What a layer reads of itself and of the layer before, and the names of what is from elsewhere; None: of others."""
        wires: list[tuple[int, int, int]] = []
        outer: list[str] = []
        begin = self.start + layer * self.period
        for node in self.graph.node[begin : begin + self.period]:
            for name in node.input:
                index = self.producer.get(name, -1)
                if index < self.start:
                    wires.append((-1, -1, -1))
                    outer.append(name)
                elif begin - self.period <= index < begin + self.period:
                    wires.append((0, index - begin, self.places[name]))
                else:
                    return None
        return wires, outer

    def _read_outside(self) -> set[str]:
        """Names that are read by nodes before and behind the layers, and by what is inside these nodes, or are outputs."""
        inside = range(self.start, self.start + self.count * self.period)
        outside = [node for index, node in enumerate(self.graph.node) if index not in inside]
        found = {name for node in nodes_of(outside, Path()) for name in node.input}
        return found | {value.name for node in nodes_of(outside, Path()) for each in subgraphs(node) for value in each.output}

    def ends_with_the_last(self, made: Sequence[Sequence[str]]) -> bool:
        """Whether only the last of the layers has values that nodes behind them read, and outputs correspond."""
        between = {name for names in made[1:-1] for name in names}
        outputs = {value.name for value in self.graph.output}
        places = {tuple(at for at, name in enumerate(names) if name in outputs) for names in made[1:-1]}
        return not between & self._read_outside() and len(places) == 1
