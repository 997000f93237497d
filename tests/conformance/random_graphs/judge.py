"""Runs a drawn graph on flashmem: agreed, refused, wrong, or broken; and finds the single node that causes it."""

from __future__ import annotations

import re
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

import flashmem
from flashmem.base.errors import UnsupportedModelError, UserError

from .graph import Drawn
from .values import FLOATS, Value

Array = NDArray[Any]
Precision = Literal["fp32", "fp16"]


@dataclass(frozen=True)
class Verdict:
    """The outcome of a graph. `reasons` are those of a refusal, else one line that describes the error."""

    kind: Literal["agreed", "refused", "wrong", "traceback"]
    reasons: tuple[str, ...] = ()
    culprit: str = ""  # the smallest part that shows it: a node's operator and types, or "fused"


def judge(drawn: Drawn, device: str, path: str, precision: Precision = "fp32") -> Verdict:
    """Compile, run and compare `drawn`; after a failure, look for a single node that fails too."""
    verdict = _try(drawn, device, path, precision)
    if verdict.kind not in ("wrong", "traceback"):
        return verdict
    for node in drawn.model.graph.node:
        alone = _try(drawn.only(node), device, path, precision)
        if alone.kind in ("wrong", "traceback"):
            return Verdict(verdict.kind, (*verdict.reasons, *alone.reasons), _described(node, drawn))
    return Verdict(verdict.kind, verdict.reasons, "several nodes")


def _try(drawn: Drawn, device: str, path: str, precision: Precision) -> Verdict:
    try:
        answers = _answers(drawn, device, path, precision)
    except UnsupportedModelError as error:
        return Verdict("refused", tuple(dict.fromkeys(reason for _, reason in error.nodes)) or (str(error),))
    except UserError as error:
        return Verdict("refused", (re.sub(r"'[^']*'", "…", re.sub(r"\S*/model\.onnx", "the model", _first_line(error))),))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return Verdict(
            "traceback", (f"{type(error).__name__}: {_first_line(error)} ({Path(place.filename).name}:{place.lineno})",)
        )
    wrong = [reason for value, answer in zip(drawn.outputs, answers, strict=True) if (reason := difference(value, answer))]
    return Verdict("wrong", tuple(wrong)) if wrong else Verdict("agreed")


def _answers(drawn: Drawn, device: str, path: str, precision: Precision) -> list[Array]:
    with tempfile.TemporaryDirectory(prefix="flashmem-") as folder:
        file = Path(folder) / "model.onnx"
        file.write_bytes(drawn.model.SerializeToString())
        place: Any = {"device": device, "memory_path": path}
        bundle = flashmem.compile(file, file.with_suffix(".flashmem"), precision=precision, build=False, **place)
        with flashmem.Session(bundle, device=device, build_apart=False) as session:
            return session.run(None, drawn.feeds)


def difference(value: Value, answer: Array) -> str | None:
    """The difference of `answer` from `value`, or None if equal: NaN, infinities, integers exactly, floats within the
    tolerance.
    """
    if answer.dtype != value.own.dtype or answer.shape != value.shape:
        return f"{value.name} is {answer.dtype}{answer.shape}, expected {value.dtype}{value.shape}"
    if value.dtype not in FLOATS:
        wrong = answer != value.own
    else:
        expected, given = value.own.astype(np.float64), answer.astype(np.float64)
        finite = np.isfinite(expected)
        apart = np.abs(np.where(finite, given, 0) - np.where(finite, expected, 0))
        same = (given == expected) | np.isnan(given) & np.isnan(expected)
        wrong = np.where(finite, ~(apart <= value.tolerance), ~same)
    if not wrong.any():
        return None
    where = tuple(int(axis[0]) for axis in np.nonzero(wrong)) if value.own.ndim else ()
    return (
        f"{value.name} {value.dtype}{value.shape}: {int(wrong.sum())} of {wrong.size} wrong, "
        f"at {where} {answer[where]} instead of {value.own[where]}"
    )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:300]


def _described(node: onnx.NodeProto, drawn: Drawn) -> str:
    operands = [
        f"{value.dtype}{list(value.shape)}{'=const' if value.leaf == 'constant' else ''}"
        for name in node.input
        if name and (value := drawn.values[name])
    ]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return f"{node.op_type}({', '.join(operands)}) {attributes or ''}".strip()


def save(drawn: Drawn, verdict: Verdict, folder: Path, about: str) -> None:
    """Save a finding in the format of ONNX's tests: the model, and its data as tensors."""
    data = folder / "test_data_set_0"
    data.mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes(drawn.model.SerializeToString())
    for index, (name, array) in enumerate(drawn.feeds.items()):
        (data / f"input_{index}.pb").write_bytes(numpy_helper.from_array(array, name).SerializeToString())
    for index, value in enumerate(drawn.outputs):
        (data / f"output_{index}.pb").write_bytes(numpy_helper.from_array(value.own, value.name).SerializeToString())
    lines = [about, verdict.kind, f"node: {verdict.culprit}", *verdict.reasons]
    (folder / "finding.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
