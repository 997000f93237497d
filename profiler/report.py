"""Quality of predictions on launches outside the training data, and operators whose response differs from Table 5."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from flashmem.base.errors import UserError
from flashmem.base.types import OperatorClass
from flashmem.planning.capacity.basis import Basis
from flashmem.planning.capacity.classes import DEFAULT
from flashmem.planning.capacity.predictor import Predictor, ratio_within
from flashmem.planning.capacity.response import MARKER, LearnedClass, learn_classes

from .dataset import SAMPLE, Row, at_usual_pace, read_dataset, stem_of
from .rates import MachineRates
from .run import basis_of
from .train import train

_FOLDS = 5
CHUNK = 1 << 20
_WITHIN = 0.25
CAPACITY_BAR = 0.8
MEAN_BAR = 0.15
MEDIAN_BAR = 0.08
_LEAST_SECONDS = 1e-4  # for shorter launches, the launch overhead hides the kernel's response


@dataclass(frozen=True)
class PredictedRow:
    """A held-out row at the machine's usual pace, with its predictions. `raw`: seconds as measured."""

    row: Row
    predicted: float
    roofline: float
    raw: float

    @property
    def measured(self) -> float:
        """Measured seconds, with the load, at the usual pace."""
        return self.row.seconds * self.row.slowdown


@dataclass(frozen=True)
class Capacity:
    """C_l of a held-out launch in one mode, in bytes: measured, predicted, and by the roofline; all within the measured range.

    `resolved`: the measured value is between two measured amounts, not below the least one, where it would be extrapolated.
    """

    row: Row
    measured: float
    predicted: float
    roofline: float
    resolved: bool


@dataclass(frozen=True)
class HeldOut:
    """All predictions for held-out launches. `what`: the shapes or the model that was held out.

    `alike`: number of other launches excluded from training because they equal a held-out one.
    """

    what: str
    predictions: list[PredictedRow]
    capacities: list[Capacity]
    alike: int = 0


@dataclass(frozen=True)
class _Known:
    """A dataset: its rows as measured and, in the same order, at the usual pace."""

    raw: list[Row]
    paced: list[Row]
    basis: Basis
    machine: MachineRates

    @classmethod
    def read(cls, dataset: Path) -> _Known:
        about, rows = read_dataset(dataset)
        basis = basis_of(about)
        return cls(rows, at_usual_pace(rows, basis), basis, MachineRates.from_dict(about["rates"]))

    @property
    def models(self) -> list[str]:
        """The models with launches among the rows."""
        return sorted({row.origin for row in self.raw} - {SAMPLE})


def held_out(dataset: Path) -> list[HeldOut]:
    """Predict sampled shapes in five folds, then each model in turn; training starts over without them each time.

    Raises:
        UserError: not a dataset, or one with too few launches to hold any out.
    """
    known = _Known.read(dataset)
    parts = []
    cases = sorted({row.case for row in known.raw if row.origin == SAMPLE})
    order = np.random.default_rng(1).permutation(len(cases))
    for fold in range(_FOLDS):
        chosen = {cases[i] for i in order[fold::_FOLDS]}
        parts.append(_held("", known, lambda row, chosen=chosen: row.case in chosen))  # type: ignore[misc]
    shapes = HeldOut(
        f"shapes ({_FOLDS} folds)",
        [each for part in parts for each in part.predictions],
        [each for part in parts for each in part.capacities],
        sum(part.alike for part in parts),
    )
    return [shapes, *(_held(name, known, lambda row, name=name: row.origin == name) for name in known.models)]  # type: ignore[misc]


def _held(what: str, known: _Known, held: Callable[[Row], bool]) -> HeldOut:
    """Predictions by a predictor trained without these launches and without equal ones."""
    features = {row.features for row in known.paced if held(row)}
    seen = [row for row in known.paced if row.features not in features]
    alike = {row.case for row in known.paced if row.features in features and not held(row)}
    return _judge(what, known, train(seen, known.basis), held, len(alike))


def judged_by_shipped(dataset: Path) -> tuple[tuple[str, ...], list[HeldOut]]:
    """The models on which the shipped predictor was trained, and its predictions for the other models.

    Both are empty if the predictor is missing or does not name its training data.
    """
    known = _Known.read(dataset)
    stem = stem_of(dataset).absolute()
    try:
        predictor = Predictor.load(str(stem), known.paced[0].features.memory_path)
    except UserError:
        return (), []
    trained_on = predictor.trained_on
    unseen = [name for name in known.models if trained_on and name not in trained_on]
    return trained_on, [_judge(name, known, predictor, lambda row, name=name: row.origin == name, 0) for name in unseen]  # type: ignore[misc]


def _judge(what: str, known: _Known, predictor: Predictor, held: Callable[[Row], bool], alike: int) -> HeldOut:
    basis = known.basis
    machine = known.machine
    pairs = [(row, raw) for row, raw in zip(known.paced, known.raw, strict=True) if held(row)]
    predictions = [
        PredictedRow(row, _loaded_latency(predictor, row), _by_roofline(basis, machine, row), raw.seconds * raw.slowdown)
        for row, raw in pairs
    ]
    return HeldOut(what, predictions, _capacities([row for row, _ in pairs], predictor, basis, machine), alike)


def _loaded_latency(predictor: Predictor, row: Row) -> float:
    seconds = predictor.seconds_of(row.features)
    if row.mode == "none":
        return seconds
    return seconds * predictor.slowdown_of(row.features, row.streamed_bytes, _mode(row))


def _by_roofline(basis: Basis, machine: MachineRates, row: Row) -> float:
    return basis.roofline(row.features) + row.streamed_bytes / machine.rates.copy_bandwidth


def _mode(row: Row) -> Any:
    return row.mode


def curves(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """The loaded rows of each (case, mode), in ascending order of streamed bytes."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.mode != "none":
            found.setdefault((row.case, row.mode), []).append(row)
    return {key: sorted(values, key=lambda row: row.streamed_bytes) for key, values in found.items()}


def measured_ratio(points: Sequence[Row], slowdown: float) -> float:
    """The ratio of streamed bytes to the kernel's own bytes up to which the measured curve stays within a slowdown."""
    ratios = np.array([0.0, *(row.streamed_bytes / row.features.own_bytes for row in points)])
    factors = np.maximum.accumulate([1.0, *(row.slowdown for row in points)])
    return ratio_within(ratios, factors, slowdown)


def _capacities(rows: Sequence[Row], predictor: Predictor, basis: Basis, machine: MachineRates) -> list[Capacity]:
    found = []
    for points in curves(rows).values():
        features = points[0].features
        threshold = DEFAULT.slowdown(features.operator_class)
        if not threshold:
            continue  # 0 by its class, for any predictor
        last = points[-1].streamed_bytes
        predicted = predictor.streamable_of(features, threshold, _mode(points[0]))
        roofline = threshold * basis.roofline(features) * machine.rates.copy_bandwidth
        own = features.own_bytes
        measured = measured_ratio(points, threshold) * own
        resolved = measured >= points[0].streamed_bytes
        found.append(Capacity(points[0], measured, min(predicted, last), min(roofline, last), resolved))
    return found


def agreement(pairs: Sequence[tuple[float, float]], chunk: int | None) -> float:
    """The fraction of (measured, found) C_l within 25 % of the measured one, in bytes or in whole chunks.

    Pairs in which both are 0 are ignored; nan if no others exist.
    """

    def count(nbytes: float) -> float:
        return nbytes if chunk is None else nbytes // chunk

    counted = [(true, found) for true, found in ((count(a), count(b)) for a, b in pairs) if true or found]
    return mean(abs(found - true) <= _WITHIN * true for true, found in counted) if counted else float("nan")


@dataclass(frozen=True)
class Repeats:
    """Comparison of the launches that two profiles of one device have in common.

    Both are measured, so a perfect predictor would differ from either by about 1/sqrt(2) of their difference.

    `differences`: of latencies alone, each at its profile's usual pace, as fractions, minus their common part. `capacities`:
    (first, second) C_l in bytes.
    """

    differences: list[float]
    capacities: list[tuple[float, float]]


def repeats(dataset: Path, again: Path) -> Repeats:
    """Compare two profiles of a device.

    Raises:
        UserError: not datasets, or no launch is in both.
    """
    first, second = (at_usual_pace(rows, basis_of(about)) for about, rows in (read_dataset(dataset), read_dataset(again)))
    others = {(row.case, row.features): row.seconds for row in second if row.mode == "none"}
    pairs = [(row.seconds, others.get((row.case, row.features))) for row in first if row.mode == "none"]
    ratios = [after / before for before, after in pairs if after is not None]
    if not ratios:
        raise UserError(f"{dataset} and {again} have no launch in common; profile with the same --seed and the same models")
    usual = median(ratios)
    known = _measured_capacities(first), _measured_capacities(second)
    both = sorted(known[0].keys() & known[1].keys())
    return Repeats([abs(ratio / usual - 1) for ratio in ratios], [(known[0][key], known[1][key]) for key in both])


def _measured_capacities(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """C_l in bytes by (case, mode), for classes that allow a value above 0."""
    found = {}
    for key, points in curves(rows).items():
        if threshold := DEFAULT.slowdown(points[0].features.operator_class):
            found[key] = measured_ratio(points, threshold) * points[0].features.own_bytes
    return found


def errors(predictions: Sequence[PredictedRow], which: str, *, raw: bool = False) -> list[float]:
    """Absolute errors as fractions of the measured latency, at the usual pace or `raw`."""
    return [abs(getattr(p, which) / (p.raw if raw else p.measured) - 1) for p in predictions]


def learned_classes(rows: Sequence[Row], mode: str) -> list[LearnedClass]:
    """Learn operator classes from the response to loads in `mode`, over launches that are long enough to show it."""
    tolerances: dict[str, list[float]] = {}
    paper: dict[str, OperatorClass] = {}
    for (_, used), points in curves(rows).items():
        if used == mode and points[0].seconds >= _LEAST_SECONDS:
            operator = operator_type(points[0])
            tolerances.setdefault(operator, []).append(measured_ratio(points, MARKER))
            paper[operator] = points[0].features.operator_class
    return learn_classes(tolerances, paper)


def operator_type(row: Row) -> str:
    """The ONNX type of a row; products of activations, depthwise convolutions and reductions of columns are separate types."""
    apart = {"matmul_dynamic": "MatMul of activations", "depthwise": "Conv, depthwise", "reduce_columns": "over columns"}
    other = apart.get(row.features.family)
    if other == "over columns":
        return f"{row.operator} {other}"
    return other or row.operator


def default_path(rows: Sequence[Row]) -> str:
    """The memory path of most rows: a profile measures mostly the device's default one."""
    paths = [row.features.memory_path for row in rows]
    return max(sorted(set(paths)), key=paths.count)
