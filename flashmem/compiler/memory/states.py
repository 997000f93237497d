"""Memory of states: a state's next value is written over the value that the run read (`Graph.states`).

Two ways, in this order of preference:

- *in place*: the launches that compute the next value write updates into a copy of the state (`ScatterAt`,
  `ScatterQuantised`, `Place`), and nothing reads the state afterwards. The copy is left out. This is the cache of a decoder,
  where a run writes one row.
- by a copy, after all other launches. The next value is an ordinary tensor until then. If it is another state as the run
  found it, it is copied twice: the first copies are made before any state changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from flashmem.base.types import StoredType
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Graph, GraphPort, Node, Value
from flashmem.compiler.memory.aliases import AliasAnalysis

_UPDATES = ("ScatterAt", "ScatterQuantised", "Place")


@dataclass(frozen=True)
class GraphState:
    """A state: the input `port` at the beginning of a run, and the name of the `output` that it becomes.

    `after` is the value that is written over the input's, or that value itself, if a run does not change the state.
    """

    port: GraphPort
    output: str
    after: Value


def graph_states(
    graph: Graph,
    launched: Sequence[FusionGroup],
    results: Collection[Value],
    aliases: AliasAnalysis,
    storage: Callable[[Value], StoredType],
) -> tuple[list[GraphState], list[FusionGroup]]:
    """The states of `graph`, and the copies that follow its other groups, which run in the order `launched`.

    `results`: the values of other outputs.
    """
    inputs, outputs = ({port.name: port for port in ports} for ports in (graph.inputs, graph.outputs))
    taken = {aliases.base(value) for value in results}
    starts = {inputs[past].value for past, _ in graph.states}
    passed_on = {aliases.base(outputs[present].value) for _, present in graph.states} & starts
    places = _Places.of(launched if graph.states else (), aliases)
    found: list[GraphState] = []
    first: list[FusionGroup] = []
    last: list[FusionGroup] = []
    for past, present in graph.states:
        port = inputs[past]
        value = outputs[present].value
        base = aliases.base(value)
        apart = base not in taken and port.value not in passed_on
        in_place = apart and _is_in_place(port.value, value, places, aliases, storage)
        if in_place or base is port.value:
            found.append(GraphState(port, present, base))
        else:
            if base in starts:
                first.append(_copy(value, f"{present}.before"))
                value = first[-1].output
            last.append(_copy(value, f"{present}.next"))
            found.append(GraphState(port, present, last[-1].output))
        taken.add(base)
    return found, first + last


def _copy(value: Value, name: str) -> FusionGroup:
    return FusionGroup(Node("Copy", name, [value], [Value(name, value.shape, value.dtype)]))


@dataclass(frozen=True)
class _Places:
    """Where groups, in the order `launched`, first make each value, and where they read from its memory, once for each read."""

    launched: Sequence[FusionGroup]
    made: Mapping[Value, int]
    read: Mapping[Value, Sequence[int]]

    @classmethod
    def of(cls, launched: Sequence[FusionGroup], aliases: AliasAnalysis) -> _Places:
        """The places of all values."""
        made: dict[Value, int] = {}
        read: dict[Value, list[int]] = {}
        for at, group in enumerate(launched):
            made.setdefault(group.output, at)
            for value in group.read():
                read.setdefault(aliases.base(value), []).append(at)
        return cls(launched, made, read)


def _is_in_place(
    now: Value, value: Value, places: _Places, aliases: AliasAnalysis, storage: Callable[[Value], StoredType]
) -> bool:
    """Whether the group that computes `value` can write its updates into `now`."""
    base = aliases.base(value)
    at = places.made.get(base)
    if at is None or base.size != now.size or storage(base) != storage(now):
        return False
    main = places.launched[at].main
    if main.op not in _UPDATES or main.outputs[0] is not base or main.attributes["fill"] is not None:
        return False
    written = aliases.of(main.input(0))
    if written.base is not now or written.start or main.input(0).size != now.size:
        return False
    return [place for place in places.read.get(now, ()) if place >= at] == [at]
