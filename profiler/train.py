"""Trains the two models of `flashmem.planning.capacity.predictor` on a dataset. Needs numpy and xgboost, and no device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xgboost
from numpy.typing import NDArray

from flashmem.base.errors import UserError
from flashmem.base.files import written_whole
from flashmem.planning.capacity.basis import Basis
from flashmem.planning.capacity.features import (
    GROWING,
    KERNEL_FEATURES,
    LOAD_FEATURES,
    LaunchFeatures,
    kernel_features,
    load_features,
)
from flashmem.planning.capacity.model import SECONDS, SLOWDOWN
from flashmem.planning.capacity.predictor import Predictor, describe
from flashmem.planning.capacity.trees import Trees

from .dataset import Row
from .measure import LEAST_LAUNCHES

_COMMON: dict[str, Any] = {"objective": "reg:squarederror", "seed": 0, "nthread": 2, "tree_method": "hist", "subsample": 0.8}
_SECONDS_PARAMETERS = {**_COMMON, "max_depth": 5, "eta": 0.06, "colsample_bytree": 0.7, "min_child_weight": 2}
_SLOWDOWN_PARAMETERS = {**_COMMON, "max_depth": 6, "eta": 0.08, "colsample_bytree": 0.8, "min_child_weight": 3}
_SECONDS_ROUNDS, _SLOWDOWN_ROUNDS = 250, 200
_FOLDS = 5


def train(rows: Sequence[Row], basis: Basis) -> Predictor:
    """Train the predictor on `rows`. Launches of one case are never on both sides of a fold.

    Raises:
        UserError: too few launches, or none with load.
    """
    alone = [row for row in rows if row.mode == "none"]
    if len(alone) < LEAST_LAUNCHES:
        raise UserError(
            f"{len(alone)} launches are too few to learn from, {LEAST_LAUNCHES} are the least; profile for more minutes"
        )
    if len(rows) == len(alone):
        raise UserError("no launch was measured with bytes streamed during it; profile for more minutes")
    seconds = _train_seconds(alone, basis)
    slowdown = _train_slowdown(rows, alone, basis)
    origins = sorted({row.origin for row in rows})
    describe(seconds, basis, KERNEL_FEATURES, origins)
    describe(slowdown, basis, LOAD_FEATURES, origins)
    alone_trees, loaded_trees = (Trees(bytes(booster.save_raw("ubj"))) for booster in (seconds, slowdown))
    return Predictor(alone_trees, loaded_trees, basis, alone[0].features.memory_path)


def save(predictor: Predictor, stem: Path) -> None:
    """Write both models, each atomically."""
    for trees, suffix in zip(predictor.trees, (SECONDS, SLOWDOWN), strict=True):
        with written_whole(stem.with_name(stem.name + suffix)) as file:
            file.write(trees.raw)


def _train_seconds(alone: Sequence[Row], basis: Basis) -> xgboost.Booster:
    """Train the logarithm of the ratio of latency to the roofline."""
    features = [row.features for row in alone]
    roofline = np.array([basis.roofline(f) for f in features])
    target = np.log(np.array([row.seconds for row in alone]) / roofline)
    data = xgboost.DMatrix(kernel_features(features, list(roofline)), target)
    return xgboost.train(_SECONDS_PARAMETERS, data, _SECONDS_ROUNDS)


def _train_slowdown(rows: Sequence[Row], alone: Sequence[Row], basis: Basis) -> xgboost.Booster:
    """Train the logarithm of the slowdown, which must not fall as bytes grow.

    Its input includes the latency that the first model predicts for an unseen launch, as it will in use.
    """
    expected: dict[str, float] = {}
    order = np.random.default_rng(0).permutation(len(alone))
    for fold in range(_FOLDS):
        held = set(order[fold::_FOLDS].tolist())
        model = _train_seconds([row for i, row in enumerate(alone) if i not in held], basis)
        for i in held:
            expected[alone[i].case] = predicted_seconds(model, alone[i].features, basis)
    loaded = [row for row in rows if row.mode != "none" and row.case in expected]
    weights = 1 / (0.03 + np.array([row.spread for row in loaded]))
    target = np.log(np.maximum([row.slowdown for row in loaded], 1.0))
    data = xgboost.DMatrix(_load_rows(loaded, np.array([expected[row.case] for row in loaded]), basis), target, weight=weights)
    constraints = "(" + ",".join("1" if name in GROWING else "0" for name in LOAD_FEATURES) + ")"
    return xgboost.train({**_SLOWDOWN_PARAMETERS, "monotone_constraints": constraints}, data, _SLOWDOWN_ROUNDS)


def predicted_seconds(model: xgboost.Booster, features: LaunchFeatures, basis: Basis) -> float:
    """Predict latency alone by a model of `_train_seconds`."""
    roofline = basis.roofline(features)
    return float(roofline * np.exp(model.inplace_predict(kernel_features([features], [roofline]))[0]))


def _load_rows(rows: Sequence[Row], seconds: NDArray[np.float64], basis: Basis) -> NDArray[np.float32]:
    kernels = kernel_features([row.features for row in rows], [basis.roofline(row.features) for row in rows])
    own = np.array([float(row.features.own_bytes) for row in rows])
    modes: list[Any] = [row.mode for row in rows]
    streamed = np.array([row.streamed_bytes for row in rows])
    rates = np.array([basis.rate(row.features.memory_path, mode) for row, mode in zip(rows, modes, strict=True)])
    return load_features(kernels, own, seconds, modes, streamed, rates)
