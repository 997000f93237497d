"""The trained predictor: two XGBoost models, trained on measurements of `flashmem profile` (FlashMem section 4.2, Figure 4).

The first predicts the ratio of a kernel's latency to its roofline. The second predicts the factor by which streaming slows the
kernel down; its predictions never fall as the streamed bytes grow. The models are two files next to the descriptor,
NAME.seconds.ubj and NAME.slowdown.ubj, in XGBoost's format. Their attributes contain the rates of the device that they need.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple
from functools import lru_cache
from math import isclose
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import UserError
from flashmem.base.resources import read_bytes
from flashmem.base.types import MemoryPath, TransferMode
from flashmem.planning.capacity.basis import Basis
from flashmem.planning.capacity.features import (
    KERNEL_FEATURES,
    LOAD_FEATURES,
    MAX_RATIO,
    LaunchFeatures,
    kernel_features,
    launch_features,
    load_features,
)
from flashmem.planning.capacity.model import SECONDS, SLOWDOWN
from flashmem.planning.capacity.trees import Trees
from flashmem.program.launches import Launch
from flashmem.target.descriptor import Rates

FORMAT_VERSION = 1
_ATTRIBUTE = "flashmem"
_GRID = MAX_RATIO * np.linspace(0, 1, 49)
"""Ratios at which the slowdown of a kernel is predicted; it is linear between them."""

_ROUNDED = 0.005
"""Rates in a descriptor are rounded: rates that differ by less are the same."""


class Predictor:
    """Both models, for launches of programs on one memory path."""

    def __init__(self, seconds: Trees, slowdown: Trees, basis: Basis, memory_path: MemoryPath) -> None:
        self._seconds, self._slowdown = seconds, slowdown
        self._kernel_columns = _columns(seconds, KERNEL_FEATURES)
        self._load_columns = _columns(slowdown, LOAD_FEATURES)
        self.basis = basis
        self._here = basis  # of the processor that is predicted
        self._elsewhere: dict[tuple[float, ...], Predictor] = {}  # by the rates there
        self._path = memory_path
        self._known: dict[LaunchFeatures, float] = {}
        self._curves: dict[tuple[LaunchFeatures, TransferMode], NDArray[np.float64]] = {}

    @property
    def trees(self) -> tuple[Trees, Trees]:
        """The models of latency and of slowdown."""
        return self._seconds, self._slowdown

    @property
    def trained_on(self) -> tuple[str, ...]:
        """The origins of the launches it was trained on (`profiler.dataset.Row`); empty if the models do not record them."""
        about = _about(self._seconds)
        return tuple(about.get("origins", ()))

    @property
    def note(self) -> str:
        """The source of the measurements."""
        return f"load capacities from the model trained on {self.basis.source}"

    def at(self, rates: Rates, mode: TransferMode) -> Predictor:
        """The predictor for a processor with other rates: the trained ratios to the roofline apply to the roofline there.

        `mode`: the one that `rates.cached_bandwidth` was measured with.
        """
        trained = self.basis
        compute = rates.gemm_flops, rates.memory_bandwidth, rates.launch_seconds
        if all(isclose(one, other, rel_tol=_ROUNDED) for one, other in zip(compute, astuple(trained), strict=False)):
            return self
        known = trained.mode_rates.get(f"{self._path} {mode}")
        scale = rates.cached_bandwidth / known if known else 1.0
        there = *compute, scale
        if there not in self._elsewhere:
            made = self._elsewhere[there] = Predictor(self._seconds, self._slowdown, trained, self._path)
            made._here = Basis(*compute, {name: scale * rate for name, rate in trained.mode_rates.items()}, trained.source)
        return self._elsewhere[there]

    def seconds(self, launch: Launch, weight_bytes: int = 0) -> float:
        """Latency alone."""
        return self.seconds_of(launch_features(launch, weight_bytes, self._path))

    def loaded_seconds(self, launch: Launch, weight_bytes: int, streamed_bytes: float, mode: TransferMode) -> float:
        """Latency with bytes streamed during it. Beyond the profiled range (`MAX_RATIO`), more bytes add their full time."""
        features = launch_features(launch, weight_bytes, self._path)
        ratio = streamed_bytes / features.own_bytes
        within = self.slowdown_of(features, streamed_bytes, mode) * self.seconds_of(features)
        return within + max(0.0, ratio - MAX_RATIO) * features.own_bytes / self._here.rate(self._path, mode)

    def streamable_bytes(self, launch: Launch, weight_bytes: int, slowdown: float, mode: TransferMode) -> float:
        """The most bytes within a slowdown, at most as many as were profiled during such a kernel."""
        return self.streamable_of(launch_features(launch, weight_bytes, self._path), slowdown, mode)

    def seconds_of(self, features: LaunchFeatures) -> float:
        """`seconds` of a launch, from its features."""
        if features not in self._known:
            roofline = self.basis.roofline(features)
            difference = self._seconds.predict(kernel_features([features], [roofline])[:, self._kernel_columns])
            self._known[features] = self._here.roofline(features) * float(np.exp(difference[0]))
        return self._known[features]

    def slowdown_curve(self, features: LaunchFeatures, mode: TransferMode) -> NDArray[np.float64]:
        """The factor by which streaming slows the launch down, at the ratios of `_GRID`; at least 1, and never falling."""
        key = (features, mode)
        if key not in self._curves:
            count = len(_GRID)
            kernels = np.repeat(kernel_features([features], [self.basis.roofline(features)]), count, 0)
            own = np.full(count, float(features.own_bytes))
            seconds = np.full(count, self.seconds_of(features))
            rates = np.full(count, self._here.rate(features.memory_path, mode))
            rows = load_features(kernels, own, seconds, [mode] * count, own * _GRID, rates)
            curve = np.exp(np.maximum(self._slowdown.predict(rows[:, self._load_columns]), 0.0).astype(np.float64))
            curve[0] = 1.0
            self._curves[key] = curve
        return self._curves[key]

    def slowdown_of(self, features: LaunchFeatures, streamed_bytes: float, mode: TransferMode) -> float:
        """The factor by which `streamed_bytes`, at most `MAX_RATIO` times its own bytes, slow the launch down."""
        return float(np.interp(streamed_bytes / features.own_bytes, _GRID, self.slowdown_curve(features, mode)))

    def streamable_of(self, features: LaunchFeatures, slowdown: float, mode: TransferMode) -> float:
        """`streamable_bytes` of a launch, from its features."""
        return ratio_within(_GRID, self.slowdown_curve(features, mode), slowdown) * features.own_bytes

    @property
    def tells_classes(self) -> bool:
        """No: of many kinds, the response was measured at one to three launches (docs/explanation/capacity.md)."""
        return False

    def prepare(self, launches: Iterable[tuple[Launch, int]], mode: TransferMode) -> None:
        """Predictions are made one by one, as they are asked for."""

    @staticmethod
    def load(name_or_stem: str, memory_path: MemoryPath) -> Predictor:
        """Load the models of a shipped descriptor by its name, or of a file by its path without `.seconds.ubj`.

        Raises:
            UserError: they are missing, damaged, or of another version.
        """
        seconds, slowdown = (load_trees(name_or_stem, suffix) for suffix in (SECONDS, SLOWDOWN))
        for each, suffix, features in ((seconds, SECONDS, KERNEL_FEATURES), (slowdown, SLOWDOWN, LOAD_FEATURES)):
            about = _about(each)
            if about.get("version") != FORMAT_VERSION or not set(about.get("features", ())) <= set(features):
                what = f"capacity model {name_or_stem}{suffix} is of another version of flashmem"
                raise UserError(f"{what}; run flashmem profile again")
        return _predictor(seconds, slowdown, memory_path)


def load_trees(name_or_stem: str, suffix: str) -> Trees:
    """One of the two models (`SECONDS`, `SLOWDOWN`), shipped by name or by a path without its suffix.

    Raises:
        UserError: it is missing or damaged.
    """
    name = name_or_stem + suffix
    try:
        return _trees(Path(name).read_bytes() if Path(name).is_absolute() else read_bytes("devices", name))
    except (OSError, ValueError) as error:
        raise UserError(f"capacity model {name} cannot be read ({error}); run flashmem profile again") from error


@lru_cache(maxsize=16)
def _trees(data: bytes) -> Trees:
    """The model in `data`; all predictors of the same bytes share it, because parsing takes 60 ms."""
    return Trees(data)


def _about(trees: Trees) -> dict[str, Any]:
    """What `describe` has written."""
    found: dict[str, Any] = json.loads(trees.attributes.get(_ATTRIBUTE, "{}"))
    return found


@lru_cache(maxsize=8)
def _predictor(seconds: Trees, slowdown: Trees, memory_path: MemoryPath) -> Predictor:
    """The predictor of two models. A program is planned several times, and most of its launches are the same each time."""
    return Predictor(seconds, slowdown, Basis(**_about(slowdown)["basis"]), memory_path)


def ratio_within(ratios: NDArray[np.float64], slowdowns: NDArray[np.float64], allowed: float) -> float:
    """The last ratio up to which `slowdowns` (factors, at ascending `ratios`, with linear interpolation) are at most 1 +
    `allowed`."""
    limit = 1.0 + allowed
    beyond = np.flatnonzero(slowdowns > limit)
    if not beyond.size:
        return float(ratios[-1])
    after = int(beyond[0])
    if after == 0:
        return 0.0
    low, high = slowdowns[after - 1], slowdowns[after]
    return float(ratios[after - 1] + (ratios[after] - ratios[after - 1]) * (limit - low) / (high - low))


def _columns(trees: Trees, features: Sequence[str]) -> list[int]:
    """Columns of the features that a model was trained with. A model trained before a feature was added does not use it."""
    trained = _about(trees).get("features", features)
    return [features.index(name) for name in trained]


def describe(booster: Any, basis: Basis, features: tuple[str, ...], origins: Sequence[str] = ()) -> None:
    """Write the attributes that `Predictor.load` needs into `booster`, and the origins of its training data."""
    about = {"version": FORMAT_VERSION, "features": features, "basis": asdict(basis), "origins": list(origins)}
    booster.set_attr(**{_ATTRIBUTE: json.dumps(about, sort_keys=True)})
