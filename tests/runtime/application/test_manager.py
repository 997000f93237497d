"""Switching between the designs of an application: watched quantities, the table, and the manager."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashmem.base.errors import BundleError, MissingFileError, RunError, UserError
from flashmem.runtime.application.designs import Design, Designs, DeviceState, SwitchingRule, TaskAssignment
from flashmem.runtime.application.manager import Manager
from flashmem.runtime.application.watch import (
    LOAD_HIGH,
    LOAD_LOW,
    LONGEST_REST,
    QUIET_SECONDS,
    REST_SECONDS,
    WAITED_LOW,
    Ticks,
    Watch,
    load_of_others,
    ticks,
)
from flashmem.runtime.memory.pressure import Sample
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.session import Session
from tests.support.mini_bundle import write_mini_bundle

GB = 10**9


def sampled(seconds: float, available: int = 8 * GB, waited: float = 0.0) -> Sample:
    return Sample(seconds, available, waited, GB)


def test_a_slow_processor_is_left_after_two_runs_and_tried_again_after_ever_longer_rests() -> None:
    watch = Watch(best=GB)
    watch.ran("gpu", 0.031, 0.02, 0.0)
    assert watch.state == DeviceState()
    watch.ran("gpu", 0.031, 0.02, 1.0)
    assert watch.state == DeviceState(frozenset({"gpu"}))
    rest = REST_SECONDS
    now = 1.0
    for _ in range(8):
        watch.sampled(sampled(now + rest - 0.1), None)
        assert watch.state.troubled, "not rested yet"
        now += rest
        watch.sampled(sampled(now), None)
        assert not watch.state.troubled
        watch.ran("gpu", 1.0, 0.02, now)
        watch.ran("gpu", 1.0, 0.02, now)
        assert watch.state.troubled
        rest = min(2 * rest, LONGEST_REST)
    now += rest
    watch.sampled(sampled(now), None)
    watch.ran("gpu", 0.02, 0.02, now)
    watch.ran("gpu", 1.0, 0.02, now)
    assert not watch.state.troubled, "it was quick between"


def test_the_load_of_others_makes_the_cpu_troubled_until_it_is_gone() -> None:
    watch = Watch(best=GB, cpus=frozenset({"cpu"}))
    between = (LOAD_LOW + LOAD_HIGH) / 2
    watch.sampled(sampled(0.0), between)
    assert watch.state == DeviceState()
    watch.sampled(sampled(1.0), LOAD_HIGH)
    assert watch.state == DeviceState(frozenset({"cpu"}))
    watch.sampled(sampled(1.0 + REST_SECONDS), between)
    assert watch.state.troubled, "between the two levels nothing changes"
    watch.sampled(sampled(2.0 + REST_SECONDS), LOAD_LOW / 2)
    assert watch.state == DeviceState()


def test_little_memory_is_told_by_what_is_left_or_by_waiting_and_forgotten_when_quiet() -> None:
    watch = Watch(best=4 * GB)
    watch.sampled(sampled(0.0, available=GB + 1), None)
    assert not watch.state.memory
    watch.sampled(sampled(1.0, available=GB - 1), None)
    assert watch.state.memory
    watch.sampled(sampled(2.0, available=5 * GB), None)
    watch.sampled(sampled(2.0 + QUIET_SECONDS - 0.1, available=5 * GB), None)
    assert watch.state.memory
    watch.sampled(sampled(2.0 + QUIET_SECONDS, available=5 * GB), None)
    assert not watch.state.memory
    watch.sampled(sampled(9.0, waited=6.0), None)
    assert watch.state.memory
    for waited, later in ((WAITED_LOW, 20.0), (WAITED_LOW - 0.1, 30.0)):
        for seconds in (0.0, QUIET_SECONDS):
            watch.sampled(sampled(later + seconds, available=5 * GB, waited=waited), None)
        assert watch.state.memory == (waited >= WAITED_LOW)
    watch.sampled(sampled(40.0, waited=6.0), None)
    watch.sampled(Sample(50.0, None, 0.0, 0), None)
    assert watch.state.memory, "nothing is known now"


def test_the_load_of_others_is_read_from_proc(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)

    def write(user: int, idle: int, own: int) -> Ticks:
        (tmp_path / "proc/stat").write_text(f"cpu  {user} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2\n")
        (tmp_path / "proc/self/stat").write_text(f"7 (a ) b) S {' '.join(['0'] * 10)} {own} 0 0\n")
        found = ticks(tmp_path)
        assert found is not None
        return found

    before = write(user=100, idle=300, own=40)
    assert load_of_others(before, write(user=180, idle=320, own=60)) == pytest.approx(0.6)
    assert load_of_others(before, before) is None
    assert ticks(tmp_path / "nowhere") is None


def designs_of(folder: Path, usual: float = 60.0) -> Designs:
    """Designs with the same task on each local device, as if they were two processors, and once more in little memory. `usual`:
    the seconds of each.
    """
    names = [device.descriptor_name for device in list_devices()]
    parts = [
        TaskAssignment("see", f"m{seed}.flashmem", names[seed % len(names)], f"p{seed}", 1000 - seed, usual)
        for seed in range(3)
    ]
    for seed in range(3):
        write_mini_bundle(folder / f"m{seed}.flashmem", seed=seed)
    rules = (
        SwitchingRule((False, None), False, 0),
        SwitchingRule((True, False), False, 1),
        SwitchingRule((True, True), False, 1),
        SwitchingRule((True, True), True, 1),
        SwitchingRule((None, None), True, 2),
    )
    designs = Designs((("p0",), ("p1",)), tuple(Design((part.bundle,), (part,)) for part in parts), rules)
    (folder / "design.json").write_text(json.dumps(designs.to_json()))
    return designs


def write_system(root: Path, *, available: int, busy: int, ticks: int) -> None:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(f"MemAvailable: {available // 1024} kB\n")
    (root / "proc/stat").write_text(f"cpu  {busy} 0 0 {ticks - busy} 0 0 0 0\n")
    (root / "proc/self/stat").write_text("7 (a) S " + "0 " * 20)


def test_a_manager_answers_by_the_design_in_force_and_goes_back(tmp_path: Path) -> None:
    designs = designs_of(tmp_path)
    assert Designs.read(tmp_path) == designs
    models = [write_mini_bundle(tmp_path / f"again{seed}.flashmem", seed=seed) for seed in range(3)]
    inputs = models[0].inputs()
    now, root = [0.0], tmp_path / "system"
    write_system(root, available=GB, busy=0, ticks=0)

    def answers(manager: Manager) -> int:
        now[0] += 1.0
        found = manager.run("see", inputs)[0]
        matching = [seed for seed, model in enumerate(models) if np.allclose(found, model.reference(inputs)[0], atol=2e-5)]
        assert matching == [manager.current]
        return manager.current

    with Manager(tmp_path, clock=lambda: now[0], root=root) as manager:
        assert answers(manager) == 0
        for _ in range(2):
            manager._watch.ran("p0", 120.0, 60.0, now[0])
        assert answers(manager) == 1
        write_system(root, available=100, busy=0, ticks=100)
        assert answers(manager) == 2
        write_system(root, available=GB, busy=0, ticks=200)
        assert [answers(manager) for _ in range(6)][-1] == 0, "memory is back, and the processor has rested"
        assert [switch.design for switch in manager.switches][:3] == [0, 1, 2]
        assert [opening.bundle for opening in manager.openings][:3] == ["m0.flashmem", "m1.flashmem", "m2.flashmem"]
        with pytest.raises(UserError, match="no task 'hear' in these designs; there are: see"):
            manager.run("hear", inputs)
        asked = []
        manager.run("see", lambda bundle: asked.append(bundle.path.name) or inputs)
        assert asked == ["m0.flashmem"], "who gives inputs is told which model answers"
    assert not manager._sessions
    with pytest.raises(RunError, match="the manager is closed"):
        manager.run("see", inputs)
    assert not manager._sessions


def test_the_load_of_the_cpu_switches_the_manager(tmp_path: Path) -> None:
    designs_of(tmp_path)
    now, root = [0.0], tmp_path / "system"
    write_system(root, available=GB, busy=0, ticks=0)
    model = write_mini_bundle(tmp_path / "again.flashmem", seed=0)
    with Manager(tmp_path, clock=lambda: now[0], root=root) as manager:
        manager.run("see", model.inputs())
        now[0] += 1
        write_system(root, available=GB, busy=60, ticks=100)
        manager.run("see", model.inputs())
        assert manager.state.troubled == {"p0", "p1", "p2"}, "all of them are this machine's CPU"
        assert manager.current == 1


@pytest.mark.parametrize(
    "change", [{"version": 0}, {"designs": []}, {"policy": [{"sets": [None], "memory": None, "design": 0}]}, {"sets": 5}]
)
def test_designs_that_are_damaged_are_one_sentence(tmp_path: Path, change: dict[str, Any]) -> None:
    designs = designs_of(tmp_path)
    (tmp_path / "design.json").write_text(json.dumps({**designs.to_json(), **change}))
    with pytest.raises(BundleError, match="run `flashmem design` again"):
        Designs.read(tmp_path)


def test_a_first_run_loads_and_says_nothing_of_its_processor(tmp_path: Path) -> None:
    designs_of(tmp_path, usual=1.0)
    now, root = [0.0], tmp_path / "system"
    write_system(root, available=GB, busy=0, ticks=0)
    model = write_mini_bundle(tmp_path / "again.flashmem", seed=0)

    def clock() -> float:
        now[0] += 2.0  # every run takes two seconds
        return now[0]

    with Manager(tmp_path, clock=clock, root=root) as manager:
        for number in range(4):
            assert (manager.run("see", model.inputs()), manager.current)[1] == (0 if number < 3 else 1)


def test_a_run_may_take_as_long_as_those_beside_it_on_its_processor(tmp_path: Path) -> None:
    designs_of(tmp_path)
    with Manager(tmp_path) as manager:
        here, there = TaskAssignment("a", "", "", "p0", 1, 2.0), TaskAssignment("b", "", "", "p1", 1, 4.0)
        with manager._among_others(here) as first, manager._among_others(there) as other:
            with manager._among_others(here) as second:
                pass
            with manager._among_others(here):
                pass
        with manager._among_others(here) as alone:
            pass
    assert (first.waits, second.waits, other.waits, alone.waits) == (4.0, 2.0, 0.0, 0.0)


def test_a_run_that_fails_leaves_a_manager_that_opens_the_model_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    designs_of(tmp_path)
    model = write_mini_bundle(tmp_path / "again.flashmem", seed=0)
    with Manager(tmp_path) as manager:
        with pytest.raises(ValueError):
            manager.run("see", {})
        session = manager._sessions["see"].session
        with monkeypatch.context() as patch:
            patch.setattr(Session, "run", lambda *given: (_ for _ in ()).throw(RunError("the device is gone")))
            with pytest.raises(RunError, match="the device is gone"):
                manager.run("see", model.inputs())
        assert np.isfinite(manager.run("see", model.inputs())[0]).all()
        assert manager._sessions["see"].session is not session


def test_a_switch_waits_for_the_run_that_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    designs_of(tmp_path)
    model = write_mini_bundle(tmp_path / "again.flashmem", seed=0)
    inside, go_on, order = threading.Event(), threading.Event(), []
    write_system(tmp_path / "system", available=GB, busy=0, ticks=0)
    with Manager(tmp_path, root=tmp_path / "system") as manager:
        first, run, close = manager._sessions["see"].session, Session.run, Session.close

        def slow_run(session: Session, *given: Any) -> Any:
            if session is first:
                inside.set()
                assert go_on.wait(30)
                order.append("answered")
            return run(session, *given)

        def noted_close(session: Session) -> None:
            order.append("closed")
            close(session)

        monkeypatch.setattr(Session, "run", slow_run)
        monkeypatch.setattr(Session, "close", noted_close)
        thread = threading.Thread(target=manager.run, args=("see", model.inputs()))
        thread.start()
        assert inside.wait(30)
        manager._watch._memory = True
        switching = threading.Thread(target=manager.run, args=("see", model.inputs()))
        switching.start()
        switching.join(0.2)
        assert switching.is_alive() and order == []
        go_on.set()
        thread.join()
        switching.join()
        assert order[:2] == ["answered", "closed"] and manager.current == 2


@pytest.mark.parametrize("closes", [False, True])
def test_who_gives_inputs_may_call_the_manager(tmp_path: Path, closes: bool) -> None:
    """Also if that causes a switch, which closes the session that was to run."""
    designs_of(tmp_path)
    models = [write_mini_bundle(tmp_path / f"again{seed}.flashmem", seed=seed) for seed in range(3)]
    inputs = models[0].inputs()
    write_system(tmp_path / "system", available=GB, busy=0, ticks=0)
    asked, answers, manager = list[str](), list[Any](), Manager(tmp_path, root=tmp_path / "system")

    def give(bundle: Any) -> Any:
        asked.append(bundle.path.name)
        if asked[1:]:
            return inputs
        answers.append(manager.run("see", inputs))
        if closes:
            manager.close()
            return inputs
        manager._watch._memory = True
        answers.append(manager.run("see", inputs))
        return inputs

    def ask() -> None:
        try:
            answers.append(manager.run("see", give))
        except RunError as error:
            answers.append(error)

    running = threading.Thread(target=ask, daemon=True)
    running.start()
    running.join(8)
    assert not running.is_alive(), "the manager waits for itself"
    manager.close()
    if closes:
        assert "the manager is closed" in str(answers.pop())
        assert len(answers) == 1 and asked == ["m0.flashmem"]
        return
    for answer, seed in zip(answers, (0, 2, 2), strict=True):
        np.testing.assert_allclose(answer[0], models[seed].reference(inputs)[0], atol=2e-5)
    assert asked == ["m0.flashmem", "m2.flashmem"], "it is asked again for the model that answers"


def test_a_bundle_that_is_missing_is_found_before_it_is_needed(tmp_path: Path) -> None:
    designs_of(tmp_path)
    shutil.rmtree(tmp_path / "m2.flashmem")
    with pytest.raises(MissingFileError, match=r"m2\.flashmem"):
        Manager(tmp_path)
