"""Evaluate XGBoost's models with NumPy: XGBoost trains them and is the reference, but its import takes seconds.

A model is read from XGBoost's own file in UBJSON. The result equals `xgboost.Booster.inplace_predict` bit for bit: leaves are
added in the order of the trees, in float32.
"""

from __future__ import annotations

import struct
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flashmem.planning.capacity.features import Matrix

_NUMBERS: Final = {"i": ">i1", "U": ">u1", "I": ">i2", "l": ">i4", "L": ">i8", "d": ">f4", "D": ">f8"}
"""Types of UBJSON's numbers, which are big-endian."""

_ROWS: Final = 1 << 12
"""Rows that are evaluated at a time, so that all nodes of a step stay in caches."""


class Trees:
    """The trees of one model of squared errors."""

    def __init__(self, raw: bytes) -> None:
        """`raw`: the content of a .ubj file.

        Raises:
            ValueError: it is something else.
        """
        self.raw = raw
        try:
            learner = _Reader(raw).value()["learner"]
            model = learner["gradient_booster"]["model"]
            self.attributes: dict[str, str] = learner["attributes"]
            self._base = np.float32(str(learner["learner_model_param"]["base_score"]).strip("[]"))
            self._read(model["trees"])
        except (KeyError, IndexError, TypeError, struct.error) as error:
            raise ValueError(f"not a model of XGBoost: {error!r}") from error

    def _read(self, trees: list[dict[str, Any]]) -> None:
        """Join all trees to one list of nodes. A leaf has itself as both children, and its value as condition."""
        starts = np.cumsum([0, *(len(tree["left_children"]) for tree in trees)])
        self._roots = starts[:-1].astype(np.int32)
        parts: dict[str, list[NDArray[Any]]] = {"left": [], "right": [], "feature": [], "condition": []}
        for start, tree in zip(starts.tolist(), trees, strict=False):
            left, right = np.asarray(tree["left_children"]), np.asarray(tree["right_children"])
            own, leaf = np.arange(len(left)), left < 0
            parts["left"].append(np.where(leaf, own, left) + start)
            parts["right"].append(np.where(leaf, own, right) + start)
            parts["feature"].append(np.where(leaf, 0, np.asarray(tree["split_indices"])))
            parts["condition"].append(np.asarray(tree["split_conditions"]))
        self._left, self._right, self._feature = (
            np.concatenate(parts[name]).astype(np.int32) for name in ("left", "right", "feature")
        )
        self._condition = np.concatenate(parts["condition"]).astype(np.float32)

    @cached_property
    def _depth(self) -> int:
        """The most steps from a root to a leaf."""
        steps, level = 0, self._roots
        while (inner := level[self._left[level] != level]).size:
            level = np.concatenate([self._left[inner], self._right[inner]])
            steps += 1
        return steps

    def predict(self, rows: Matrix) -> NDArray[np.float32]:
        """The prediction of each row of float32 [rows, features], none of which is NaN."""
        parts = [self._predict(rows[start : start + _ROWS]) for start in range(0, len(rows), _ROWS)]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def _predict(self, rows: Matrix) -> NDArray[np.float32]:
        count, features = rows.shape
        flat = np.ascontiguousarray(rows, np.float32).reshape(-1)
        base = np.arange(count, dtype=np.int32) * features
        node = np.repeat(self._roots[:, None], count, 1)  # [trees, rows]
        for _ in range(self._depth):
            less = flat[self._feature[node] + base] < self._condition[node]
            node = np.where(less, self._left[node], self._right[node])
        total = np.full(count, self._base, np.float32)
        for values in self._condition[node]:  # one after the other, as XGBoost rounds
            total += values
        return total


class _Reader:
    """Reads values of UBJSON, as XGBoost writes it."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def _taken(self, count: int) -> bytes:
        found = self._data[self._at : self._at + count]
        if len(found) < count:
            raise IndexError("the file ends early")
        self._at += count
        return found

    def _mark(self) -> str:
        return chr(self._taken(1)[0])

    def _number(self, mark: str) -> Any:
        kind = np.dtype(_NUMBERS[mark])
        return np.frombuffer(self._taken(kind.itemsize), kind)[0].item()

    def _text(self) -> str:
        return self._taken(self._number(self._mark())).decode()

    def value(self) -> Any:
        """The next value."""
        return self._value(self._mark())

    def _value(self, mark: str) -> Any:
        if mark == "{":
            return self._object()
        if mark == "[":
            return self._array()
        if mark == "S":
            return self._text()
        if mark in "TF":
            return mark == "T"
        return self._number(mark)

    def _object(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self._data[self._at : self._at + 1] != b"}":
            key = self._text()
            found[key] = self.value()
        self._at += 1
        return found

    def _array(self) -> Any:
        mark = self._mark()
        if mark == "$":  # numbers of one type
            kind = np.dtype(_NUMBERS[self._mark()])
            self._mark()
            count = self._number(self._mark())
            return np.frombuffer(self._taken(count * kind.itemsize), kind)
        if mark == "#":
            return [self.value() for _ in range(self._number(self._mark()))]
        found = []
        while mark != "]":
            found.append(self._value(mark))
            mark = self._mark()
        return found
