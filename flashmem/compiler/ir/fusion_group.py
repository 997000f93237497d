"""Fusion groups: the operators that one kernel computes."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashmem.compiler.ir.graph import Node, Value


@dataclass(eq=False)
class FusionGroup:
    """A main operator and its epilogue: elementwise operators that its kernel computes after it.

    `moved` is a Transpose of the result that the kernel applies when it stores: columns of matrices of `places` rows become
    rows.
    """

    main: Node
    epilogue: list[Node] = field(default_factory=list)
    moved: Node | None = None
    places: int = 0

    @property
    def output(self) -> Value:
        """The only value that the group writes to memory."""
        return (self.moved or self.nodes[-1]).outputs[0]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The main operator and the epilogue, in order of execution."""
        return (self.main, *self.epilogue)

    def operands(self) -> list[Value]:
        """Values from outside the group that the epilogue reads, without duplicates."""
        inside = {node.outputs[0] for node in self.nodes}
        found: dict[Value, None] = {}
        for node in self.epilogue:
            for value in node.inputs:
                if value is not None and value not in inside:
                    found[value] = None
        return list(found)
