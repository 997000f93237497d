"""Fusion groups: the operators that one kernel computes, and a graph in groups."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.program.launches import LaunchOrder


@dataclass(eq=False)
class FusionGroup:
    """A main operator, its `epilogue` and its `prologue`: elementwise operators that its kernel computes after and before it.

    The prologue computes the first input of the main operator. If `keeps`, other groups read that value too, and the kernel
    also writes it to memory. `moved` is a Transpose of the result that the kernel applies when it stores: columns of matrices
    of `places` rows become rows. `joined`: groups that its kernel computes too, each after what it reads
    (`compiler.memory.joined_updates`); they are no part of `nodes`.
    """

    main: Node
    epilogue: list[Node] = field(default_factory=list)
    moved: Node | None = None
    places: int = 0
    prologue: list[Node] = field(default_factory=list)
    keeps: bool = False
    joined: tuple[FusionGroup, ...] = ()

    @property
    def output(self) -> Value:
        """The result of the last operator."""
        return (self.moved or self.nodes[-1]).outputs[0]

    @property
    def written(self) -> list[Value]:
        """The values that the group writes to memory: its output, and the prologue's if `keeps`."""
        return [*([self.prologue[-1].outputs[0]] if self.keeps else []), self.output]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All operators, in the order of execution."""
        return (*self.prologue, self.main, *self.epilogue)

    def operands(self) -> list[Value]:
        """Values from outside the group that the epilogue reads, without duplicates."""
        return _read_by(self.epilogue, self.nodes)

    def prologue_operands(self) -> list[Value]:
        """Values from outside the group that the prologue reads, without duplicates."""
        return _read_by(self.prologue, self.prologue)

    def read(self) -> list[Value]:
        """The values that the kernel reads: those of the main operator, with repetitions, and of prologue and epilogue."""
        own = self.main.inputs[1 if self.prologue else 0 :]
        return [*self.prologue_operands(), *(value for value in own if value is not None), *self.operands()]


def _read_by(nodes: list[Node], group: list[Node] | tuple[Node, ...]) -> list[Value]:
    """The values that `nodes` read and no node of `group` computes, without duplicates."""
    inside = {node.outputs[0] for node in group}
    return list(dict.fromkeys(value for node in nodes for value in node.inputs if value is not None and value not in inside))


@dataclass(frozen=True, eq=False)
class FusedGraph:
    """A graph and its fusion groups, in execution order.

    Attributes:
        uncut: the groups of the whole graph, none of them split. What a tensor is stored as depends on these alone.
        cuts: the nodes before which `groups` are split.
        order: how good the execution order is, once it was chosen (`compiler.memory.launch_order`).
    """

    graph: Graph
    groups: tuple[FusionGroup, ...]
    uncut: tuple[FusionGroup, ...]
    cuts: frozenset[Node] = frozenset()
    order: LaunchOrder | None = None
