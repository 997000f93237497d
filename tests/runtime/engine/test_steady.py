"""Cold and warm: later runs switch to steady kernels prepared between two runs, with correct answers, inside the budget."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashmem
from flashmem import Bundle, Session
from flashmem.base.errors import BundleError, FlashmemWarning, RunError
from flashmem.bundle.kernel_bounds import check_bounds
from flashmem.bundle.validation import check_bundle
from flashmem.program.launches import SteadyLaunch
from flashmem.program.program import fixed_bytes
from flashmem.runtime.engine import warm_up
from flashmem.runtime.engine.cores import little_cores
from flashmem.target.descriptor import load_descriptor
from tests.support.command_line import command_line
from tests.support.compared import PLACES
from tests.support.mini_bundle import MiniModel, write_mini_bundle
from tests.support.wide_model import Wide, close_to, equal, wide_model, with_parted


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Wide:
    return wide_model(tmp_path_factory.mktemp("wide"))


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    ends = time.monotonic() + 5
    while any(thread.name.startswith("flashmem-") for thread in threading.enumerate()) and time.monotonic() < ends:
        time.sleep(0.01)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("flashmem-")]


@pytest.mark.parametrize("place", PLACES, ids="-".join)
def test_later_runs_have_other_kernels_and_fewer_launches(
    place: tuple[str, str], wide: Wide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (device, path), (model, feeds, expected) = place, wide
    with_parted(monkeypatch)
    bundle = flashmem.compile(model, tmp_path / "b", device=device, memory_path=path)  # type: ignore[arg-type]
    program = bundle.program
    joins = not any(part.is_image for part in program.slices) and len(program.launches) == 3
    assert [(each.first, each.last) for each in program.steady] == (
        [(1, 2), (3, 3)] if joins else [(len(program.launches),) * 2]
    )
    assert program.steady[-1].launch.shape.slice_k == 4
    for mode in load_descriptor(device).modes[path]:  # type: ignore[index]
        with Session(bundle, device=device, mode=mode) as session:
            first = session.run(None, feeds)
            assert session.last_run is not None and not session.last_run.steady
            session.prepared()
            second = session.run(None, feeds)
            assert session.last_run.steady
            assert equal(second, session.run(None, feeds))
        close_to(first, expected)
        close_to(second, expected)
        assert np.array_equal(first[0], second[0]), "the same kernel gives the same bits, in one launch too"
        assert not np.array_equal(first[1], second[1]), "a kernel that sums in another order was played"


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MiniModel]:
    """By memory path, a model without resident slices."""
    folder = tmp_path_factory.mktemp("mini")
    return {path: write_mini_bundle(folder / f"{path}.flashmem", path) for path in ("buffer", "texture")}  # type: ignore[arg-type]


@pytest.mark.parametrize("place", PLACES, ids="-".join)
def test_the_next_run_has_begun_to_load(place: tuple[str, str], streamed: dict[str, MiniModel]) -> None:
    device, path = place
    model = streamed[path]
    inputs = model.inputs(seed=1)
    for mode in load_descriptor(device).modes[path]:  # type: ignore[index]
        layout = Bundle.open(model.path).plan.layouts[mode]
        budget = fixed_bytes(Bundle.open(model.path).program) + layout.total_bytes
        with Session(model.path, device=device, mode=mode, budget=budget) as session:
            first = session.run(None, inputs)
            for _ in range(2):
                early = False
                for pause in (0.02, 0.2, 2.0):  # a busy machine starts threads late
                    time.sleep(pause)
                    begun = time.perf_counter()
                    assert equal(first, session.run(None, inputs))
                    assert session.last_run is not None
                    assert session.last_run.memory.peak_bytes <= budget
                    early = any(span.start < begun for span in session.last_run.loads)
                    if early:
                        break
                assert early
        with Session(model.path, device=device, mode=mode, prepare=False) as session:
            assert equal(first, session.run(None, inputs))
            begun = time.perf_counter()
            assert equal(first, session.run(None, inputs))
            assert session.last_run is not None and not any(span.start < begun for span in session.last_run.loads)


DEVICE, PATH = PLACES[0] if PLACES else ("", "")


@pytest.fixture(scope="module")
def joined(wide: Wide, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Later runs have one launch in place of two of the first run."""
    return flashmem.compile(wide[0], tmp_path_factory.mktemp("joined") / "b", device=DEVICE, memory_path="buffer")


def test_launches_are_joined_where_their_slices_stay(joined: Bundle, wide: Wide) -> None:
    [each] = joined.program.steady
    assert (each.first, each.last) == (1, 2)
    assert each.launch.kernel == joined.program.launches[0].kernel
    weights = tuple(replace(w, keep=w.keep and w.name != "c0[1]") for w in joined.plan.weights)
    without = joined.with_plan(replace(joined.plan, weights=weights), joined.meta)
    for bundle in (joined, without):
        with Session(bundle, device=DEVICE, mode="map") as session:
            first = session.run(None, wide[1])
            session.prepared()
            assert equal(first, session.run(None, wide[1]))
            assert session.last_run is not None and session.last_run.steady == (bundle is joined)


def test_a_session_may_prepare_nothing(joined: Bundle, wide: Wide) -> None:
    for options in ({"prepare": False}, {"trace": True}):
        with Session(joined, device=DEVICE, **options) as session:  # type: ignore[arg-type]
            for _ in range(2):
                session.run(None, wide[1])
                session.prepared()
                assert session.last_run is not None and not session.last_run.steady
                assert not [each for each in threading.enumerate() if each.name.startswith("flashmem-")]


def test_what_cannot_be_prepared_is_said_once(joined: Bundle, wide: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise RunError("no more")

    monkeypatch.setattr(warm_up, "CachedKernels", refuse)
    with Session(joined, device=DEVICE) as session:
        first = session.run(None, wide[1])
        session.prepared()
        with pytest.warns(FlashmemWarning, match="later runs keep the kernels of the first one: no more"):
            assert equal(first, session.run(None, wide[1]))
        assert equal(first, session.run(None, wide[1]))


def test_closing_ends_what_is_prepared(wide: Wide, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_parted(monkeypatch)
    bundle = flashmem.compile(wide[0], tmp_path / "b", device=DEVICE, memory_path="buffer", build=False)
    if not any(each.launch.shape.slice_k > 1 for each in bundle.program.steady):
        pytest.skip("panels of another width")
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    with Session(bundle, device=DEVICE, build_apart=True) as session:
        session.run(None, wide[1])
        begun = time.perf_counter()
    assert time.perf_counter() - begun < 5  # building children have ended
    with Session(bundle, device=DEVICE, build_apart=True) as session:
        session.run(None, wide[1])
        session.prepared()
        session.run(None, wide[1])
        assert session.last_run is not None and session.last_run.steady


def test_a_forgotten_session_leaves_no_thread(streamed: dict[str, MiniModel]) -> None:
    session = Session(streamed[PATH].path, device=DEVICE)
    session.run(None, streamed[PATH].inputs(seed=1))
    assert [each for each in threading.enumerate() if each.name.startswith("flashmem-loader")]
    del session
    gc.collect()  # the fixture waits for the threads


def test_damaged_steady_launches_are_refused(joined: Bundle) -> None:
    program, plan = joined.program, joined.plan
    [each], [whole] = program.steady, program.joined
    launch = program.launches[0]
    assert Bundle.open(joined.path).program == program
    shorter = replace(each, launch=replace(each.launch, args=tuple(a for a in each.launch.args if a.kind != "tensor")))
    for wrong in (
        replace(program, steady=(each, each)),
        replace(program, steady=(replace(each, last=9),)),
        replace(program, steady=(replace(each, first=2),)),
        replace(program, steady=(SteadyLaunch(3, 3, launch),)),
        replace(program, steady=(shorter,)),
        replace(program, joined=(replace(whole, parts=whole.parts[::-1]),)),
        replace(program, joined=(replace(whole, parts=whole.parts[:1]),)),
        replace(program, joined=(replace(whole, parts=("unknown", *whole.parts)),)),
        replace(program, joined=(replace(whole, name=whole.parts[0]),)),
        replace(program, joined=()),
        replace(program, launches=(replace(launch, args=each.launch.args), *program.launches[1:])),
    ):
        with pytest.raises(BundleError):
            check_bundle(wrong, plan)
    beyond = [replace(arg, value=int(arg.value) + 1) if arg.kind == "int" else arg for arg in each.launch.args]
    for number, arg in enumerate(each.launch.args):
        if arg.kind == "int":
            args = (*each.launch.args[:number], beyond[number], *each.launch.args[number + 1 :])
            with pytest.raises(BundleError):
                check_bounds(
                    replace(program, steady=(replace(each, launch=replace(each.launch, args=args)),)), joined.source.plain
                )


def test_the_plan_says_what_later_runs_play(
    joined: Bundle, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = command_line(monkeypatch, capfd)
    done = command("plan", joined.path)
    assert done.code == 0 and "later runs have 0 other kernels, and 1 launches instead of 2" in done.out
    assert "one launch instead of 2, of contiguous slices" in done.out
    [row] = command("plan", joined.path, "--json").json["steady"]
    assert (row["first"], row["last"], row["resident"]) == (1, 2, True)


def test_little_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rate(name: str, *values: int) -> None:
        for core, value in enumerate(values):
            file = tmp_path / f"cpu{core}" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{value}\n")

    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    assert little_cores(tmp_path) == set()  # no ratings
    rate("cpufreq/cpuinfo_max_freq", 1800000, 1800000, 3000000, 2900000)
    assert little_cores(tmp_path) == {0, 1}
    rate("cpu_capacity", 1024, 1024, 1024)  # only some cores have this rating
    assert little_cores(tmp_path) == {0, 1}
    rate("cpu_capacity", 1024, 340, 1024, 870)
    assert little_cores(tmp_path) == {1}
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {1}, raising=False)
    assert little_cores(tmp_path) == set()  # all of its cores are alike
