"""`flashmem plan zoo:NAME` and its explanations, from arguments to exit codes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashmem.cli.main import main
from tests.support.paths import DATA

GPTNEO = DATA / "gptneo-tiny.onnx"
LIMITS = ("--m-peak", "500MB", "--lambda", "0.9", "--chunk", "1MiB", "--device", "pocl")
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def flashmem(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path))

    def command(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["flashmem", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        printed = capfd.readouterr()
        assert "Traceback" not in printed.err
        return (left.value.code if isinstance(left.value.code, int) else 0), printed.out, printed.err

    return command


def planned(flashmem: Command, *words: str | Path) -> dict[str, Any]:
    code, out, _ = flashmem("plan", *words, "--json")
    assert code == 0
    data: dict[str, Any] = json.loads(out)
    return data


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("gptneo-125m", 0.49),
        ("gptneo-1.3b", 5.2),
        ("gptneo-2.7b", 10.6),
        ("vit-8b", 30),
        ("llama2-13b", 51),
    ],
)
def test_models_without_a_file_get_a_proven_plan(flashmem: Command, name: str, gigabytes: float) -> None:
    data = planned(flashmem, f"zoo:{name}", *LIMITS, "--lambda", "0")
    plan = data["plan"]
    assert plan["checked"] is True and plan["gap"] <= 0.01 and plan["bound"] <= plan["objective"] + 1e-6
    assert plan["weights_bytes"] / 1e9 == pytest.approx(gigabytes, rel=0.02)
    assert plan["most_in_flight_bytes"] <= plan["m_peak_bytes"] == 500_000_000
    activations = plan["activations"]
    assert 0 < activations["live_bytes"] <= activations["arena_bytes"] <= 1.03 * activations["live_bytes"]
    assert set(data["seconds"]) == {"fuse", "generate", "plan_and_check", "total"}
    assert sum(each["nbytes"] for each in data["why"]) == pytest.approx(plan["preload_ratio"] * plan["weights_bytes"])
    assert ("layers" in data) == (plan["layers"] <= 5000)


def test_a_long_plan_is_shown_in_few_lines_and_whole_if_asked(flashmem: Command) -> None:
    limits = ("zoo:gptneo-1.3b", *LIMITS[:-4], "--chunk", "256KiB", *LIMITS[-2:], "--objective", "paper")
    code, short, _ = flashmem("plan", *limits)
    assert code == 0 and len(short.splitlines()) < 220
    assert re.search(r"activations +[\d.]+ ?MB, of which [\d.]+ ?MB are needed at once", short)
    assert re.search(r"weight file +[\d.]+GB, [\d.]+GB without padding \([\d.]+%\)", short)
    assert re.search(r"order +the model's: activations of [\d.]+MB at most, bound [\d.]+MB, gap 0\.00%", short)
    assert "h.0.c_fc + " in short and "in 16 launches" in short and "--all shows everything" in short
    assert "why they are preloaded" in short and "no capacity left" in short
    code, whole, _ = flashmem("plan", *limits, "--all")
    assert code == 0 and len(whole.splitlines()) > 1400
    assert "h.23.c_fc[15] + " in whole and "more rows" not in whole


def test_weights_asked_for_are_preloaded_and_said_to_be(flashmem: Command) -> None:
    data = planned(flashmem, "zoo:gptneo-125m", *LIMITS, "--preload", "h.3.c_fc.weight", "--preload", "h.5.q.weight[0]")
    asked = {each["weight"]: each for each in data["why"] if each["kind"] == "asked"}
    assert asked.keys() == {"h.3.c_fc.weight", "h.5.q.weight"}
    assert asked["h.3.c_fc.weight"]["slices"] == asked["h.3.c_fc.weight"]["of"] == 3
    assert all(w["preload"] for w in data["weights"] if w["name"].startswith("h.3.c_fc.weight"))


def test_the_plan_of_a_model_gives_its_reasons_too(flashmem: Command) -> None:
    data = planned(flashmem, GPTNEO, "--m-peak", "1MB", "--device", "pocl", "--preload", "val_85")
    preloaded = [w["nbytes"] for w in data["weights"] if w["preload"]]
    assert preloaded and sum(each["nbytes"] for each in data["why"]) == sum(preloaded)
    assert all(row["operators"] for row in data["layers"])


def test_the_smallest_budget_of_a_model_is_printed_and_works(flashmem: Command, tmp_path: Path) -> None:
    budgets = planned(flashmem, GPTNEO, "--device", "pocl")["smallest_budget_bytes"]
    assert budgets["nbytes"] <= budgets["without_patches"] <= budgets["in_model_order"]
    bundle, options = tmp_path / "m.flashmem", ("--device", "pocl", "--no-build")
    code, _, err = flashmem("compile", GPTNEO, "-o", bundle, "--budget", f"{budgets['nbytes'] - 1}B", *options)
    assert code == 2 and f"raise the budget to {budgets['nbytes']} bytes" in err
    assert flashmem("compile", GPTNEO, "-o", bundle, "--budget", f"{budgets['nbytes']}B", *options)[0] == 0
    code, out, _ = flashmem("plan", GPTNEO, "--device", "pocl")
    assert code == 0 and re.search(r"smallest budget +[\d.]+[KM]B; without patches [\d.]+[KM]B, with launches in the", out)


def test_the_plan_of_a_bundle_takes_no_options(flashmem: Command, tmp_path: Path) -> None:
    """The plan was made with options: showing another plan for new options, or ignoring them, would mislead."""
    bundle = tmp_path / "m.flashmem"
    assert flashmem("compile", GPTNEO, "-o", bundle, "--device", "pocl")[0] == 0
    for flag, value in (("--budget", "64MB"), ("--device", "nvidia"), ("--mode", "dma")):
        code, out, err = flashmem("plan", bundle, flag, value)
        assert (code, out) == (2, "") and f"{flag} was fixed when {bundle} was compiled" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("zoo:gpt5",), "choose one of"),
        (("zoo:gptneo-125m", "--shape", "input_ids=1x64"), "--shape"),
        (("zoo:gptneo-125m", "--mu", "0.2"), "--unfusion"),
        (("zoo:gptneo-125m", "--budget", "1MB"), "is too small"),
        (("zoo:gptneo-125m", "--m-peak", "500MB", "--preload", "nobody"), "no weight of that name"),
        (("zoo:gptneo-125m", "--device", "abacus"), "abacus"),
    ],
)
def test_what_has_to_be_changed_is_said_in_a_sentence(flashmem: Command, words: tuple[str, ...], message: str) -> None:
    code, out, err = flashmem("plan", *words)
    assert (code, out) == (2, "") and message in err and len(err.strip().splitlines()) == 1
