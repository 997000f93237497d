"""The choice of tokens beside its definition."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from flashmem.base.errors import RunError, UserError
from flashmem.runtime.generation.sampling import Sampler, Sampling

LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.25, 0.2], np.float32)) + 3


def shares(count: int = 4000, **how: Any) -> dict[int, float]:
    """How often each token is chosen."""
    sampler = Sampler(Sampling(seed=1, **how))
    return {token: times / count for token, times in Counter(sampler.choose(LOGITS, ()) for _ in range(count)).items()}


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ({"temperature": 1.0}, {0: 0.05, 1: 0.4, 2: 0.1, 3: 0.25, 4: 0.2}),
        ({"temperature": 0.5}, {0: 0.0091, 1: 0.5818, 2: 0.0364, 3: 0.2273, 4: 0.1455}),
        ({"temperature": 1.0, "top_k": 2}, {1: 0.6154, 3: 0.3846}),
        ({"temperature": 1.0, "top_p": 0.6}, {1: 0.6154, 3: 0.3846}),
        ({"temperature": 1.0, "top_p": 0.3}, {1: 1.0}),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.7}, {1: 0.6154, 3: 0.3846}),
    ],
)
def test_shares(how: dict[str, Any], wanted: dict[int, float]) -> None:
    found = shares(**how)
    assert found.keys() == wanted.keys()
    for token, share in wanted.items():
        assert abs(found[token] - share) < 4 * np.sqrt(share / 4000)


def test_the_likeliest_and_the_penalty() -> None:
    assert Sampler(Sampling()).choose(LOGITS, ()) == 1
    assert Sampler(Sampling(repetition_penalty=1.5)).choose(LOGITS, [1, 1]) == 3
    negative = np.array([-1.0, -1.5, -3.0], np.float32)
    assert Sampler(Sampling(repetition_penalty=2.0)).choose(negative, [0]) == 1


def test_equal_seeds_choose_equally() -> None:
    one, two, other = (Sampler(Sampling(temperature=1.0, seed=seed)) for seed in (3, 3, 4))
    drawn = [[sampler.choose(LOGITS, ()) for _ in range(40)] for sampler in (one, two, other)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"temperature": -1.0}, "temperature -1.0 is not possible; give a number that is 0 or more"),
        ({"top_k": -1}, "top_k -1 is not possible; give a number that is 0 or more"),
        ({"top_p": 0.0}, "top_p 0.0 is not possible; give a number that is above 0, and 1 at most"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0 is not possible; give a number that is above 0"),
        ({"temperature": float("nan")}, "temperature nan is not possible; give a number that is 0 or more"),
    ],
)
def test_numbers_out_of_range(how: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        Sampling(**how)
    assert str(caught.value) == said


def test_logits_that_are_no_numbers() -> None:
    for value in (np.nan, np.inf):
        with pytest.raises(RunError, match="the model's logits are not numbers"):
            Sampler(Sampling()).choose(np.array([0.0, value, 1.0], np.float32), ())
