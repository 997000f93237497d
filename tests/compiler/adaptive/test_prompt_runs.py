"""Longer runs of a prompt: chosen by arithmetic that is repeated here, and their tokens beside a decoder in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashmem
from flashmem.base.errors import BudgetError
from flashmem.bundle.language import CHECKED_TOKENS, IDS, LONG_RUNS, PROMPT_TOKENS
from flashmem.compiler.adaptive import prompt_runs
from flashmem.compiler.adaptive.prompt_runs import ANSWER, PROMPT, WORTH, WORTH_SECONDS, RunCost, longer_run
from flashmem.runtime.session import Session
from tests.support.compared import DEVICES
from tests.support.gguf_models import SmallLlama

MB, GB = 1_000_000, 1e9
FEW = RunCost(0.0, 14 * MB, 96 * MB, 14 * GB, 1.4 * GB, 60 * MB)
MARGIN = 1e-4


def costs_of(seconds: float, each: float, like: RunCost, activations: int) -> Callable[[int], RunCost]:
    """Runs whose computing takes `seconds`, and `each` further seconds for a token."""
    return lambda tokens: replace(like, compute=seconds + each * tokens, fixed=like.fixed + activations * tokens)


def chosen(cost: Callable[[int], RunCost], longest: int = 2048) -> tuple[int | None, list[int]]:
    """What `longer_run` chooses, and the runs that it predicts for it."""
    asked: list[int] = []

    def known(tokens: int) -> RunCost:
        asked.append(tokens)
        return cost(tokens)

    return longer_run({count: cost(count) for count in (1, CHECKED_TOKENS, PROMPT_TOKENS)}, longest, known), asked


def test_computing_alone_gains_nothing() -> None:
    """All weights stay, and each token takes its time: as on a CPU without a budget."""
    assert chosen(costs_of(0.002, 8e-4, replace(FEW, budget=None), 1000)) == (None, [])


def test_what_is_loaded_for_each_run_is_loaded_for_more_tokens() -> None:
    """46 of 96 MB stay: the rest takes 36 ms from the disk, as long as computing 56 tokens."""
    assert chosen(costs_of(0.002, 6e-4, FEW, 20_000))[0] == 64


def test_launches_that_few_tokens_cannot_fill() -> None:
    """A GPU takes as long for 128 tokens as for 32."""
    gpu = replace(FEW, budget=None)
    assert chosen(costs_of(0.02, 1e-5, gpu, 1000)) == (128, [64, 128])
    assert chosen(costs_of(0.02, 1e-5, gpu, 1000), longest=100) == (64, [64])
    assert chosen(costs_of(0.001, 1e-6, gpu, 1000)) == (None, []), "16 ms are not worth another variant"


def test_a_saving_within_the_error_of_predictions_asks_for_no_further_run() -> None:
    """64 tokens a run would save 5 % of 2.2 s."""
    assert chosen(costs_of(0.0156, 3.88e-3, replace(FEW, budget=None), 1000)) == (None, [])


def test_activations_that_take_the_memory_of_weights() -> None:
    assert chosen(costs_of(0.002, 6e-4, FEW, 200_000))[0] is None


@given(
    st.floats(1e-5, 0.1), st.floats(1e-7, 5e-3), st.integers(0, 200_000), st.sampled_from([None, 20, 40, 60, 120]),
    st.integers(32, 256),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_no_choice_is_better(seconds: float, each: float, activations: int, budget: int | None, longest: int) -> None:
    cost = costs_of(seconds, each, replace(FEW, budget=None if budget is None else budget * MB), activations)

    def took(run: RunCost, fixed: int) -> float:
        loaded = max(0, run.weights + fixed - run.budget) if run.budget is not None else 0
        return sqrt(max(run.compute, loaded / 14e9) * max(run.compute, loaded / 1.4e9))

    def prompt(tokens: int) -> float:
        return PROMPT / tokens * took(cost(tokens), cost(tokens).fixed)

    def whole(tokens: int) -> float:
        return prompt(tokens) + ANSWER * took(cost(1), max(cost(1).fixed, cost(tokens).fixed))

    least = max(WORTH_SECONDS, WORTH * prompt(PROMPT_TOKENS))
    able = [count for count in LONG_RUNS if count <= longest and prompt(PROMPT_TOKENS) - prompt(count) >= least]
    best = min([PROMPT_TOKENS, *able], key=whole)
    found, _ = chosen(cost, longest)
    assert whole(found or PROMPT_TOKENS) == pytest.approx(whole(best))


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_prompts_in_longer_runs_have_the_same_tokens(
    place: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (device, path), model = place, SmallLlama()
    file, lengths = model.write(tmp_path / "m.gguf"), list[int]()
    options: Any = {"device": device, "memory_path": path, "max_length": 200}
    assert len(flashmem.compile(file, tmp_path / "usual.flashmem", build=False, **options).variants) == 3
    monkeypatch.setattr(prompt_runs, "longer_run", lambda costs, longest, cost: 64 if cost(64) else None)
    made, run = flashmem.compile(file, tmp_path / "m.flashmem", **options), Session.run

    def spy(session: Session, names: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        lengths.append(inputs[IDS].shape[1])
        return run(session, names, inputs, *rest, **named)

    monkeypatch.setattr(Session, "run", spy)
    expected = {20: [8, 8, 1, 1, 1, 1], 32: [32], 40: [32, 8], 66: [64, 1, 1], 69: [64, 8], 96: [64, 32], 140: [64, 64, 32]}
    with flashmem.Generator(made, device=device) as generator:
        for count, runs in expected.items():
            tokens = [3 + (count + 37 * number) % 390 for number in range(count)]
            lengths.clear()
            wanted = model.greedy(tokens, 4, MARGIN)
            list(generator.generate(tokens, max_new_tokens=len(wanted) + 1, speculate=False))
            assert generator._cached[count:][: len(wanted)] == wanted
            assert lengths[: len(runs)] == runs and set(lengths[len(runs) :]) <= {1}


def test_a_budget_too_small_for_the_longer_run_does_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SmallLlama(layers=1).write(tmp_path / "m.gguf")

    def smallest(name: str) -> int:
        with pytest.raises(BudgetError) as refused:
            flashmem.compile(file, tmp_path / name, max_length=160, budget=1000, build=False)
        assert refused.value.smallest_bytes is not None
        return refused.value.smallest_bytes

    usual = smallest("a")
    monkeypatch.setattr(prompt_runs, "longer_run", lambda costs, longest, cost: 128 if cost(128) else None)
    assert smallest("b") == usual, "the refusal names what suffices"
    assert len(flashmem.compile(file, tmp_path / "c", max_length=160, budget=usual, build=False).variants) == 3
    assert len(flashmem.compile(file, tmp_path / "d", max_length=160, budget=3 * usual, build=False).variants) == 4
