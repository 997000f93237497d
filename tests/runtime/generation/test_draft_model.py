"""Drafts of a small model change how long a generation takes, and never what is generated."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import flashmem
from flashmem.base.errors import BudgetError, UserError
from flashmem.runtime.generation.draft_model import DraftModel, needed_bytes
from flashmem.runtime.generation.generator import Generator
from flashmem.runtime.generation.language_session import RowPart
from flashmem.runtime.generation.speculation import Payoff
from flashmem.runtime.opencl.discovery import list_devices
from tests.runtime.generation.test_generator import prompt, tokens_of
from tests.support.command_line import command_line
from tests.support.gguf_models import SmallLlama

LENGTH = 96
MODEL = SmallLlama(layers=2, formats=("Q8_0",))
DRAFTS = {"the model itself": MODEL, "another model": SmallLlama(layers=1, formats=("Q4_0",))}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODEL.write(tmp_path_factory.mktemp("gguf") / "m.gguf")


@pytest.mark.parametrize("device", list_devices(), ids=lambda device: device.descriptor_name)
@pytest.mark.parametrize("name", DRAFTS)
def test_the_same_tokens(name: str, device: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first model is right whenever it drafts, the second rarely; what is generated is what the model says alone."""
    monkeypatch.setattr(Payoff, "allows", lambda payoff: True)
    monkeypatch.setattr("flashmem.runtime.generation.speculation.Lookup.draft", lambda lookup, most: [])
    options: Any = {"device": device.descriptor_name, "max_length": LENGTH}
    small = flashmem.compile(DRAFTS[name].write(tmp_path / "d.gguf"), tmp_path / "d.flashmem", **options)
    needs = needed_bytes(small, device.descriptor_name)
    whole = flashmem.compile(file, tmp_path / "whole.flashmem", **options)
    budget = needed_bytes(whole, device.descriptor_name) - whole.program.weights_bytes // 2
    model = flashmem.compile(file, tmp_path / "m.flashmem", budget=budget, **options)
    given: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.8, "seed": 2})
    with Generator(model, device=device.descriptor_name) as alone:
        expected = [tokens_of(alone, prompt(length), 40, **each) for each in given for length in (9, 40)]
    with Generator(model, device=device.descriptor_name, budget=budget + needs, draft=small) as generator:
        found, drafted, accepted = [], 0, 0
        for each in given:
            for length in (9, 40):
                found.append(tokens_of(generator, prompt(length), 40, **each))
                report = generator.last
                assert report is not None
                assert needs < report.peak_bytes <= budget + needs
                if not each:
                    drafted, accepted = drafted + report.drafted, accepted + report.accepted
    assert found == expected
    assert drafted > 0
    assert (accepted >= 0.9 * drafted - 7) if name == "the model itself" else (accepted < 0.5 * drafted)


def test_a_budget_that_the_draft_model_fills(file: Path, tmp_path: Path) -> None:
    made = flashmem.compile(file, tmp_path / "m.flashmem", max_length=LENGTH)
    needs = needed_bytes(made, "auto")
    with pytest.raises(BudgetError):
        Generator(made, budget=needs + 1000, draft=made)
    Generator(made, budget=2 * needs, draft=made).close()


def test_other_tokens(file: Path, tmp_path: Path) -> None:
    made = flashmem.compile(file, tmp_path / "m.flashmem", max_length=LENGTH)
    other = flashmem.compile(
        SmallLlama(layers=1, pieces=True).write(tmp_path / "o.gguf"), tmp_path / "o.flashmem", max_length=LENGTH
    )
    with pytest.raises(UserError, match=r"has other tokens than the model \(number 0 is '<unk>', not '<\|endoftext\|>'\)"):
        Generator(made, draft=other)


def test_a_text_with_tokens_that_the_draft_model_lacks() -> None:
    """It makes no draft of a text with one, whose session would refuse it."""

    class Model:
        language = SimpleNamespace(tokens=("a",) * 390, max_length=LENGTH, ends=frozenset[int]())
        cached: ClassVar[list[list[int]]] = [[5]]

        def reusable(self, row: int, tokens: list[int]) -> int:
            return 0

        def next_part(self, row: int, tokens: list[int]) -> tuple[int, list[int]]:
            return len(self.cached[row]), tokens[len(self.cached[row]) :]

        def run(self, parts: dict[int, RowPart]) -> Any:
            assert max(parts[0].tokens) < 390
            self.cached[0] += parts[0].tokens
            return {0: [SimpleNamespace(tokens=[5 + len(self.cached[0])])]}

    model: Any = Model()
    draft = DraftModel(model)
    draft.add([5, 389])
    assert draft.draft(2) == [7, 8]
    draft.add([390])
    draft.add([6])
    assert draft.draft(2) == []


@pytest.mark.thorough
def test_the_command_line(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = command_line(monkeypatch, capfd)
    small = flashmem.compile(file, tmp_path / "d.flashmem", max_length=LENGTH)
    words = ("generate", file, "Hello", "--max-length", str(LENGTH), "--draft")
    outcome = run(*words, small.path, "--budget", "1.5MB", "--json", "--max-new-tokens", "30")
    assert outcome.code == 0
    assert needed_bytes(small, "auto") < outcome.json["peak_bytes"] <= 1_500_000
    outcome = run(*words, small.path, "--budget", "10KB")
    assert outcome.code == 2 and "--budget 10KB is less than --draft needs alone" in outcome.err
    outcome = run(*words, small.path, "--no-speculate")
    assert outcome.code == 2 and "--draft makes drafts, and --no-speculate checks none" in outcome.err
