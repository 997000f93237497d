"""A graph under construction: its values, the leaves in use, and the choice of operands for the next node."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from tests.support.inputs import KINDS

from .values import DTYPES, FLOATS, INTEGERS, RejectedNodeError, Value, evaluate, leaf

Array = NDArray[Any]
Shape = tuple[int, ...]

_DIMENSIONS = (1, 1, 2, 3, 4, 5, 7, 8, 16, 17, 33, 64)
_LEAF_ELEMENTS = 2500

_TENSORS = {"tensor(float)": "float32", "tensor(double)": "float64"} | {
    f"tensor({name})": name for name in ("float16", "bfloat16", "bool", *INTEGERS)
}


class Drawing:
    """Nodes and values drawn so far, and the choices for the whole graph: types, sizes, how extreme its data is."""

    def __init__(self, rng: random.Random, opset: int) -> None:
        self.rng = rng
        self.opset = opset
        self.values: list[Value] = []
        self.nodes: list[onnx.NodeProto] = []
        floats = ["float32"] if rng.random() < 0.6 else rng.sample(FLOATS, rng.randint(1, 2))
        self.types = {*floats, *rng.sample(INTEGERS, rng.randint(1, 2)), "bool"}
        self.sizes = rng.sample(_DIMENSIONS, 4) + ([0] if rng.random() < 0.06 else [])
        self.odd = rng.random() < 0.25
        self.kind = rng.choice(sorted(KINDS)) if rng.random() < 0.4 else None  # for all floats of the graph
        self._count = 0

    def name(self, prefix: str) -> str:
        """An unused name."""
        self._count += 1
        return f"{prefix}{self._count}"

    def types_of(self, op: str, index: int = 0) -> list[str]:
        """Element types, among the graph's, that input `index` of `op` may have. Raises RejectedNodeError if it has none."""
        schema = onnx.defs.get_schema(op, self.opset)
        kinds = sorted({_TENSORS[kind] for kind in schema.inputs[index].types if kind in _TENSORS} & self.types)
        if not kinds:
            raise RejectedNodeError("no such type")
        return kinds

    def shape(self, lowest: int = 0, highest: int = 5) -> Shape:
        """A shape of the graph's sizes with a rank in the range, not too large."""
        rank = min(self.rng.choice((0, 1, 2, 2, 3, 3, 4, 4, 5)), highest)
        shape: list[int] = []
        for _ in range(max(rank, lowest)):
            size = self.rng.choice(self.sizes)
            shape.append(size if size * int(np.prod(shape)) <= _LEAF_ELEMENTS else 1)
        return tuple(shape)

    def pick(
        self,
        types: Collection[str],
        ranks: tuple[int, int] = (0, 5),
        fits: Callable[[Value], bool] = lambda value: True,
        shape: Callable[[], Shape] | None = None,
        fresh: float = 0.2,
    ) -> Value:
        """A value of one of `types` with a rank in `ranks`, an earlier one (mostly a late one) or a new leaf of `shape`."""
        known = [v for v in self.values if v.dtype in types and ranks[0] <= v.own.ndim <= ranks[1] and fits(v)]
        if known and self.rng.random() >= fresh:
            return known[-1 - min(self.rng.choice((0, 0, 0, 1, 1, 2, 3, 5, 8)), len(known) - 1)]
        dtype = self.rng.choice(sorted(types))
        return self.leaf(dtype, shape() if shape is not None else self.shape(*ranks))

    def leaf(self, dtype: str, shape: Shape, kind: Literal["input", "constant"] | None = None) -> Value:
        """A new leaf with random data."""
        random_ = np.random.default_rng(self.rng.getrandbits(30))
        chosen = kind or ("constant" if self.rng.random() < 0.4 else "input")
        return leaf(self.name("c" if chosen == "constant" else "x"), self._data(dtype, shape, random_), chosen)

    def constant(self, data: Any, dtype: str = "int64") -> Value:
        """A constant of given data."""
        return leaf(self.name("c"), np.asarray(data, DTYPES[dtype]), "constant")

    def _data(self, dtype: str, shape: Shape, random_: np.random.Generator) -> Array:
        if dtype == "bool":
            return random_.random(shape) < 0.5
        if dtype in FLOATS:
            if self.kind is None or dtype not in ("float32", "float64"):
                data = random_.normal(0, self.rng.choice((0.5, 1, 1, 4)), shape)
            else:
                data = KINDS[self.kind](random_, shape)
            if self.rng.random() < 0.15:
                data = np.round(data)
            if self.odd and data.size and self.rng.random() < 0.5:
                special = random_.choice((np.nan, np.inf, -np.inf, -0.0, 0.0), shape)
                data = np.where(random_.random(shape) < 1.5 / data.size, special, data)
            return np.asarray(data.astype(np.float32).astype(DTYPES[dtype]))
        limits = np.iinfo(dtype)
        low, high = max(limits.min, -12), 12
        data = random_.integers(low, high, shape, dtype=np.int64).astype(dtype)
        if self.odd and self.rng.random() < 0.6:
            edges = [limits.min, limits.min + 1, limits.max, limits.max - 1, limits.max // 2 + 1, limits.max // 3]
            extreme = np.array(edges, dtype)[random_.integers(0, len(edges), shape)]
            data = np.where(random_.random(shape) < 0.4, extreme, data)
        return np.asarray(data, dtype)

    def beside(self, value: Value, dtype: str | None = None, fresh: float = 0.4) -> Value:
        """A value that broadcasts with `value`, of its type or of `dtype`."""
        wanted = dtype or value.dtype

        def fits(other: Value) -> bool:
            try:
                return int(np.prod(np.broadcast_shapes(value.shape, other.shape))) <= 2 * _LEAF_ELEMENTS
            except ValueError:
                return False

        return self.pick((wanted,), fits=fits, shape=lambda: self.broadcastable(value.shape), fresh=fresh)

    def broadcastable(self, shape: Shape) -> Shape:
        """`shape`, or one that broadcasts with it: leading sizes dropped, some sizes 1."""
        choice = self.rng.random()
        if choice < 0.4:
            return shape
        if choice < 0.5:
            return ()
        kept = shape[self.rng.randint(0, len(shape)) :]
        return tuple(1 if self.rng.random() < 0.3 else size for size in kept)

    def emit(self, op: str, inputs: Sequence[Value | None], outputs: int = 1, **attributes: Any) -> list[Value]:
        """Add a node, and the leaves among its inputs that are new. Raises RejectedNodeError and adds nothing."""
        node = helper.make_node(
            op,
            ["" if value is None else value.name for value in inputs],
            [self.name("v") for _ in range(outputs)],
            name=self.name(op.lower()),
            **{key: value for key, value in attributes.items() if value is not None},
        )
        given = list(dict.fromkeys(value for value in inputs if value is not None))
        made = evaluate(node, inputs, self.opset, self.rng.getrandbits(30))
        self.values += [value for value in given if value not in self.values]
        self.values += made
        self.nodes.append(node)
        return made

    def maybe(self, share: float = 0.5) -> bool:
        """True in `share` of the cases."""
        return self.rng.random() < share
