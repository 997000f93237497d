"""Steady kernels of a runtime's models: prepared as in sessions, and replaced when resident slices change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashmem
from flashmem import Bundle, Runtime
from flashmem.base.errors import FlashmemWarning, UserError
from flashmem.runtime.engine import cores, warm_up
from flashmem.runtime.engine.bound_program import BoundKernels
from flashmem.runtime.engine.run import Run
from flashmem.runtime.kernels import children
from flashmem.runtime.kernels import pool as kernel_pool
from flashmem.runtime.kernels.builds import build_jobs
from flashmem.runtime.kernels.cache import CachedKernels
from flashmem.runtime.kernels.required import RequiredKernel
from flashmem.target.descriptor import load_descriptor
from tests.support.compared import PLACES
from tests.support.wide_model import Wide, close_to, equal, wide_model, with_parted

DEVICE = PLACES[0][0]
BUFFERS = [device for device, path in PLACES if path == "buffer"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Wide:
    return wide_model(tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def bundles(wide: Wide, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Bundle]:
    """By device and memory path: if slices are buffers, later runs have one launch instead of two, and another kernel."""
    with pytest.MonkeyPatch.context() as patch:
        with_parted(patch)
        made = {
            place: flashmem.compile(wide[0], tmp_path_factory.mktemp("b") / "b", device=place[0], memory_path=place[1])  # type: ignore[arg-type]
            for place in PLACES
        }
    assert all(each.program.steady[-1].launch.shape.slice_k == 4 for each in made.values())
    assert all(made[device, "buffer"].program.steady[0].last == 2 for device in BUFFERS)
    return made


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("flashmem-")]


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each run, the number of its steady launches."""
    switch, seen = BoundKernels.switch, list[int]()

    def told(bound: BoundKernels, steady: Any) -> None:
        seen.append(0 if steady is None else len(steady.launches))
        switch(bound, steady)

    monkeypatch.setattr(BoundKernels, "switch", told)
    return seen


@pytest.mark.parametrize("place", PLACES, ids="-".join)
def test_later_runs_of_a_model_are_played_by_steady_kernels(
    place: tuple[str, str], bundles: dict[tuple[str, str], Bundle], wide: Wide, chosen: list[int]
) -> None:
    (device, path), bundle = place, bundles[place]
    for mode in load_descriptor(device).modes[path]:
        chosen.clear()
        with Runtime(device=device) as many:
            model, other = (many.open(bundle, mode=mode) for _ in range(2))
            first = model.run(None, wide[1])
            assert model.last_run is not None and not model.last_run.steady
            many.prepared()
            second = model.run(None, wide[1])
            assert model.last_run.steady
            assert equal(first, other.run(None, wide[1])) and other.last_run is not None and not other.last_run.steady
            assert equal(second, model.run(None, wide[1]))
        close_to(first, wide[2])
        close_to(second, wide[2])
        assert np.array_equal(first[0], second[0]) and not np.array_equal(first[1], second[1])
        most = len(bundle.program.steady)  # slices that are adjacent in the file may be apart elsewhere
        assert chosen[0] == chosen[2] == 0 and chosen[1] == chosen[3] in ((most,) if mode == "map" else (1, most))


@pytest.mark.parametrize("device", BUFFERS)
def test_launches_are_joined_while_their_slices_are_resident(
    device: str, bundles: dict[tuple[str, str], Bundle], wide: Wide, chosen: list[int]
) -> None:
    with Runtime(device=device) as many:
        model = many.open(bundles[device, "buffer"], mode="map")
        smallest, answers = model.loaded.smallest, list[Any]()

        def answer(*, prepared: bool) -> None:
            if prepared:
                many.prepared()
            answers.append(model.run(None, wide[1]))

        answer(prepared=False)
        answer(prepared=True)
        for _ in range(2):
            many.set_budget(smallest).result(30)
            answer(prepared=True)  # the change of the budget freed resident slices
            answer(prepared=True)  # the kernel that needs nothing resident
            assert many.held <= smallest
            many.set_budget(None).result(30)
            answer(prepared=True)  # everything is read, and stays
            answer(prepared=True)
    assert chosen == [0, 2, 0, 1, 1, 2, 1, 1, 1, 2]
    for found, steady in zip(answers, chosen, strict=True):
        close_to(found, wide[2])
        assert equal(found, answers[1 if steady else 0])


def test_a_run_does_not_halt_in_the_middle_of_joined_layers(
    bundles: dict[tuple[str, str], Bundle], wide: Wide, monkeypatch: pytest.MonkeyPatch
) -> None:
    play, asked = Run.execute, list[int]()
    with Runtime(device=DEVICE) as many:
        model, other = (many.open(bundles[DEVICE, "buffer"], mode=mode) for mode in ("map", "dma"))
        for each in (other, model):
            each.run(None, wide[1])
        many.prepared()

        def halting(run: Run, *ports: Any, halted: Any, **options: Any) -> Any:
            def counted() -> bool:
                asked.append(1)
                if len(asked) == 2:  # the first of the two replaced launches is complete
                    many.set_budget(model.loaded.smallest)
                return bool(halted())

            return play(run, *ports, halted=counted, **options)

        monkeypatch.setattr(Run, "execute", halting)
        twice = {name: 2 * each for name, each in wide[1].items()}  # not the old content of the arena
        close_to(model.run(None, twice), [2 * each for each in wide[2]])
        assert model.last_run is not None and not model.last_run.steady  # not to its end
        assert len(asked) >= 3 and many.held <= model.loaded.smallest


def test_kernels_outlive_the_bound_programs_of_models_that_take_turns(
    bundles: dict[tuple[str, str], Bundle], wide: Wide, chosen: list[int]
) -> None:
    with Runtime(device=DEVICE) as many:
        one, other = (many.open(bundles[DEVICE, "buffer"], mode="dma") for _ in range(2))
        many.set_budget(int(1.5 * one.loaded.smallest))
        for model in (one, other, one, other):
            close_to(model.run(None, wide[1]), wide[2])
            many.prepared()
            assert {one, other} - {each for each in (one, other) if each.loaded.bound} == {one, other} - {model}
    assert chosen == [0, 0, 1, 1]


def test_nobody_waits_for_what_is_prepared(
    bundles: dict[tuple[str, str], Bundle], wide: Wide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a run nor the release of a bound program waits, and nothing is bound to a released one."""
    made, go, begun = CachedKernels, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        begun.set()
        assert go.wait(30)
        return made(*arguments)

    monkeypatch.setattr(warm_up, "CachedKernels", slow)
    with Runtime(device=DEVICE) as many:
        model = many.open(bundles[DEVICE, "buffer"], mode="dma")
        first = model.run(None, wide[1])
        assert begun.wait(30)
        assert equal(first, model.run(None, wide[1]))
        gone = model.loaded.bound
        many.set_budget(1).result(30)
        assert model.loaded.bound is None and gone is not None
        many.set_budget(None).result(30)
        assert equal(first, model.run(None, wide[1]))
        assert model.last_run is not None and not model.last_run.steady
        go.set()
        many.prepared()
        close_to(model.run(None, wide[1]), wide[2])
        assert model.last_run.steady


def test_a_runtime_may_prepare_nothing(bundles: dict[tuple[str, str], Bundle], wide: Wide) -> None:
    with Runtime(device=DEVICE, prepare=False) as many:
        model = many.open(bundles[DEVICE, "buffer"])
        first = model.run(None, wide[1])
        many.prepared()
        assert equal(first, model.run(None, wide[1]))
        assert model.last_run is not None and not model.last_run.steady
        assert "flashmem-prepare" not in [each.name for each in threading.enumerate()]


def test_what_this_process_built_is_kept_although_more_can_be_played_later(
    wide: Wide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    with_parted(monkeypatch)
    bundle = flashmem.compile(wide[0], tmp_path / "b", device=DEVICE, memory_path="buffer", build=False)
    with Runtime(device=DEVICE, build_apart=False) as many:
        model = many.open(bundle, mode="map")
        many.set_budget(model.loaded.smallest).result(30)
        for _ in range(2):
            model.run(None, wide[1])
            many.prepared()
        kernels = model.loaded.engine.bindings.warm_up
        assert kernels is not None
        built = kernels._kernels
        assert built is not None and built.compiled
        many.set_budget(None).result(30)
        model.run(None, wide[1])
        many.prepared()
        assert kernels._kernels is not built
    assert not built.compiled, "they are in the cache"


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE") or len(os.sched_getaffinity(0)) < 2, reason="two cores, and Linux")
def test_children_that_prepare_stay_on_little_cores_while_these_are_idle(
    wide: Wide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    for core in allowed:
        folder = tmp_path / f"cpu{core}"
        folder.mkdir()
        (folder / "cpu_capacity").write_text("340\n" if core == allowed[0] else "1024\n")
    monkeypatch.setattr(cores, "_CPUS", tmp_path)
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    with_parted(monkeypatch)
    bundle = flashmem.compile(wide[0], tmp_path / "b", device=DEVICE, memory_path="buffer", build=False)
    when_idle, seen = children._only_when_idle, list[Any]()

    def looked_at(process: int) -> None:
        when_idle(process)
        seen.append((os.sched_getaffinity(process), os.sched_getscheduler(process)))

    with Runtime(device=DEVICE) as many:  # builds the first run's kernels in this process
        model = many.open(bundle)
        monkeypatch.setattr(children, "_only_when_idle", looked_at)
        model.loaded.engine.bindings.warm_up._apart = True  # type: ignore[union-attr]
        model.run(None, wide[1])
        many.prepared()
        close_to(model.run(None, wide[1]), wide[2])
        assert model.last_run is not None and model.last_run.steady
    assert seen and all(each == ({allowed[0]}, os.SCHED_IDLE) for each in seen)
    assert sorted(os.sched_getaffinity(0)) == allowed


def test_a_folder_that_cannot_be_written_is_told_once_and_runs_keep_their_kernels(
    bundles: dict[tuple[str, str], Bundle], wide: Wide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a UserError, in the thread that builds the kernels of later runs."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise UserError("no temporary folder can be written")

    monkeypatch.setattr(warm_up, "CachedKernels", refuse)
    with Runtime(device=DEVICE) as many:
        model = many.open(bundles[DEVICE, "buffer"], mode="map")
        first = model.run(None, wide[1])
        many.prepared()
        with pytest.warns(FlashmemWarning, match="later runs keep the kernels of the first one: no temporary folder"):
            second = model.run(None, wide[1])
        assert equal(first, second) and equal(first, model.run(None, wide[1]))


_CHILD = """
import json, os, sys, time
log = sys.argv[1]
for line in sys.stdin:
    job = json.loads(line)
    with open(log, "a") as file:
        file.write(json.dumps([job["build"], os.getpid()]) + "\\n")
    ends = time.monotonic() + 20
    while job["build"] == "dear" and len(open(log).readlines()) < 6 and time.monotonic() < ends:
        time.sleep(0.01)
    print(json.dumps({"file": log}), flush=True)
"""
"""Builds nothing; `dear` ends after the others have begun, which needs another child."""


def test_children_take_from_one_queue_the_dearest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    log.write_text("")

    def start(*arguments: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", _CHILD, str(log)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    monkeypatch.setattr(children, "_start", start)
    monkeypatch.setattr(kernel_pool, "processors", lambda: 2)
    wanted = {f"cheap {length}": RequiredKernel(f"cheap {length}", "x" * length, ()) for length in (10, 30, 20, 50, 40)}
    wanted["dear"] = RequiredKernel("dear", "x" * 1000, ())
    program, device = SimpleNamespace(build_options=()), SimpleNamespace(compiles_at_launch=False)
    kept: dict[str, bytes] = {}
    pool = kernel_pool.ChildPool(device)  # type: ignore[arg-type]
    try:
        pool.submit(build_jobs(wanted, program, device, kept.__setitem__))  # type: ignore[arg-type]
        while pool.step():
            pass
        pool.check("")
    finally:
        pool.close()
    assert kept.keys() == wanted.keys()
    taken = [json.loads(line) for line in log.read_text().splitlines()]
    busy = dict(taken)["dear"]
    cheap = [key for key, child in taken if child != busy]
    assert cheap == [f"cheap {length}" for length in (50, 40, 30, 20, 10)], "no child waits while there is something to do"
