"""Train the two models of a GPU family on pairs of compiled kernels and shapes. XGBoost trains, and its predictions are the
reference of `flashmem.planning.capacity.trees`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xgboost
from numpy.typing import NDArray

from flashmem.base.files import written_whole
from flashmem.base.types import TransferMode
from flashmem.planning.capacity.family import (
    ATTRIBUTE,
    CODE_FEATURES,
    FAMILY_MODES,
    FORMAT_VERSION,
    SHARES,
    STREAM_FEATURES,
    STREAM_GROWING,
    code_features,
    stream_features,
)
from flashmem.planning.capacity.features import Matrix
from flashmem.planning.capacity.model import SECONDS, SLOWDOWN
from flashmem.planning.capacity.trees import Trees
from flashmem.profiler.phone_compilers.pairs import Pair

_COMMON: dict[str, Any] = {"objective": "reg:squarederror", "seed": 0, "nthread": 1, "tree_method": "hist", "subsample": 0.8}
_SECONDS_PARAMETERS = {**_COMMON, "max_depth": 6, "eta": 0.1, "colsample_bytree": 0.7, "min_child_weight": 2}
_SLOWDOWN_PARAMETERS = {**_COMMON, "max_depth": 6, "eta": 0.12, "colsample_bytree": 0.8, "min_child_weight": 4}
_SECONDS_ROUNDS, _SLOWDOWN_ROUNDS = 160, 140
_AMOUNTS = 6
"""Amounts of streamed bytes for each pair and mode, drawn from `SHARES` and between."""


def train(pairs: Sequence[Pair], source: str) -> tuple[Trees, Trees]:
    """The models of latency and of slowdown; `source` says what they were trained on."""
    launches, gpus = [pair.launch for pair in pairs], [pair.gpu for pair in pairs]
    code = code_features(launches, gpus)
    alone = np.array([pair.model.seconds(pair.launch) for pair in pairs])
    ideal = np.array([pair.gpu.ideal_seconds(pair.launch) for pair in pairs])
    launching = np.array([pair.gpu.launch_seconds for pair in pairs])
    seconds = xgboost.train(_SECONDS_PARAMETERS, xgboost.DMatrix(code, np.log((alone - launching) / ideal)), _SECONDS_ROUNDS)
    slowdown = _train_slowdown(pairs, code, alone)
    return _sealed(seconds, CODE_FEATURES, source), _sealed(slowdown, STREAM_FEATURES, source)


def _train_slowdown(pairs: Sequence[Pair], code: Matrix, alone: NDArray[np.float64]) -> xgboost.Booster:
    """Train the logarithm of the slowdown, which must not fall as bytes grow."""
    draw = np.random.default_rng(0)
    launches, gpus = [pair.launch for pair in pairs], [pair.gpu for pair in pairs]
    parts, targets = [], []
    for mode in FAMILY_MODES:
        shares = drawn_shares(len(pairs), draw)
        parts.append(stream_features(code, launches, gpus, alone, [mode] * len(pairs), shares))
        targets.append(np.log(slowdowns(pairs, alone, mode, shares)).reshape(-1))
    data = xgboost.DMatrix(np.concatenate(parts), np.concatenate(targets))
    constraints = "(" + ",".join("1" if name in STREAM_GROWING else "0" for name in STREAM_FEATURES) + ")"
    return xgboost.train({**_SLOWDOWN_PARAMETERS, "monotone_constraints": constraints}, data, _SLOWDOWN_ROUNDS)


def drawn_shares(count: int, draw: np.random.Generator) -> NDArray[np.float64]:
    """[count, _AMOUNTS] amounts of bytes as shares, denser where they are small."""
    at = draw.uniform(1, len(SHARES) - 1, (count, _AMOUNTS))
    found: NDArray[np.float64] = np.interp(at, np.arange(len(SHARES)), SHARES)
    return found


def slowdowns(
    pairs: Sequence[Pair], alone: NDArray[np.float64], mode: TransferMode, shares: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The labels: [pairs, amounts] factors of the pipeline model with `shares` of bytes streamed."""
    found = np.empty(shares.shape)
    for at, pair in enumerate(pairs):
        model, last = pair.model, pair.gpu.last[mode]
        for column, share in enumerate(shares[at].tolist()):
            found[at, column] = model.loaded_seconds(pair.launch, share * last * alone[at], mode) / alone[at]
    return np.maximum(found, 1.0)


def _sealed(booster: xgboost.Booster, features: Sequence[str], source: str) -> Trees:
    booster.set_attr(**{ATTRIBUTE: json.dumps({"version": FORMAT_VERSION, "features": list(features), "source": source})})
    return Trees(bytes(booster.save_raw("ubj")))


def save(trees: tuple[Trees, Trees], stem: Path) -> None:
    """Write both models, each whole."""
    for each, suffix in zip(trees, (SECONDS, SLOWDOWN), strict=True):
        with written_whole(stem.with_name(stem.name + suffix)) as file:
            file.write(each.raw)
