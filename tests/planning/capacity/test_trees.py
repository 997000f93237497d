"""NumPy's evaluation of trees beside XGBoost's own."""

from __future__ import annotations

import numpy as np
import pytest
import xgboost

from flashmem.base.resources import names, read_bytes
from flashmem.planning.capacity.model import SECONDS, SLOWDOWN
from flashmem.planning.capacity.trees import Trees


@pytest.mark.parametrize("file", [name + suffix for suffix in (SECONDS, SLOWDOWN) for name in names("devices", suffix)])
def test_shipped_models_predict_what_xgboost_predicts(file: str) -> None:
    data = read_bytes("devices", file)
    booster = xgboost.Booster()
    booster.load_model(bytearray(data))
    conditions = Trees(data)._condition
    draw = np.random.default_rng(0)
    rows = draw.normal(3, 6, (300, booster.num_features())).astype(np.float32)
    rows[:50] = draw.choice(conditions, (50, rows.shape[1]))  # a value may equal a condition
    assert (Trees(data).predict(rows) == booster.inplace_predict(rows)).all()


def test_trees_of_different_depths_and_a_base_score() -> None:
    draw = np.random.default_rng(1)
    rows = draw.normal(0, 1, (400, 3)).astype(np.float32)
    labels = 7.5 + np.where(rows[:, 0] > 1.5, rows[:, 1], 0)
    booster = xgboost.train({"max_depth": 7, "base_score": 7.25, "seed": 1}, xgboost.DMatrix(rows, labels), 30)
    booster.set_attr(mine="a text")
    trees = Trees(bytes(booster.save_raw("ubj")))
    assert trees.attributes == {"mine": "a text"}
    assert (trees.predict(rows) == booster.inplace_predict(rows)).all()
    assert trees.predict(rows[:0]).shape == (0,)


@pytest.mark.parametrize("data", [b"", b"not a model", b"{}", read_bytes("devices", "pocl" + SECONDS)[:5000]])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a model of XGBoost"):
        Trees(data)
