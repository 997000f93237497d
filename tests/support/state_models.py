"""Small models with states: a recurrence, a line of delays, a cache, and a decoder with grouped-query attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from tests.support.inputs import floats

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class StateModel:
    """A model, its states (input to output), and the inputs of run `n`."""

    proto: onnx.ModelProto
    states: Mapping[str, str]
    inputs: Callable[[int], Arrays]

    def outputs(self) -> list[str]:
        """The outputs that are no states."""
        return [value.name for value in self.proto.graph.output if value.name not in self.states.values()]

    def start(self) -> Arrays:
        """The states before the first run: zeros."""
        shapes = {value.name: value.type.tensor_type.shape.dim for value in self.proto.graph.input}
        return {name: np.zeros([size.dim_value for size in shapes[name]], np.float32) for name in self.states}

    def through_the_host(self, run: Callable[[Arrays], Sequence[NDArray[Any]]], count: int) -> tuple[list[Arrays], Arrays]:
        """The outputs of `count` runs of an engine that takes states as inputs, and the states at the end."""
        names, states, found = [value.name for value in self.proto.graph.output], self.start(), []
        for number in range(count):
            given = dict(zip(names, run({**self.inputs(number), **states}), strict=True))
            states = {past: given[present] for past, present in self.states.items()}
            found.append({name: given[name] for name in self.outputs()})
        return found, states


def _model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, Sequence[int | str]]],
    outputs: Mapping[str, Sequence[int | str]],
    constants: Mapping[str, NDArray[Any]],
    opset: int = 20,
) -> onnx.ModelProto:
    given = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()]
    kept = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph(nodes, "states", given, made, kept), opset_imports=opsets, ir_version=10)


_FLOAT, _INT32, _INT64 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64


def recurrence(kind: str = "normal") -> StateModel:
    """h' = tanh(h w + x), whose every element depends on the whole state; y = h' x, and h' itself."""
    nodes = [
        helper.make_node("MatMul", ["h", "w"], ["hw"]),
        helper.make_node("Add", ["hw", "x"], ["sum"]),
        helper.make_node("Tanh", ["sum"], ["h2"]),
        helper.make_node("Mul", ["h2", "x"], ["y"]),
        helper.make_node("Identity", ["h2"], ["z"]),
    ]
    inputs = {"x": (_FLOAT, [2, 48]), "h": (_FLOAT, [2, 48])}
    outputs = {"y": [2, 48], "h2": [2, 48], "z": [2, 48]}
    proto = _model(nodes, inputs, outputs, {"w": floats(48, 48) / 8})
    return StateModel(proto, {"h": "h2"}, lambda n: {"x": floats(2, 48, kind=kind, seed=n)})


def delays(kind: str = "normal") -> StateModel:
    """Three states that pass their values on, one that is a part of an input, one that stays, and an output of old values."""
    nodes = [
        helper.make_node("Identity", ["e"], ["a2"]),
        helper.make_node("Reshape", ["a", "shape"], ["b2"]),
        helper.make_node("Slice", ["x", "one", "three", "one"], ["c2"]),
        helper.make_node("Identity", ["d"], ["d2"]),
        helper.make_node("Add", ["b", "x"], ["e2"]),
        helper.make_node("Identity", ["a"], ["old"]),
        helper.make_node("Mul", ["d", "x"], ["scaled"]),
        helper.make_node("Concat", ["a", "b", "c", "d", "e"], ["y"], axis=1),
    ]
    inputs = {name: (_FLOAT, [3, 2 if name == "c" else 4]) for name in "xabcde"}
    outputs = {f"{name}2": [3, 2 if name == "c" else 4] for name in "abcde"} | {"old": [3, 4], "scaled": [3, 4], "y": [3, 18]}
    constants = {name: np.array([n], np.int64) for name, n in (("one", 1), ("three", 3))}
    proto = _model(nodes, inputs, outputs, constants | {"shape": np.array([3, 4])})
    return StateModel(proto, {name: f"{name}2" for name in "abcde"}, lambda n: {"x": floats(3, 4, kind=kind, seed=n)})


def cache(kind: str = "normal", *, reads_later: bool = False, passed_on: bool = False) -> StateModel:
    """A cache of six rows, of which each run replaces one, and their sums.

    `reads_later`: and the old rows times the sums. `passed_on`: the old rows become another state.
    """
    nodes = [
        helper.make_node("TensorScatter", ["cache", "new", "at"], ["cache2"], axis=2),
        helper.make_node("ReduceSum", ["cache2", "axis"], ["y"], keepdims=0),
    ]
    inputs = {"cache": (_FLOAT, [2, 3, 6, 16]), "new": (_FLOAT, [2, 3, 1, 16]), "at": (_INT64, [2])}
    outputs = {"cache2": [2, 3, 6, 16], "y": [2, 3, 16]}
    if reads_later:
        nodes += [helper.make_node("Unsqueeze", ["y", "axis"], ["sums"]), helper.make_node("Mul", ["cache", "sums"], ["z"])]
        outputs["z"] = [2, 3, 6, 16]
    if passed_on:
        nodes += [helper.make_node("Identity", ["cache"], ["before2"]), helper.make_node("Neg", ["before"], ["z"])]
        inputs["before"] = inputs["cache"]
        outputs |= {"before2": [2, 3, 6, 16], "z": [2, 3, 6, 16]}
    proto = _model(nodes, inputs, outputs, {"axis": np.array([2])}, opset=24)

    def drawn(n: int) -> Arrays:
        return {"new": floats(2, 3, 1, 16, kind=kind, seed=n), "at": np.array([n % 6, (n + 2) % 6])}

    return StateModel(proto, {"cache": "cache2"} | ({"before": "before2"} if passed_on else {}), drawn)


MODELS: dict[str, Callable[[str], StateModel]] = {
    "recurrence": recurrence, "delays": delays, "cache": cache, "cache read later": partial(cache, reads_later=True),
    "cache passed on": partial(cache, passed_on=True),
}  # fmt: skip

LAYERS, HIDDEN, HEADS, KEY_HEADS, SIZE, CAPACITY = 2, 64, 4, 2, 16, 24


def decoder(lengths: Iterable[int], window: int = -1) -> StateModel:
    """Layers of grouped-query attention with rotary positions, as in onnxruntime-genai; run n reads `lengths[n]` words."""
    random = np.random.default_rng(0)
    angles = np.arange(CAPACITY)[:, None] * np.exp(-np.arange(SIZE // 2) / 3)
    constants: Arrays = {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    nodes, last = [], "x"
    inputs: dict[str, tuple[int, Sequence[int | str]]] = {
        "x": (_FLOAT, [1, "words", HIDDEN]), "seqlens_k": (_INT32, [1]), "total_sequence_length": (_INT32, []),
    }  # fmt: skip
    outputs: dict[str, Sequence[int | str]] = {"y": [1, "words", HIDDEN]}
    states: dict[str, str] = {}
    for layer in range(LAYERS):
        columns = (HEADS + 2 * KEY_HEADS) * SIZE
        constants[f"qkv{layer}"] = (random.standard_normal((HIDDEN, columns)) / 8).astype(np.float32)
        constants[f"out{layer}"] = (random.standard_normal((HEADS * SIZE, HIDDEN)) / 8).astype(np.float32)
        pairs = {f"past_key_values.{layer}.{kind}": f"present.{layer}.{kind}" for kind in ("key", "value")}
        attention = [f"p{layer}", "", "", *pairs, "seqlens_k", "total_sequence_length", "cos", "sin"]
        fields = {"num_heads": HEADS, "kv_num_heads": KEY_HEADS, "do_rotary": 1, "local_window_size": window}
        nodes += [
            helper.make_node("MatMul", [last, f"qkv{layer}"], [f"p{layer}"]),
            helper.make_node(
                "GroupQueryAttention", attention, [f"a{layer}", *pairs.values()], domain="com.microsoft", **fields
            ),
            helper.make_node("MatMul", [f"a{layer}", f"out{layer}"], [f"m{layer}"]),
            helper.make_node("Add", [last, f"m{layer}"], [f"x{layer}"]),
        ]
        last = f"x{layer}"
        inputs |= {past: (_FLOAT, [1, KEY_HEADS, CAPACITY, SIZE]) for past in pairs}
        outputs |= {present: [1, KEY_HEADS, CAPACITY, SIZE] for present in pairs.values()}
        states |= pairs
    nodes.append(helper.make_node("Identity", [last], ["y"]))
    counts = list(lengths)

    def drawn(n: int) -> Arrays:
        total = sum(counts[: n + 1])
        return {
            "x": floats(1, counts[n], HIDDEN, seed=n) + np.float32(0.5),
            "seqlens_k": np.array([total - 1], np.int32),
            "total_sequence_length": np.array(total, np.int32),
        }

    return StateModel(_model(nodes, inputs, outputs, constants), states, drawn)
