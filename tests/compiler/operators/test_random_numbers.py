"""Random operators: their generator against published numbers, their distributions against theory, and repetition by seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from flashmem.compiler.ir.graph import Node
from flashmem.compiler.operators.random_numbers import key_of
from tests.support.compared import DEVICES, Array, Nodes, answers_of

COUNT = 200_000


def philox(row: NDArray[np.uint32], column: NDArray[np.uint32], key: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Philox2x32-10 in wide integers."""
    left, right = column.astype(np.uint64), row.astype(np.uint64)
    for _ in range(10):
        product = left * np.uint64(0xD256D193)
        left, right = (product >> np.uint64(32)) ^ np.uint64(key) ^ right, product & np.uint64(0xFFFFFFFF)
        key = (key + 0x9E3779B9) & 0xFFFFFFFF
    return left, right


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0), 0, (0xFF1DAE59, 0x6CD10DF2)),
        ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
        ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
    ],
)
def test_the_reference_is_philox(counter: tuple[int, int], key: int, words: tuple[int, int]) -> None:
    """The known answers that its authors publish with Random123."""
    column, row = (np.array([word], np.uint32) for word in counter)
    assert tuple(int(word[0]) for word in philox(row, column, key)) == words


def drawn(nodes: Nodes, place: tuple[str, str], folder: Path) -> list[Array]:
    return answers_of(nodes.proto(), nodes.feeds, place, folder)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_numbers_are_those_of_the_generator(place: tuple[str, str], tmp_path: Path) -> None:
    nodes = Nodes()
    x = nodes.input(np.zeros((6, 35), np.float32))
    (uniform,) = nodes.node("RandomUniformLike", x, seed=3.0)
    (normal,) = nodes.node("RandomNormalLike", x, seed=3.0)
    answers = drawn(nodes, place, tmp_path)
    row, column = np.meshgrid(np.arange(14, dtype=np.uint32), np.arange(15, dtype=np.uint32), indexing="ij")
    words = [
        philox(row, column, key_of(Node(op, f"{op}_{name}", [], [], {"seed": 3.0})))
        for op, name in (("RandomUniformLike", uniform), ("RandomNormalLike", normal))
    ]
    fractions = [[(word >> np.uint64(8)).astype(np.float64).reshape(6, 35) / 2**24 for word in pair] for pair in words]
    np.testing.assert_array_equal(answers[0], fractions[0][0])
    expected = np.sqrt(-2 * np.log(fractions[1][0] + 2**-24)) * np.cos(2 * np.pi * fractions[1][1])
    np.testing.assert_allclose(answers[1], expected, rtol=1e-4, atol=2e-6)


def near(value: float, mean: float, deviation: float) -> None:
    """Within five standard deviations of its mean: a correct generator misses it with a probability of 6e-7."""
    assert abs(value - mean) < 5 * deviation, (value, mean, deviation)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_moments(place: tuple[str, str], tmp_path: Path) -> None:
    nodes = Nodes()
    p = np.random.default_rng(4).uniform(0.05, 0.6, (400, 500)).astype(np.float32)
    like = nodes.input(np.zeros((2, 100, 1000), np.int64))
    nodes.node("RandomNormal", shape=[499, 401], mean=3.0, scale=0.5)  # 401 and 499 are primes
    nodes.node("RandomNormalLike", like, mean=-7.0, scale=12.0, dtype=1)
    nodes.node("RandomUniform", shape=[200_003], low=-3.0, high=5.0, dtype=10, dtypes=["float16"])  # a prime
    nodes.node("RandomUniformLike", like, dtype=1)
    nodes.node("Bernoulli", nodes.input(p))
    nodes.node("Bernoulli", nodes.input(np.full((COUNT,), 0.25, np.float32)), dtype=9, dtypes=["bool"])
    answers = [answer.astype(np.float64) for answer in drawn(nodes, place, tmp_path)]
    for answer, mean, scale in ((answers[0], 3, 0.5), (answers[1], -7, 12)):
        standard, root = (answer - mean) / scale, np.sqrt(answer.size)
        # Standard deviations of the sample means of z, z^2, z^3 and z^4, whose variances are 1, 2, 15 and 96.
        for power, (expected, variance) in enumerate(((0, 1), (1, 2), (0, 15), (3, 96)), start=1):
            near(float(np.mean(standard**power)), expected, np.sqrt(variance) / root)
        near(float(np.mean(standard.reshape(-1)[1:] * standard.reshape(-1)[:-1])), 0, 1 / root)
    for answer, low, high in ((answers[2], -3, 5), (answers[3], 0, 1)):
        part, root = (answer - low) / (high - low), np.sqrt(answer.size)
        assert part.min() >= 0 and part.max() <= 1
        near(float(part.mean()), 1 / 2, np.sqrt(1 / 12) / root)
        near(float((part**2).mean()), 1 / 3, np.sqrt(4 / 45) / root)
        counts, _ = np.histogram(part, 16, (0, 1))
        for count in counts:
            near(count / answer.size, 1 / 16, np.sqrt(15) / 16 / root)
    assert {*np.unique(answers[4])} == {*np.unique(answers[5])} == {0.0, 1.0}
    near(float(answers[4].sum()), float(p.sum()), float(np.sqrt((p * (1 - p)).sum())))
    assert np.corrcoef(answers[4].reshape(-1), p.reshape(-1))[0, 1] > 0.3
    near(float(answers[5].mean()), 0.25, np.sqrt(0.25 * 0.75 / COUNT))
    assert len({answer.reshape(-1)[:7].tobytes() for answer in answers[:4]}) == 4


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_multinomial(place: tuple[str, str], tmp_path: Path) -> None:
    weights = np.array([[1, 2, 3, 4, 0], [0, 100, 0, 1, 400]], np.float64)
    with np.errstate(divide="ignore"):
        logarithms = (np.log(weights) + np.array([[0], [3]])).astype(np.float32)
    nodes = Nodes()
    x = nodes.input(logarithms)
    nodes.node("Multinomial", x, sample_size=20_000, dtypes=["int32"])
    nodes.node("Multinomial", x, sample_size=3, dtype=7, dtypes=["int64"], seed=1.0)
    many, few = drawn(nodes, place, tmp_path)
    assert many.shape == (2, 20_000) and few.shape == (2, 3) and few.dtype == np.int64
    for row, weight in zip(many, weights / weights.sum(1, keepdims=True), strict=True):
        counts = np.bincount(row, minlength=5)
        for count, p in zip(counts, weight, strict=True):
            near(float(count), 20_000 * p, float(np.sqrt(20_000 * p * (1 - p))) + 1e-9)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_runs_repeat_and_seeds_differ(place: tuple[str, str], tmp_path: Path) -> None:
    def once(seed: float | None) -> list[Array]:
        nodes = Nodes()
        attributes = {} if seed is None else {"seed": seed}
        x = nodes.input(np.full((50, 40), 0.5, np.float32))
        for op in ("RandomNormalLike", "RandomUniformLike", "Bernoulli", "Bernoulli"):
            nodes.node(op, x, **attributes)
        return drawn(nodes, place, tmp_path)

    answers = {seed: [once(seed), once(seed)] for seed in (None, 1.0, 2.5)}
    for first, again in answers.values():
        for one, other in zip(first, again, strict=True):
            np.testing.assert_array_equal(one, other)
    for index in range(3):
        assert len({first[index].tobytes() for first, _ in answers.values()}) == 3
    assert answers[None][0][2].tobytes() != answers[None][0][3].tobytes()  # without a seed, two nodes draw different numbers
