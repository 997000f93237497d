"""Atomic replacement of a bundle: after a kill at any step, the old or the new one exists, without leftovers."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashmem.bundle import version_directories
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.writer import BundleWriter
from tests.support.mini_bundle import write_mini_bundle
from tests.support.paths import ROOT

KILLED = '''
import os, signal, sys
from dataclasses import replace
from pathlib import Path

from flashmem.bundle import version_directories
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.replacing import replace_plan
from flashmem.base.errors import BundleError, MissingFileError
from tests.support.mini_bundle import write_mini_bundle

EVENTS = {"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.link", "shutil.rmtree"}


def killed(path, step, action):
    """Whether `action` was killed before it did the `step`th thing to the disk."""
    child = os.fork()
    if child == 0:
        left = step

        def die_in_time(event, arguments):
            nonlocal left
            if event in EVENTS and str(path.parent) in str(arguments):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(die_in_time)
        action()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, status
    return status != 0


def plan_again(path):
    bundle = Bundle.open(path)
    replace_plan(bundle, bundle.plan, {**bundle.meta, "budget_bytes": 2})


path, how = Path(sys.argv[1]), sys.argv[2]
if how != "first":
    write_mini_bundle(path, budget=1)
actions = {"plan": plan_again}
step, seen = 1, []
while killed(path, step, lambda: actions.get(how, lambda path: write_mini_bundle(path, budget=2))(path)):
    try:
        seen.append(Bundle.open(path).budget_bytes)
    except MissingFileError:
        seen.append(None)
    if seen[-1] == 2:  # back to the old one
        if how == "first":
            __import__("shutil").rmtree(path)
        else:
            write_mini_bundle(path, budget=1)
    step += 1
print(step, sorted(set(seen), key=str))
'''


@pytest.mark.parametrize(("how", "found"), [("first", [2, None]), ("again", [1, 2]), ("plan", [1, 2])])
def test_killed_at_any_step_there_is_the_old_or_the_new_one(how: str, found: list[int | None], tmp_path: Path) -> None:
    path = tmp_path / "bundles" / "m.flashmem"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(path), how], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    steps, seen = done.stdout.split(maxsplit=1)
    assert int(steps) > 15 and seen.strip() == str(found)
    assert Bundle.open(path).budget_bytes == 2
    assert [entry.name for entry in path.parent.iterdir()] == ["m.flashmem"]
    assert sorted(entry.name for entry in path.iterdir()) == sorted(["manifest.json", Bundle.open(path).files.name])


def test_what_somebody_is_writing_is_not_left_over(tmp_path: Path) -> None:
    path = tmp_path / "m.flashmem"
    write_mini_bundle(path, budget=1)
    with BundleWriter(path) as slow:
        slow.append(b"abc")
        write_mini_bundle(path, budget=2)
        assert slow.append(b"def") == 3
        assert len(list(tmp_path.glob(".m.flashmem-*/*/weights.bin"))) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_of_other_names_are_left_alone(tmp_path: Path) -> None:
    strangers = [
        tmp_path / ".other.flashmem-0123456789abcdef",
        tmp_path / ".m.flashmem-notes",
        tmp_path / "m.flashmem-0123456789abcdef",
    ]
    mine = tmp_path / ".m.flashmem-0123456789abcdef"
    for folder in (*strangers, mine):
        folder.mkdir()
    write_mini_bundle(tmp_path / "m.flashmem")
    assert sorted(tmp_path.iterdir()) == sorted([*strangers, tmp_path / "m.flashmem"])


def test_two_writers_of_a_new_bundle_both_succeed(tmp_path: Path) -> None:
    path = tmp_path / "m.flashmem"
    with BundleWriter(path):
        write_mini_bundle(path, budget=1)
    assert Bundle.open(path).budget_bytes == 1


def test_where_there_are_no_locks_bundles_are_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(descriptor: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    (tmp_path / ".m.flashmem-0123456789abcdef").mkdir()
    monkeypatch.setattr(fcntl, "flock", refused)
    for budget in (1, 2):
        write_mini_bundle(tmp_path / "m.flashmem", budget=budget)
        assert Bundle.open(tmp_path / "m.flashmem").budget_bytes == budget
    assert (tmp_path / ".m.flashmem-0123456789abcdef").exists()  # its owner cannot be known


def test_a_file_in_use_is_marked_although_another_process_just_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    asking, mine = (os.open(tmp_path / "weights.bin", os.O_RDONLY) for _ in range(2))
    fcntl.flock(asking, fcntl.LOCK_EX)
    monkeypatch.setattr(version_directories.time, "sleep", lambda seconds: fcntl.flock(asking, fcntl.LOCK_UN))
    version_directories.hold_shared(mine)
    with version_directories.held(tmp_path / "weights.bin") as unused:
        assert not unused
    os.close(mine)
    with version_directories.held(tmp_path / "weights.bin") as unused:
        assert unused
    os.close(asking)
