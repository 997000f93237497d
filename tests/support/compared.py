"""Models of many nodes, each an output, compared with a reference: one program per device compiles them all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

import flashmem
from flashmem.base.errors import UnsupportedModelError
from flashmem.runtime.opencl.discovery import list_devices
from tests.support.rounding import EPS, Answer, evaluated, spread_of

Array = NDArray[Any]
_NAMES = [device.descriptor_name for device in list_devices()]

PLACES = [(name, path) for name in _NAMES for path in ("buffer", "texture")]
"""Every device on every memory path, for nodes with weights."""

DEVICES = [(name, ("buffer", "texture")[index % 2]) for index, name in enumerate(_NAMES)]
"""Every device once, for nodes that read no weights."""

OF_A_GPU = [(*place, "nvidia") for place in DEVICES if place[0] != "pocl"][:1]
"""A device for the kernels of a GPU, whose work-items share rows: PoCL takes a minute to build those with barriers."""


@dataclass
class Nodes:
    """Nodes under construction; inputs are run-time data, constants initializers."""

    opset: int = 20
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    feeds: dict[str, Array] = field(default_factory=dict)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)

    def input(self, data: Any) -> str:
        """The name of run-time data."""
        name = f"x{len(self.feeds)}"
        self.feeds[name] = np.asarray(data)
        return name

    def constant(self, data: Any) -> str:
        """The name of a constant."""
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(data), name))
        return name

    def node(self, op: str, *inputs: str, dtypes: Sequence[str] = ("float32",), **attributes: Any) -> list[str]:
        """Add a node whose outputs, of these types, are outputs of the model; returns their names."""
        names = [f"{op}{len(self.nodes)}.{i}" for i in range(len(dtypes))]
        self.nodes.append(helper.make_node(op, list(inputs), names, **attributes))
        for name, dtype in zip(names, dtypes, strict=True):
            self.outputs.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), None))
        return names

    def proto(self) -> onnx.ModelProto:
        """The model."""
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(data.dtype), data.shape)
            for name, data in self.feeds.items()
        ]
        graph = helper.make_graph(self.nodes, "nodes", inputs, self.outputs, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)


def by_runtime(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """ONNX Runtime's answers."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    answers: list[Array] = onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, dict(feeds))
    return answers


def answers_of(
    model: onnx.ModelProto, feeds: Mapping[str, Array], place: tuple[str, str], folder: Path, compiled_for: str = ""
) -> list[Array]:
    """Flashmem's answers on a device and a memory path, with the kernels of that device or of `compiled_for`."""
    device, path = place
    onnx.save(model, folder / "model.onnx")
    wanted: Any = {"device": compiled_for or device, "memory_path": path}
    bundle = flashmem.compile(folder / "model.onnx", folder / "b.flashmem", **wanted)
    with flashmem.Session(bundle, device=device) as session:
        return list(session.run(None, dict(feeds)))


def compare(
    nodes: Nodes,
    place: tuple[str, str],
    folder: Path,
    exact: Sequence[Array] | None = None,
    against_runtime: bool = True,
    compiled_for: str = "",
) -> None:
    """Raise AssertionError unless every output is right, by the criterion of `require_right`."""
    model = nodes.proto()
    answers = answers_of(model, nodes.feeds, place, folder, compiled_for)
    require_right(model, nodes.feeds, answers, exact, against_runtime)


def require_right(
    model: onnx.ModelProto,
    feeds: Mapping[str, Array],
    answers: Sequence[Array],
    exact: Sequence[Array] | None = None,
    against_runtime: bool = True,
) -> None:
    """Raise AssertionError unless `answers` are right: integers exactly, floats as close to float64 as float32 permits.

    An element may differ by 4 units in the last place, plus the effect of rounding in its row (`rounding`), plus twice ONNX
    Runtime's error in its row. `exact`: float64 references for the first outputs, in place of onnx's own. `against_runtime`:
    whether ONNX Runtime supports these operators correctly.
    """
    known = _known(model, feeds)
    if exact is not None:
        moved = [answer.moved_to(np.asarray(each, np.float64)) for answer, each in zip(known, exact, strict=False)]
        known = [*moved, *known[len(moved) :]]
    others: Sequence[Array | None] = by_runtime(model, feeds) if against_runtime else [None] * len(known)
    found = []
    for info, answer, right, other in zip(model.graph.output, answers, known, others, strict=True):
        dtype = helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        assert (answer.dtype, answer.shape) == (dtype, right.exact.shape), info.name
        wrong = apart(answer, right, other) if answer.dtype.kind == "f" else answer != right.exact
        if wrong.any():
            at = tuple(int(axis[0]) for axis in np.nonzero(wrong)) if answer.ndim else ()
            beside = "" if other is None else f", ONNX Runtime {other[at]!r}"
            wanted = f"{answer[at]!r} instead of {right.exact[at]!r}{beside}"
            found.append(f"{info.name}: {int(wrong.sum())} of {wrong.size} elements are wrong, at {at} {wanted}")
    assert not found, "\n".join(found)


def _known(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Answer]:
    """`evaluated`, computed once for all devices."""
    data = [name.encode() + array.tobytes() for name, array in feeds.items()]
    key = hashlib.sha256(b"".join([model.SerializeToString(), *data])).digest()
    if key not in _evaluated:
        _evaluated.clear()
        _evaluated[key] = evaluated(model, feeds)
    return _evaluated[key]


_evaluated: dict[bytes, list[Answer]] = {}


def apart(answer: Array, right: Answer, other: Array | None = None) -> NDArray[np.bool_]:
    """The elements of `answer` that differ from `right` by more than `require_right` permits."""
    given, exact = answer.astype(np.float64), beyond(right.exact, answer.dtype)
    finite = np.isfinite(exact)
    with np.errstate(invalid="ignore"):
        off = np.where(finite, np.abs(given - exact), 0)
    reach = reach_of(right, other, answer.dtype)
    same = (given == exact) | np.isnan(given) & np.isnan(exact)
    return np.where(finite, ~(off <= reach), ~same)


def outside_halves(answer: Array, right: Answer, other: Array | None = None, more: float = 0.0) -> NDArray[np.bool_]:
    """The elements of `answer` that are not what a permitted float32 number, or one `more` away, rounds to in half."""
    exact = beyond(right.exact, np.float32)
    reach = reach_of(right, other) + more
    with np.errstate(over="ignore"):
        low, high = ((exact + sign * reach).astype(np.float16).astype(np.float64) for sign in (-1, 1))
    given = answer.astype(np.float64)
    return ~(((low <= given) & (given <= high)) | np.isnan(given) & np.isnan(exact))


def reach_of(right: Answer, other: Array | None = None, dtype: Any = np.float32) -> Array:
    """How far an element of type `dtype` may be from `right`; see `require_right`. `other`: ONNX Runtime's answer."""
    exact = beyond(right.exact, dtype)
    reach = EPS * np.where(np.isfinite(exact), np.abs(exact), 0) + ROUNDINGS * right.spread + float(np.finfo(np.float32).tiny)
    return reach if other is None else reach + 2 * spread_of(exact, [other.astype(np.float64)])


def beyond(exact: Array, dtype: Any) -> Array:
    """`exact`, infinite where a number of type `dtype` would be."""
    top = float(np.finfo(dtype).max)
    return np.where(np.abs(exact) > top, np.copysign(np.inf, exact), exact.astype(np.float64))


ROUNDINGS = 6.0
"""Factor by which an error may exceed the largest of a few random roundings."""


def refusal(nodes: Nodes, folder: Path) -> str:
    """The message with which the model is refused."""
    onnx.save(nodes.proto(), folder / "refused.onnx")
    with pytest.raises(UnsupportedModelError) as refused:
        flashmem.compile(folder / "refused.onnx", folder / "refused.flashmem", device="generic-cpu")
    return str(refused.value)
