"""The labels of a classifier, and its likeliest classes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import MissingFileError, UserError
from flashmem.program.tensors import Port
from flashmem.tools.inputs.description import CONFIG, Description

SHOWN = 5


@dataclass(frozen=True)
class Classes:
    """The likeliest classes of one output, the likeliest first; `how` says where the probabilities are from."""

    output: str
    how: str
    rows: tuple[tuple[float, int, str], ...]

    def to_json(self) -> dict[str, Any]:
        """The JSON object `classes`."""
        rows = [{"probability": chance, "index": index, "label": label} for chance, index, label in self.rows]
        return {"output": self.output, "how": self.how, "top": rows}


@dataclass(frozen=True)
class Labels:
    """Names of classes by index, empty if none are known. `several`: more than one class may be true at once."""

    names: tuple[str, ...] = ()
    several: bool = False


def find_labels(model: Description, path: Path | None) -> Labels:
    """The labels in a text file, one a line; else `id2label` or `label_names` of config.json; else Ultralytics' `names`.

    Raises:
        MissingFileError: no such file.
        UserError: the file is empty or not text.
    """
    config = model.config(CONFIG)
    several = config.get("problem_type") == "multi_label_classification"
    if path is not None:
        if not path.is_file():
            raise MissingFileError(f"--labels {path}: no such file")
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            raise UserError(f"--labels {path} is not text in UTF-8; give one label a line") from None
        while lines and not lines[-1].strip():
            lines.pop()
        if not lines:
            raise UserError(f"--labels {path} is empty; give one label a line")
        return Labels(tuple(line.strip() for line in lines), several)
    detector = model.properties.get("task", "classify") != "classify"  # its classes are inside rows of boxes
    stored = (config.get("id2label"), config.get("label_names"), None if detector else model.value("names"))
    return Labels(next((names for each in stored if (names := _names(each))), ()), several)


def _names(given: Any) -> tuple[str, ...]:
    """Names in a list, or in a mapping of every index from 0 on, as a number or its text."""
    if isinstance(given, list):
        return tuple(map(str, given))
    if not isinstance(given, Mapping):
        return ()
    by_number = {str(key): str(value) for key, value in given.items()}
    names = [by_number.get(str(number)) for number in range(len(by_number))]
    return tuple(name for name in names if name is not None) if None not in names else ()


def check_labels(ports: Sequence[Port], labels: Labels) -> None:
    """Raise UserError unless an output has a number for each label."""
    if not any(len(labels.names) in port.shape and math.prod(port.shape) == len(labels.names) for port in ports):
        sizes = ", ".join(f"{port.name} has {'x'.join(map(str, port.shape)) or '1'}" for port in ports)
        raise UserError(f"--labels names {len(labels.names)} classes, and no output has as many numbers: {sizes}")


def likeliest_classes(outputs: Mapping[str, NDArray[Any]], labels: Labels) -> Classes | None:
    """The classes of the one output that has a number for each class; None without such an output.

    With labels, it has as many numbers as there are labels. Without, it is one that sums to 1. Numbers that are no distribution
    become one by softmax, or by a sigmoid each if several classes may be true.
    """
    vectors = {name: array.reshape(-1).astype(np.float64) for name, array in outputs.items() if _is_vector(array)}
    if labels.names:
        fitting = {name: values for name, values in vectors.items() if len(values) == len(labels.names)}
    else:
        fitting = {name: values for name, values in vectors.items() if _is_distribution(values)}
    if len(fitting) != 1:
        return None
    ((name, values),) = fitting.items()
    if not np.isfinite(values).all():
        return None
    if labels.several:
        chances = 1 / (1 + np.exp(-values))
        how = "sigmoid of the output"
    elif _is_distribution(values):
        chances = values
        how = "probabilities as the model gives them"
    else:
        exponents = np.exp(values - values.max())
        chances = exponents / exponents.sum()
        how = "softmax of the output"
    order = np.argsort(-chances, kind="stable")[:SHOWN]
    rows = tuple((float(chances[index]), int(index), _label(labels.names, index)) for index in order)
    return Classes(name, how, rows)


def _label(names: Sequence[str], index: int) -> str:
    return names[index] if names else f"class {index}"


def _is_vector(array: NDArray[Any]) -> bool:
    """Two or more floats of one example: all other dimensions are one."""
    return array.dtype.kind == "f" and array.size >= 2 and array.size in array.shape


def _is_distribution(values: NDArray[np.float64]) -> bool:
    return bool((values >= 0).all() and abs(values.sum() - 1) < 1e-2)  # halves of 1,000 classes are off by a few 1e-3
