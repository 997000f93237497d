"""The choice of tokens beside its definition."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flashmem.base.errors import RunError, UserError
from flashmem.bundle.language import KEPT, SUM_ERROR
from flashmem.runtime.generation.candidates import Candidates, rows_of
from flashmem.runtime.generation.sampling import Sampler, Sampling

Array = NDArray[Any]

LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.25, 0.2], np.float32)) + 3


def candidates(logits: Array, sampler: Sampler, read: list[int] | None = None, error: float = 0.0) -> Candidates:
    """What a run returns for `logits`, whose sum is off by `error`. `read` counts how often all logits are read."""
    order, temperature = np.argsort(-logits, kind="stable")[:KEPT], sampler.summed_at
    with np.errstate(invalid="ignore"):
        total = np.exp((logits.astype(np.float64) - logits.max()) / temperature).sum() * (1 + error)
    numbers = np.array([*logits[order], total], np.float32)

    def all_logits() -> Array:
        if read is not None:
            read.append(1)
        return logits[None]

    [row] = rows_of(np.concatenate([order.astype(np.int32), numbers.view(np.int32)])[None], temperature, all_logits)
    return row


def chosen(sampling: Sampling, logits: Array, seen: Any = ()) -> int:
    """The first token that is chosen."""
    sampler = Sampler(sampling)
    return sampler.choose(candidates(logits, sampler), seen)


def by_definition(logits: Array, how: dict[str, Any], random: np.random.Generator) -> int:
    """The token that all logits give: numpy's choice by probabilities."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / how["temperature"])
    order = np.argsort(-logits, kind="stable")[: how.get("top_k") or None]
    shares = weights[order] / weights[order].sum()
    kept = np.cumsum(shares) - shares < how.get("top_p", 1.0)
    return int(random.choice(order[kept], p=shares[kept] / shares[kept].sum()))


def shares(count: int = 4000, **how: Any) -> dict[int, float]:
    """How often each token is chosen."""
    sampler = Sampler(Sampling(seed=1, **how))
    drawn = Counter(sampler.choose(candidates(LOGITS, sampler), ()) for _ in range(count))
    return {token: times / count for token, times in drawn.items()}


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
    assert chosen(Sampling(), LOGITS) == 1
    assert chosen(Sampling(repetition_penalty=1.5), LOGITS, [1, 1]) == 3
    negative = np.array([-1.0, -1.5, -3.0], np.float32)
    assert chosen(Sampling(repetition_penalty=2.0), negative, [0]) == 1


def test_equal_seeds_choose_equally() -> None:
    one, two, other = (Sampler(Sampling(temperature=1.0, seed=seed)) for seed in (3, 3, 4))
    drawn = [[sampler.choose(candidates(LOGITS, sampler), ()) for _ in range(40)] for sampler in (one, two, other)]
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
    for logits in ([0.0, np.nan, 1.0], [0.0, np.inf, 1.0], [np.nan] * 3):
        with pytest.raises(RunError, match="the model's logits are not numbers"):
            chosen(Sampling(), np.array(logits, np.float32))


@pytest.mark.parametrize(
    ("how", "most"),
    [
        ({"temperature": 0.7, "top_k": 40}, 0),
        ({"temperature": 1.3, "top_k": KEPT, "top_p": 0.8}, 0),
        ({"temperature": 0.7, "top_p": 0.9}, 40),
        ({"temperature": 0.9}, 60),
        ({"temperature": 2.0, "top_p": 0.95}, 400),
        ({"temperature": 1.0, "top_k": KEPT + 1}, 400),
        ({"temperature": 1e-40}, 400),
    ],
    ids=str,
)
@pytest.mark.parametrize("error", [0.0, 0.9 * SUM_ERROR, -0.9 * SUM_ERROR])
def test_candidates_choose_as_all_logits_do(how: dict[str, Any], most: int, error: float) -> None:
    """All logits are read where a choice may be behind the candidates, or depends on the error of the sum."""
    data, random = np.random.default_rng(7), np.random.default_rng(3)
    sampler, read = Sampler(Sampling(seed=3, **how)), list[int]()
    for _ in range(400):
        logits = data.normal(1, 3, 2000).astype(np.float32)
        with np.errstate(over="ignore"):
            assert sampler.choose(candidates(logits, sampler, read, error), ()) == by_definition(logits, how, random)
    assert len(read) <= most
    assert most < 400 or len(read) > 300


def test_a_penalty_reads_all_logits() -> None:
    """A token behind the candidates may be the next one once those are punished."""
    logits, read = np.arange(200, 100, -1).astype(np.float32), list[int]()
    sampler = Sampler(Sampling(repetition_penalty=3.0))
    assert sampler.choose(candidates(logits, sampler, read), range(KEPT)) == KEPT and read == [1]
