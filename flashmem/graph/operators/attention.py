"""Attention in one kernel: softmax(f(Q K^T)) V, as `graph.attention` finds it; no score is ever written to memory.

Inputs of `FusedAttention` are the tensors that hold queries, keys and values, and then the operands of `scores`. Attributes:
`query`, `key`, `value` and `answer` (each an `Access`), `batches`, `rows` (queries of a batch), `keys`, `scale` (of each
product of a query and a key), `value_scale` (of each value) and `scores`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashmem.graph.ir import Node, Value
from flashmem.graph.operators.registry import FLOAT, Operator, register
from flashmem.graph.views import Dimension
from flashmem.program import DType


@dataclass(frozen=True)
class Access:
    """Where a stack of matrices lies in a tensor, in elements: element (batch, row, channel) at `start` plus what each adds."""

    start: int
    batch: Dimension
    row: Dimension
    channel: int
    channels: int


@dataclass(frozen=True)
class Step:
    """An elementwise operator on a vector of scores. Its operands are registers by number: first the score itself, then the
    operands in the node's order, then the results of earlier steps.
    """

    op: str
    inputs: tuple[int | None, ...]
    dtype: DType
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Scores:
    """What happens to scores between product and softmax: `steps` over `shape`, scores of all queries. `guarded`: weights that
    are no numbers, those of a query that sees no key, count 0.
    """

    shape: tuple[int, ...]
    steps: tuple[Step, ...]
    guarded: bool = False

    def nodes(self, operands: list[Value]) -> tuple[Value, tuple[Node, ...]]:
        """The score as it leaves the product, and the steps as nodes on it and `operands`."""
        score = Value("score", self.shape, "float32")
        registers, nodes = [score, *operands], []
        for i, step in enumerate(self.steps):
            inputs = [None if at is None else registers[at] for at in step.inputs]
            made = Value(f"score.{i}", self.shape, step.dtype)
            nodes.append(Node(step.op, made.name, inputs, [made], step.attributes))
            registers.append(made)
        return score, tuple(nodes)


register(
    __name__,
    Operator("FusedAttention", (FLOAT,), kernel="attention", operator_class="hierarchical", onnx=False),
)
