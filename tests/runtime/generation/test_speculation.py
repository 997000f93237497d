"""Drafts change how long a generation takes, and never what is generated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashmem
from flashmem.bundle.language import CHECKED_TOKENS
from flashmem.runtime.engine.bound_program import BoundProgram
from flashmem.runtime.generation.generator import Generator
from flashmem.runtime.generation.language_session import RowPart
from flashmem.runtime.generation.speculation import Lookup, Payoff
from flashmem.runtime.opencl.discovery import list_devices
from tests.runtime.generation.test_generator import prompt, tokens_of
from tests.support.gguf_models import SmallLlama

PLACES = [(device.descriptor_name, budget) for device in list_devices() for budget in (False, True)]


def _found(tokens: list[int], most: int) -> list[int]:
    """What followed the last occurrence of the last three tokens, or two, by search."""
    for size in (3, 2):
        last = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if len(tokens) >= size and tokens[start : start + size] == last:
                return tokens[start + size :][:most]
    return []


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(1, 9), max_size=8), st.integers(1, 7))
def test_what_followed_before(tokens: list[int], cuts: list[int], most: int) -> None:
    lookup, rest = Lookup(), tokens
    for cut in cuts:
        lookup.add(rest[:cut])
        rest = rest[cut:]
    lookup.add(rest)
    assert lookup.draft(most) == _found(tokens, most)


def test_drafts_that_do_not_pay_become_rare() -> None:
    payoff, checks = Payoff(), 0
    assert not payoff.allows()  # nothing is known yet
    payoff.single(1.0)
    for _ in range(1000):
        if payoff.allows():
            payoff.checked(3.0, 1)
            checks += 1
        else:
            payoff.single(1.0)
    assert 1000 / 64 - 2 <= checks <= 1000 / 64 + 8
    assert 2 * checks <= 0.05 * 1000  # the seconds that they cost
    for _ in range(100):  # a part that repeats
        if payoff.allows():
            payoff.checked(3.0, 8)
    assert all(payoff.allows() for _ in range(20))


def test_a_slow_return_from_a_check_counts() -> None:
    """As where a session loads kept weights again for a run of another length."""
    payoff, seconds, spent = Payoff(), 0.0, 0.0
    payoff.single(1.0)
    for _ in range(3000):
        if payoff.allows():
            payoff.checked(25.0, 2)
            payoff.returned(25.0)
            spent += 23.0 + 24.0
        else:
            payoff.single(1.0)
            seconds += 1.0
    assert 0 < spent <= 0.05 * seconds + 47.0  # the last one is not yet made up for


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SmallLlama(layers=2, formats=("Q8_0",)).write(tmp_path_factory.mktemp("gguf") / "small.gguf")


@pytest.mark.parametrize(("device", "in_budget"), PLACES)
def test_the_same_tokens_with_and_without_drafts(
    device: str, in_budget: bool, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small models repeat themselves after a while. Other words in between make drafts wrong."""
    monkeypatch.setattr(Payoff, "allows", lambda payoff: True)
    options: Any = {"device": device, "max_length": 160}
    if in_budget:
        whole = flashmem.compile(file, tmp_path / "whole.flashmem", **options).program
        fixed = whole.arena_bytes + whole.states_bytes + whole.constants_bytes
        options["budget"] = fixed + whole.weights_bytes // 2
    made = flashmem.compile(file, tmp_path / "m.flashmem", **options)
    assert {port.shape[1] for each in made.variants for port in each.program.inputs if port.shape} == {1, CHECKED_TOKENS, 32}
    drafted = accepted = 0
    with Generator(made, device=device) as generator:
        once = tokens_of(generator, prompt(20), 30)
        for sampling in ({}, {"temperature": 0.7, "seed": 4}, {"repetition_penalty": 1.2}):
            for tokens in ([*prompt(20), *once, *prompt(20)], [*prompt(9), 7, 9, *prompt(8)]):
                found = []
                for speculate in (False, True):
                    given: Any = {"max_new_tokens": 60, "speculate": speculate, **sampling}
                    text = "".join(generator.generate(tokens, **given))
                    found.append((text, generator._cached[len(tokens) :]))
                    report = generator.last
                    assert report is not None and report.accepted <= report.drafted
                    assert report.drafted == 0 or speculate
                    assert made.budget_bytes is None or report.peak_bytes <= made.budget_bytes
                    drafted, accepted = drafted + report.drafted, accepted + report.accepted
                assert found[0] == found[1]
    assert 0 < accepted < drafted


@pytest.mark.parametrize("device", list_devices(), ids=lambda device: device.descriptor_name)
def test_shape_variants_of_a_model_with_states_stay_bound(
    device: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of one token, of several and of many alternate in the same memory, with the bits of programs bound anew."""
    made = flashmem.compile(file, tmp_path / "m.flashmem", device=device.descriptor_name, max_length=64)
    assert len({each.program.arena_bytes for each in made.variants}) == 1
    found = []
    for room in (True, False):
        if not room:
            monkeypatch.setattr(BoundProgram, "has_room_for", lambda *given: False)
        with Generator(made, device=device.descriptor_name) as generator:
            bound, peaks = set(), dict[int, int]()
            for number, length in enumerate((32, 1, 8, 1, 8, 8, 1, 32, 8, 1)):
                found.append([each.read() for each in generator._model.run({0: RowPart(number, prompt(length, number))})[0]])
                report = generator._model.session.last_run
                assert report is not None
                bound.add(id(generator._model.session._engine.bound))
                assert peaks.setdefault(length, report.memory.peak_bytes) == report.memory.peak_bytes  # outputs differ
            assert len(bound) == (3 if room else 1)
    for one, other in zip(found[:10], found[10:], strict=True):
        np.testing.assert_array_equal(one, other)
