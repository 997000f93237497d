"""How good predictions are on launches that training did not see, and which operators respond otherwise than Table 5 says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from flashmem.capacity.basis import Basis
from flashmem.capacity.classes import THRESHOLDS
from flashmem.capacity.predictor import Predictor, ratio_within
from flashmem.capacity.response import MARKER, Learned, learn_classes
from flashmem.console import print_facts, print_table
from flashmem.errors import UserError

from .dataset import SAMPLE, Row, at_usual_pace, read_dataset
from .rates import MachineRates
from .run import basis_of
from .train import train

_FOLDS = 5
_CHUNK = 1 << 20
_WITHIN = 0.25
_LEAST_SECONDS = 1e-4  # below, a launch's own overhead hides how its kernel responds


@dataclass(frozen=True)
class Prediction:
    """A row that was held out, what was predicted, and by what."""

    row: Row
    predicted: float
    roofline: float

    @property
    def measured(self) -> float:
        """Seconds, with the load."""
        return self.row.seconds * self.row.slowdown


@dataclass(frozen=True)
class Capacity:
    """C_l of a held-out launch in one mode, bytes: measured, predicted, and by the roofline. All end where measuring ended."""

    row: Row
    measured: float
    predicted: float
    roofline: float


@dataclass(frozen=True)
class HeldOut:
    """Everything that was predicted while it was held out. `what`: the shapes or the model that was held out."""

    what: str
    predictions: list[Prediction]
    capacities: list[Capacity]


def held_out(dataset: Path) -> list[HeldOut]:
    """Sampled shapes in five folds, then each model in turn; trained anew without them each time.

    Raises:
        UserError: not a dataset, or one with too few launches to hold any out.
    """
    about, rows = read_dataset(dataset)
    basis, machine = basis_of(about), MachineRates.from_dict(about["rates"])
    rows = at_usual_pace(rows, basis)
    shapes = HeldOut("shapes (5 folds)", [], [])
    cases = sorted({row.case for row in rows if row.origin == SAMPLE})
    order = np.random.default_rng(1).permutation(len(cases))
    for fold in range(_FOLDS):
        chosen = {cases[i] for i in order[fold::_FOLDS]}
        part = _judge("", rows, basis, machine, lambda row, chosen=chosen: row.case in chosen)  # type: ignore[misc]
        shapes.predictions.extend(part.predictions)
        shapes.capacities.extend(part.capacities)
    found = [shapes]
    for origin in sorted({row.origin for row in rows} - {SAMPLE}):
        found.append(_judge(origin, rows, basis, machine, lambda row, origin=origin: row.origin == origin))  # type: ignore[misc]
    return found


def _judge(what: str, rows: Sequence[Row], basis: Basis, machine: MachineRates, held: Callable[[Row], bool]) -> HeldOut:
    predictor = train([row for row in rows if not held(row)], basis)
    tested = [row for row in rows if held(row)]
    predictions = [Prediction(row, _loaded(predictor, row), _by_roofline(basis, machine, row)) for row in tested]
    return HeldOut(what, predictions, _capacities(tested, predictor, basis, machine))


def _loaded(predictor: Predictor, row: Row) -> float:
    seconds = predictor.seconds_of(row.features)
    if row.mode == "none":
        return seconds
    return seconds * predictor.slowdown_of(row.features, row.streamed_bytes, _mode(row))


def _by_roofline(basis: Basis, machine: MachineRates, row: Row) -> float:
    return basis.roofline(row.features) + row.streamed_bytes / machine.rates.copy_bandwidth


def _mode(row: Row) -> Any:
    return row.mode


def curves(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """The loaded rows of each (case, mode), by rising streamed bytes."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.mode != "none":
            found.setdefault((row.case, row.mode), []).append(row)
    return {key: sorted(values, key=lambda row: row.streamed_bytes) for key, values in found.items()}


def measured_ratio(points: Sequence[Row], slowdown: float) -> float:
    """The streamed bytes, over the kernel's own, up to which the measured curve stays within a slowdown."""
    ratios = np.array([0.0, *(row.streamed_bytes / row.features.own_bytes for row in points)])
    factors = np.maximum.accumulate([1.0, *(row.slowdown for row in points)])
    return ratio_within(ratios, factors, slowdown)


def _capacities(rows: Sequence[Row], predictor: Predictor, basis: Basis, machine: MachineRates) -> list[Capacity]:
    found = []
    for points in curves(rows).values():
        features = points[0].features
        threshold = THRESHOLDS[features.operator_class]
        if not threshold:
            continue  # 0 by its class, whoever is asked
        last = points[-1].streamed_bytes
        predicted = predictor.streamable_of(features, threshold, _mode(points[0]))
        roofline = threshold * basis.roofline(features) * machine.rates.copy_bandwidth
        own = features.own_bytes
        found.append(Capacity(points[0], measured_ratio(points, threshold) * own, min(predicted, last), min(roofline, last)))
    return found


def agreement(pairs: Sequence[tuple[float, float]], chunk: int | None) -> float:
    """The share of (measured, found) C_l that are within 25 % of the measured one, in bytes or in whole chunks."""

    def count(nbytes: float) -> float:
        return nbytes if chunk is None else nbytes // chunk

    counted = [(count(measured), count(found)) for measured, found in pairs]
    return mean(abs(found - true) <= _WITHIN * true for true, found in counted) if counted else float("nan")


@dataclass(frozen=True)
class Repeats:
    """The launches that two profiles of one device have in common.

    Both are measured, so that a perfect predictor would be off from either by about 1/sqrt(2) of what they differ by.

    `differences` of latencies alone, each at its profile's usual pace, as shares, without the one that all have in common; and
    (first, second) C_l in bytes.
    """

    differences: list[float]
    capacities: list[tuple[float, float]]


def repeats(dataset: Path, again: Path) -> Repeats:
    """How far two profiles lie apart.

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
    """C_l in bytes by (case, mode), where the class lets it be anything but 0."""
    found = {}
    for key, points in curves(rows).items():
        if threshold := THRESHOLDS[points[0].features.operator_class]:
            found[key] = measured_ratio(points, threshold) * points[0].features.own_bytes
    return found


def errors(predictions: Sequence[Prediction], which: str) -> list[float]:
    """Absolute errors as shares of the measured latency."""
    return [abs(getattr(p, which) / p.measured - 1) for p in predictions]


def learned_classes(rows: Sequence[Row], mode: str) -> list[Learned]:
    """Operator classes from the response to loads in `mode`, over launches long enough to show it."""
    tolerances: dict[str, list[float]] = {}
    for (_, used), points in curves(rows).items():
        if used == mode and points[0].seconds >= _LEAST_SECONDS:
            tolerances.setdefault(operator_type(points[0]), []).append(measured_ratio(points, MARKER))
    return learn_classes(tolerances)


def operator_type(row: Row) -> str:
    """The ONNX type of a row; products of two activations, depthwise convolutions and columns apart from the others."""
    apart = {"matmul_dynamic": "MatMul of activations", "depthwise": "Conv, depthwise", "reduce_columns": "over columns"}
    other = apart.get(row.features.family)
    if other == "over columns":
        return f"{row.operator} {other}"
    return other or row.operator


def print_repeats(dataset: Path, again: Path) -> None:
    """Print how far the device repeats itself."""
    found = repeats(dataset, again)
    apart = f"{mean(found.differences):.1%} in the mean, {median(found.differences):.1%} in the median"
    within = ", ".join(
        f"{agreement(found.capacities, chunk):.1%} in {what}" for chunk, what in ((None, "bytes"), (_CHUNK, "chunks"))
    )
    print_facts({f"{len(found.differences)} launches measured again differ by": apart, "their C_l within 25 %": within})


def print_report(dataset: Path, parts: Sequence[HeldOut]) -> None:
    """Print everything that `flashmem profile --report` shows; `parts`: what `held_out` gave of the dataset."""
    about, rows = read_dataset(dataset)
    launches = len({row.case for row in rows})
    print_facts({"measured": about["source"], "launches": str(launches), "rows": str(len(rows))})
    lines, verdicts = [], []
    for part in parts:
        subsets = (
            ("alone", [p for p in part.predictions if p.row.mode == "none"]),
            ("loaded", [p for p in part.predictions if p.row.mode != "none"]),
        )
        for kind, chosen in subsets:
            if chosen:
                ours, plain = errors(chosen, "predicted"), errors(chosen, "roofline")
                lines.append((part.what, kind, len(chosen), *(f"{f(e):.1%}" for e in (ours, plain) for f in (mean, median))))
                if mean(ours) > mean(plain) or median(ours) > median(plain):
                    verdicts.append(f"{part.what}, {kind}: the roofline is better than XGBoost")
                if mean(ours) > 0.15 or median(ours) > 0.08:
                    verdicts.append(f"{part.what}, {kind}: misses MAPE 15 % or median 8 %")
    print_table(("held out", "latency", "rows", "XGBoost MAPE", "median", "roofline MAPE", "median"), lines)
    _print_capacities(parts, verdicts)
    modes = sorted({row.mode for row in rows} - {"none"})
    for mode in modes:
        _print_classes(mode, learned_classes([row for row in rows if row.features.memory_path == default_path(rows)], mode))
    print("\n".join(verdicts) or "all bars met")


def default_path(rows: Sequence[Row]) -> str:
    """The memory path of most rows: a profile measures the device's default one most."""
    paths = [row.features.memory_path for row in rows]
    return max(sorted(set(paths)), key=paths.count)


def _print_capacities(parts: Sequence[HeldOut], verdicts: list[str]) -> None:
    lines = []
    for part in parts:
        pairs = [[(c.measured, getattr(c, which)) for c in part.capacities] for which in ("predicted", "roofline")]
        values = [agreement(found, chunk) for found in pairs for chunk in (None, _CHUNK)]
        lines.append((part.what, len(part.capacities), *(f"{value:.1%}" for value in values)))
        if values[1] < 0.9:
            verdicts.append(f"{part.what}: misses C_l within 25 % for 90 % of launches")
    headers = ("C_l within 25 % of measured", "curves", "XGBoost, bytes", "1 MiB chunks", "roofline, bytes", "1 MiB chunks")
    print_table(headers, lines)


def _print_classes(mode: str, learned: Sequence[Learned]) -> None:
    print(f"operator classes from the response to {mode}:")
    rows = [(e.operator, e.launches, f"{e.tolerance:.2f}", e.learned, e.paper, "" if e.agrees else "disagree") for e in learned]
    print_table(("operator", "launches", "ratio at +20 %", "learned", "Table 5", ""), rows)
