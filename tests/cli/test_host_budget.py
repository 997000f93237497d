"""`--host-budget` on both command lines: reports, predictions and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

import flashmem as package
from flashmem.program.program import host_bytes
from flashmem.runtime.opencl.discovery import find_device
from flashmem.schedule.residency import streamed_layout
from tests.support.command_line import Command, command_line
from tests.support.mini_bundle import write_mini_bundle
from tests.support.own_memory import give_own_memory, wait_for_tiers


@pytest.fixture
def flashmem(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return command_line(monkeypatch, capfd)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_mini_bundle(tmp_path / "m.flashmem").path


def staging_and_streamed(bundle: Path) -> tuple[int, int]:
    """Bytes of staging in mode dma with copied outputs, and of the slices that each run loads."""
    opened = package.Bundle.open(bundle)
    sizes = {part.name: part.file_bytes for part in opened.program.slices}
    layout = streamed_layout(opened.program, opened.plan, "dma", shares_memory=False)
    return layout.ring_bytes + host_bytes(opened.program), sum(sizes[w.name] for w in opened.plan.weights if not w.preload)


def test_run_reports_both_memories(flashmem: Command, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_own_memory(monkeypatch, find_device("pocl"))
    wait_for_tiers(monkeypatch)
    staging, streamed = staging_and_streamed(bundle)
    usual = flashmem("run", bundle, "--mode", "dma", "--json").json["memory"]
    report = flashmem("run", bundle, "--mode", "dma", "--repeat", "3", "--json", "--host-budget", "1GB").json["memory"]
    host = report["host"]
    assert usual["host"]["budget_bytes"] is None and usual["host"]["peak_bytes"] == staging
    assert report["peak_bytes"] == usual["peak_bytes"]
    assert host["budget_bytes"] == 10**9 and host["copied_by_later_runs_bytes"] == streamed
    assert (
        host["by_category"]["staging"] + host["by_category"]["outputs"] == staging
        and host["peak_bytes"] == sum(host["by_category"].values()) < 7 * 10**6
    )
    outcome = flashmem("run", bundle, "--mode", "dma", "--repeat", "2", "--host-budget", "1GB")
    assert "a later run loads 1.76MB of weights, 1.76MB of them from there" in outcome.out + outcome.err
    assert "of 1GB" in outcome.out + outcome.err


@pytest.mark.parametrize("words", [("--host-budget", "1KB"), ("--host-budget", "lots"), ("--host-budget", "0")])
def test_a_size_that_does_not_work_is_one_sentence(
    words: tuple[str, ...], flashmem: Command, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_own_memory(monkeypatch, find_device("pocl"))
    outcome = flashmem("run", bundle, "--mode", "dma", *words)
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and "host budget" in outcome.err
    if words[1] == "1KB":
        staging, _ = staging_and_streamed(bundle)
        assert f"raise the host budget to {staging} bytes" in outcome.err
        assert flashmem("run", bundle, "--mode", "dma", "--host-budget", f"{staging}B").code == 0
        assert flashmem("run", bundle, "--mode", "dma", "--host-budget", f"{staging - 1}B").code == 2


def test_plans_are_not_learned_from_runs_that_read_nothing(flashmem: Command, bundle: Path) -> None:
    outcome = flashmem("run", bundle, "--learn", "--host-budget", "auto")
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and "leave --host-budget out" in outcome.err


def test_where_memory_is_shared_a_size_is_refused_and_auto_is_ignored(flashmem: Command, bundle: Path) -> None:
    refused = flashmem("run", bundle, "--device", "pocl", "--host-budget", "1GB")
    assert refused.code == 2 and refused.err.count("\n") == 1 and "leave the host budget out" in refused.err
    assert "host" not in flashmem("run", bundle, "--device", "pocl", "--host-budget", "auto", "--json").json["memory"]


def test_simulate_predicts_later_runs_that_only_copy(flashmem: Command, bundle: Path, tmp_path: Path) -> None:
    device = tmp_path / "slow.toml"
    device.write_text(
        'name = "slow"\nkind = "gpu"\nshares_memory = false\nuses_host_memory = false\n'
        '[modes]\nbuffer = ["dma"]\n[rates]\ncached_bandwidth = 1e8\ncopy_bandwidth = 1e9\n'
        "contention = {dma = 0}\n"
    )
    staging, streamed = staging_and_streamed(bundle)
    words = ("simulate", bundle, "--device", device, "--mode", "dma", "--json")
    usual, some, every = (
        flashmem(*words, *more).json
        for more in ((), ("--host-budget", f"{staging + streamed // 2}B"), ("--host-budget", "auto"))
    )
    later = [report["latency_ms"]["warm"] for report in (usual, some, every)]
    read_ms, copy_ms = 1e3 * streamed / 1e8, 1e3 * streamed / 1e9
    assert later[0] >= read_ms and later[0] > later[1] > read_ms / 2 - 1 and copy_ms <= later[2] < read_ms / 4
    assert every["memory"]["peak_bytes"] == usual["memory"]["peak_bytes"]
    assert (usual["memory"]["host"]["budget_bytes"], usual["memory"]["host"]["peak_bytes"]) == (None, staging)
    on_host = every["memory"]["host"]["by_category"]
    assert on_host["staging"] + on_host["outputs"] == staging
    assert every["memory"]["host"]["peak_bytes"] == every["memory"]["host"]["budget_bytes"] >= staging + streamed
    small = flashmem(*words, "--host-budget", "1KB")
    assert small.code == 2 and f"raise the host budget to {staging} bytes" in small.err
    assert flashmem("simulate", bundle, "--device", "pocl", "--host-budget", "1GB").code == 2
