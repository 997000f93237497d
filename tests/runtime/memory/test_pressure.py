"""`budget="auto"`: memory pressure, read from generated system files, and the budgets that follow."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from flashmem.runtime.memory.pressure import QUIET_SECONDS, STEP, Follower, PressureState, Sample, next_budget, sample

GB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


MEMINFO = "MemTotal:        8000000 kB\nMemFree:          100000 kB\nMemAvailable:    2097152 kB\n"
PSI = "some avg10=3.50 avg60=1.00 avg300=0.10 total=123\nfull avg10=1.00 avg60=0.00 avg300=0.00 total=1\n"


def test_what_is_available_is_the_least_of_system_and_cgroups(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/apps/one\n",
            "sys/fs/cgroup/apps/memory.max": f"{GB}\n",
            "sys/fs/cgroup/apps/memory.current": f"{GB // 2 + 1000}\n",
            "sys/fs/cgroup/apps/memory.stat": "anon 5\ninactive_file 600\nactive_file 400\n",
            "sys/fs/cgroup/apps/one/memory.max": "max\n",
            "sys/fs/cgroup/apps/one/memory.pressure": PSI,
        },
    )
    assert sample(1.0, 7, root) == Sample(1.0, GB // 2, 3.5, 7)


def test_cgroups_of_version_1_and_systems_without_any(tmp_path: Path) -> None:
    root = tree(
        tmp_path / "v1",
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "11:cpu:/\n5:memory:/box\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{GB}\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{GB // 4}\n",
        },
    )
    assert sample(0.0, 0, root) == Sample(0.0, 3 * GB // 4, 0.0, 0)
    assert sample(0.0, 0, tree(tmp_path / "plain", {"proc/meminfo": MEMINFO})) == Sample(0.0, 2 * GB, 0.0, 0)
    assert sample(0.0, 0, tmp_path / "nothing") == Sample(0.0, None, 0.0, 0)


def test_the_budget_falls_at_once_and_rises_late() -> None:
    state = next_budget(PressureState(None, 0.0), Sample(0.0, GB, 0.0, 0))
    assert state.budget is not None and abs(state.budget - 0.9 * GB) <= STEP
    fallen = next_budget(state, Sample(1.0, GB // 2, 0.0, 0))
    assert fallen.budget is not None and abs(fallen.budget - 0.45 * GB) <= STEP
    pressed = next_budget(fallen, Sample(2.0, GB // 2, 25.0, GB // 4))
    assert pressed.budget is not None and abs(pressed.budget - 0.75 * GB / 4) <= STEP
    again = next_budget(pressed, Sample(3.0, GB, 0.0, 0))
    assert again.budget == pressed.budget, "it was just under pressure"
    risen = next_budget(again, Sample(2.0 + QUIET_SECONDS, GB, 0.0, 0))
    assert risen.budget == state.budget
    assert next_budget(risen, Sample(60.0, int(1.1 * GB), 0.0, 0)).budget == risen.budget, "an eighth more, or nothing"
    assert next_budget(risen, Sample(60.0, None, 0.0, 0)).budget == risen.budget


def test_what_it_holds_itself_does_not_move_it() -> None:
    state = next_budget(PressureState(None, 0.0), Sample(0.0, GB, 0.0, 0))
    for second in range(1, 60):
        held = GB // 2 if second % 2 else 0
        state = next_budget(state, Sample(float(second), GB - held, 0.0, held))
        assert state.budget is not None and 0.89 * GB <= state.budget <= 0.96 * GB


def test_a_follower_hands_budgets_on_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashmem.runtime.memory.pressure.SAMPLE_SECONDS", 0.01)
    root, told = tree(tmp_path, {"proc/meminfo": MEMINFO}), list[int]()
    follower = Follower(lambda: 0, told.append, time.perf_counter, root)
    follower.start()
    tree(tmp_path, {"proc/meminfo": MEMINFO.replace("2097152", "1048576")})
    begun = time.monotonic()
    while not told and time.monotonic() - begun < 10:
        time.sleep(0.01)
    follower.stop()
    assert told and abs(told[0] - 0.9 * GB) <= STEP
