"""The host tier: the same bits, no read for what it keeps, and two limits that are never passed.

A device with memory of its own is imitated: a CPU runtime that says it shares none.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import flashmem
from flashmem import Session
from flashmem.base.errors import BudgetError, RunError, UserError
from flashmem.base.types import TransferMode
from flashmem.program.program import fixed_bytes, host_bytes
from flashmem.program.tensors import Slice
from flashmem.runtime.engine.bound_program import BoundKernels
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl import context
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import find_device, list_devices
from flashmem.runtime.request import options
from flashmem.runtime.request.options import choose_host_budget
from flashmem.runtime.streaming.host_tier import HostTier
from flashmem.schedule import loads as schedule
from flashmem.schedule import residency
from flashmem.schedule.host_tier import identity, planned_there, reloaded, tier_slices
from flashmem.schedule.loads import Segment
from flashmem.schedule.plan import PoolLayout
from flashmem.schedule.residency import session_bytes, streamed_layout
from flashmem.tools.simulation.scenario import describe
from flashmem.tools.simulation.simulator import simulate
from tests.runtime.streaming.test_weight_checks import damage
from tests.support.mini_bundle import MiniModel, write_mini_bundle
from tests.support.own_memory import Reads, descriptor_with_own_memory, give_own_memory, reads_of_files, wait_for_tiers
from tests.support.refused_threads import refuse_threads
from tests.support.zoo_data import examples

PAGE = 4096
MODES: tuple[TransferMode, ...] = ("dma", "interleave")
CASES = [
    pytest.param(device, path, mode, id=f"{device.descriptor_name}-{path}-{mode}")
    for device in list_devices()
    for path in descriptor_for(device).memory_paths
    for mode in MODES
]


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions find PoCL, or the first device here, as one with memory of its own."""
    give_own_memory(monkeypatch, list_devices()[0])


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return reads_of_files(monkeypatch)


@dataclass
class Pinned:
    """Host-visible buffers, and those over pages of the process: bytes by handle, and the most at once."""

    live: dict[int, int] = field(default_factory=dict)
    most: int = 0


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> Pinned:
    """Checks that each buffer is counted before it is allocated."""
    seen, buffer, scratch = Pinned(), Context.buffer, Context.scratch
    allocate, give = Ledger._allocate, context.release
    counted: list[int] = []

    def spy_allocate(ledger: Ledger, category: Any, nbytes: int, what: str, make: Any) -> Any:
        before = ledger.total

        def made() -> Any:
            counted[:] = [ledger.total - before]
            return make()

        return allocate(ledger, category, nbytes, what, made)

    def spy_buffer(self: Context, nbytes: int, *, host_visible: bool = False, of_tensors: bool = False) -> Any:
        assert counted == [nbytes]
        made = buffer(self, nbytes, host_visible=host_visible, of_tensors=of_tensors)
        return live(made, nbytes) if host_visible else made

    def spy_scratch(self: Context, data: Any) -> Any:
        if counted != [data.nbytes]:  # the arena of a CPU, which is no host memory of its own
            return scratch(self, data)
        return live(scratch(self, data), data.nbytes)

    def live(made: Any, nbytes: int) -> Any:
        seen.live[made.int_ptr] = nbytes
        seen.most = max(seen.most, sum(seen.live.values()))
        return made

    def spy_release(*objects: Any) -> None:
        for each in objects:
            seen.live.pop(each.int_ptr, None)
        give(*objects)

    monkeypatch.setattr(Ledger, "_allocate", spy_allocate)
    monkeypatch.setattr(Context, "buffer", spy_buffer)
    monkeypatch.setattr(Context, "scratch", spy_scratch)
    monkeypatch.setattr("flashmem.runtime.memory.ledger.release", spy_release)
    return seen


def layout_of(model: MiniModel, mode: TransferMode) -> PoolLayout:
    return streamed_layout(model.open().program, model.open().plan, mode, shares_memory=False)


def on_host(model: MiniModel, mode: TransferMode) -> int:
    """Bytes of host memory without a tier: what loads pass through, and copied outputs and conversions."""
    return layout_of(model, mode).ring_bytes + host_bytes(model.open().program)


def in_use_order(model: MiniModel) -> list[Slice]:
    """The slices that each run loads, by first use."""
    bundle = model.open()
    parts, uses = {part.name: part for part in bundle.program.slices}, bundle.program.uses()
    streamed = [w.name for w in bundle.plan.weights if not w.preload and not w.keep]
    return [parts[name] for name in sorted(streamed, key=lambda name: uses[name][0])]


def pass_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices have several segments, of a page each; sessions that open wait for the memory of their tier."""
    monkeypatch.setattr(schedule, "PASSING_BYTES", PAGE)
    monkeypatch.setattr(residency, "HOST_PIECE_BYTES", PAGE)
    wait_for_tiers(monkeypatch)


def whole_pages(part: Slice) -> int:
    return -(-part.file_bytes // PAGE) * PAGE


def assert_same(got: list[NDArray[Any]], expected: list[NDArray[Any]]) -> None:
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("prepare", [False, True], ids=["alone", "prefetch"])
@pytest.mark.parametrize("part", ["all", "half", "staging"])
@pytest.mark.parametrize(("device", "path", "mode"), CASES)
def test_later_runs_read_nothing_that_the_tier_keeps_and_give_the_same_bits(
    device: Device, path: Any, mode: TransferMode, part: str, prepare: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: Reads, pinned: Pinned,
) -> None:  # fmt: skip
    model = write_mini_bundle(tmp_path / "m.flashmem", path)
    pass_pages(monkeypatch)
    give_own_memory(monkeypatch, device)
    inputs, order = model.inputs(seed=3), in_use_order(model)
    staging, sizes = on_host(model, mode), [whole_pages(each) for each in order]
    budget = staging + {"all": sum(sizes), "half": sum(sizes) // 2, "staging": 0}[part]
    assert len(set(sizes)) == 1 and staging > 0
    every_second = order[::2][: len(order) // 2]  # of equal slices
    kept = {each.name for each in {"all": order, "half": every_second, "staging": []}[part]}
    with Session(model.path, mode=mode) as session:
        expected = session.run(None, inputs)
        assert session.host_budget is None and session.last_run is not None
        use = session.last_run.memory
        assert use.host is not None and (use.host.budget_bytes, use.host.peak_bytes) == (None, staging)
        usual = use.peak_bytes
    np.testing.assert_allclose(expected[0], model.reference(inputs)[0], rtol=0, atol=2e-5)
    constants, pinned.most = model.open().program.constants_bytes, 0
    reads.watch(model.open().program.slices)
    with Session(model.path, mode=mode, budget=usual, host_budget=budget, prepare=prepare) as session:
        loaded = {each.name: each.file_bytes for each in order}
        for run in range(4):
            if run:
                session.prepared()
            assert_same(session.run(None, inputs), expected)
            report = session.last_run
            assert report is not None and report.memory.host is not None
            assert report.memory.peak_bytes == usual == session.budget
            assert report.memory.host.peak_bytes == staging + sum(sizes[: len(kept)]) <= budget == session.host_budget
            if run == 0:
                assert {load.name for load in report.loads} >= loaded.keys() and report.host_tier_bytes == 0
                if not prepare:
                    assert reads.taken() == {each.name: each.file_bytes for each in reads.slices.values()}
                continue
            unread = {load.name for load in report.loads if "read" not in dict(load.steps)}
            assert unread == kept and {load.name for load in report.loads} == loaded.keys()
            assert report.host_tier_bytes == sum(loaded[name] for name in kept)
            assert sum(load.nbytes for load in report.loads) == sum(loaded.values())
            assert Counter(load.name for load in report.loads if load.name in kept) == Counter(kept)  # one copy for each slice
            if not prepare:
                assert reads.taken() == {name: nbytes for name, nbytes in loaded.items() if name not in kept}
        if prepare:  # the next run is being read
            session.close()
            once, every = dict(reads.nbytes), loaded.keys() - kept
            assert all(once[name] == reads.slices[name].file_bytes for name in reads.slices.keys() - every)
            assert all(4 * loaded[name] <= once[name] <= 5 * loaded[name] for name in every)
    assert pinned.most <= budget + constants and not pinned.live


@pytest.mark.parametrize("mode", MODES)
def test_the_simulator_predicts_the_memory_and_the_loads_of_a_session(
    mode: TransferMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: None
) -> None:
    pass_pages(monkeypatch)
    model, layout = write_mini_bundle(tmp_path / "m.flashmem"), layout_of(write_mini_bundle(tmp_path / "n.flashmem"), mode)
    budget = on_host(model, mode) + sum(map(whole_pages, in_use_order(model))) // 2
    with Session(model.path, mode=mode, host_budget=budget) as session:
        first, later = (session.run(None, model.inputs()) and session.last_run for _ in range(2))
    assert first is not None and later is not None
    bundle = model.open()
    plan = replace(bundle.plan, layouts={mode: layout})
    predicted = simulate(describe(bundle.program, plan, descriptor_for(list_devices()[0]), mode, host_budget=budget))
    for real, report in ((first, predicted.report), (later, predicted.later_report)):
        assert report.memory.host == real.memory.host and report.memory.peak_bytes == real.memory.peak_bytes
        made, expected = (
            Counter((load.name, load.nbytes, "read" in dict(load.steps)) for load in each.loads) for each in (real, report)
        )
        assert made == expected
    assert predicted.later_report.host_tier_bytes == later.host_tier_bytes > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("apart")
def test_the_budget_of_a_device_with_memory_of_its_own_does_not_pay_for_host_memory(mode: TransferMode, tmp_path: Path) -> None:
    model = write_mini_bundle(tmp_path / "m.flashmem")
    program, layout, apart = model.open().program, layout_of(model, mode), on_host(model, mode)
    needed = fixed_bytes(program) - host_bytes(program) + layout.home_bytes + layout.all_staging_bytes
    assert needed == session_bytes(program, layout, shares_memory=False)
    for host in (None, apart):
        with pytest.raises(BudgetError) as refused:
            Session(model.path, mode=mode, budget=needed - 1, host_budget=host)
        assert refused.value.smallest_bytes == needed
        with Session(model.path, mode=mode, budget=needed, host_budget=host) as session:
            session.run(None, model.inputs())
            assert session.last_run is not None and session.last_run.memory.peak_bytes == needed
            assert session.last_run.memory.host is not None and session.last_run.memory.host.peak_bytes == apart


@pytest.mark.parametrize("mode", MODES)
def test_a_host_budget_below_staging_names_the_smallest_that_works(mode: TransferMode, tmp_path: Path, apart: None) -> None:
    model = write_mini_bundle(tmp_path / "m.flashmem")
    staging = on_host(model, mode)
    with pytest.raises(BudgetError, match=rf"^host budget .* too small: staging .* {mode}, .* need {staging} bytes") as refused:
        Session(model.path, mode=mode, host_budget=staging - 1)
    assert "\n" not in str(refused.value)
    with Session(model.path, mode=mode, host_budget=refused.value.smallest_bytes) as session:
        np.testing.assert_allclose(session.run(None, model.inputs())[0], model.reference(model.inputs())[0], atol=2e-5)
        assert session.last_run is not None and session.last_run.memory.host is not None
        use = session.last_run.memory.host
        assert sum(use.by_category.values()) == staging == use.peak_bytes and use.by_category["outputs"] > 0


def test_where_memory_is_shared_there_is_one_budget(tmp_path: Path) -> None:
    model = write_mini_bundle(tmp_path / "m.flashmem")
    for mode in ("map", "alias", "dma", "interleave"):
        with pytest.raises(UserError, match="shares its memory with the host") as refused:
            Session(model.path, device="pocl", mode=mode, host_budget="1GB")
        assert "\n" not in str(refused.value)
        with Session(model.path, device="pocl", mode=mode, host_budget="auto") as session:
            session.run(None, model.inputs())
            assert session.host_budget is None and session.last_run is not None and session.last_run.memory.host is None


def test_modes_without_copies_have_no_host_budget() -> None:
    choose = partial(choose_host_budget, staging=8, weights=100, shares_memory=False)
    assert choose("auto", mode="alias") is None and choose(None, mode="dma") is None
    with pytest.raises(UserError, match="transfer mode alias has no copies"):
        choose("1MB", mode="alias")
    with pytest.raises(UserError, match="host budget 'lots' is not a size"):
        choose("lots", mode="dma")


@pytest.mark.parametrize(
    ("left", "chosen"), [(None, 108), (10**9, 108), (100, 50), (12, 8)], ids=["not known", "much", "little", "next to nothing"]
)
def test_auto_is_half_of_what_the_system_has_left(left: int | None, chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "available", lambda: left)
    assert choose_host_budget("auto", 8, 100, mode="dma", shares_memory=False) == chosen
    assert choose_host_budget("auto", 8, 100, mode="dma", shares_memory=False, here=False) == 108


def test_slices_are_spread_over_a_run_and_smaller_ones_fill_the_rest(tmp_path: Path) -> None:
    part = write_mini_bundle(tmp_path / "m.flashmem").open().program.slices[0]
    sizes = {"a": 3 * PAGE, "b": 5 * PAGE - 1, "c": 4 * PAGE, "d": PAGE}
    slices = [replace(part, name=name, nbytes=nbytes) for name, nbytes in sizes.items()]
    chosen = {nbytes: "".join(each.name for each in tier_slices(slices, nbytes * PAGE)) for nbytes in (0, 3, 4, 8, 12, 13)}
    assert chosen == {0: "", 3: "a", 4: "c", 8: "acd", 12: "abc", 13: "abcd"}


def test_what_stays_on_the_device_is_not_kept_on_the_host(tmp_path: Path, apart: None) -> None:
    model = write_mini_bundle(tmp_path / "m.flashmem", preload=3)
    plan = model.open().plan
    weights = tuple(replace(w, keep=number == 5) for number, w in enumerate(plan.weights))
    stays = {w.name for w in weights if w.preload or w.keep}
    again = reloaded([(replace(plan, weights=weights), model.open().program.slices)])
    assert len(stays) == 4 and {part.name for part in again} == {w.name for w in weights} - stays
    with Session(model.path, strategy="preload", host_budget="auto") as session:
        assert session.host_budget == session._plans.variants[0].host_bytes > 0
        np.testing.assert_allclose(session.run(None, model.inputs())[0], model.reference(model.inputs())[0], atol=2e-5)


@pytest.mark.parametrize("mode", MODES)
def test_damage_is_found_when_a_slice_is_read_into_the_tier(
    mode: TransferMode, tmp_path: Path, apart: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_mini_bundle(tmp_path / "m.flashmem")
    part = in_use_order(model)[4]
    wait_for_tiers(monkeypatch)
    with Session(model.path, mode=mode, host_budget="auto", verify_weights=True) as session:
        expected = session.run(None, model.inputs())
        session._engine.stop_ahead()
        damage(model, part.offset + part.file_bytes - 1)
        assert_same(session.run(None, model.inputs()), expected)  # not read again
    with Session(model.path, mode=mode, host_budget="auto", verify_weights=True) as session:
        with pytest.raises(RunError, match=rf"weights\.bin is damaged: slice '{part.name}'"):
            session.run(None, model.inputs())
        assert session._engine.opened.tier is None


def test_a_session_that_cannot_be_bound_frees_its_host_memory(
    tmp_path: Path, apart: None, pinned: Pinned, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_mini_bundle(tmp_path / "m.flashmem")

    def fail(*_: Any) -> None:
        assert pinned.live
        raise RunError("the device refuses")

    monkeypatch.setattr(BoundKernels, "__init__", fail)
    with pytest.raises(RunError, match="the device refuses"):
        Session(model.path, mode="dma", host_budget="auto")
    assert not pinned.live


def test_host_memory_that_the_device_refuses_names_the_option(
    tmp_path: Path, apart: None, pinned: Pinned, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, allowed, allocate = write_mini_bundle(tmp_path / "m.flashmem"), [True, False], HostTier._allocate

    def refuse(tier: HostTier, slices: Sequence[Slice]) -> None:
        if not allowed.pop(0):
            raise RunError("out of host memory")
        allocate(tier, slices)

    monkeypatch.setattr(HostTier, "_allocate", refuse)
    monkeypatch.setattr("flashmem.runtime.streaming.host_tier._BLOCK_BYTES", 200_000)
    with Session(model.path, mode="dma", host_budget="auto") as session:
        session.run(None, model.inputs())
        with pytest.raises(RunError, match=r"pinned host memory .* refused \(out of host memory\); lower the host budget"):
            session.prepared()
        with pytest.raises(RunError, match=r"of pinned host memory .* refused \(out of host memory\); lower the host budget"):
            session.run(None, model.inputs())
    assert not pinned.live and not allowed


@pytest.mark.parametrize("mode", MODES)
def test_slices_that_are_loaded_before_they_have_a_place_get_it_in_a_later_run(
    mode: TransferMode, tmp_path: Path, apart: None, pinned: Pinned, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, go, allocate = write_mini_bundle(tmp_path / "m.flashmem"), threading.Event(), HostTier._allocate
    loaded = sum(part.file_bytes for part in in_use_order(model))

    def late(tier: HostTier, slices: Sequence[Slice]) -> None:
        assert go.wait(20)
        allocate(tier, slices)

    monkeypatch.setattr(HostTier, "_allocate", late)
    with Session(model.path, mode=mode, host_budget="auto", prepare=False) as session:
        copied, answers = [], []
        for run in range(4):
            answers.append(session.run(None, model.inputs()))
            assert session.last_run is not None
            copied.append(session.last_run.host_tier_bytes)
            if run == 1:
                go.set()
                session.prepared()
    assert copied == [0, 0, 0, loaded]
    for answer in answers:
        assert_same(answer, answers[0])
    assert not pinned.live


def test_a_session_that_closes_does_not_wait_for_all_places(
    tmp_path: Path, apart: None, pinned: Pinned, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made, allocate = write_mini_bundle(tmp_path / "m.flashmem"), list[int](), HostTier._allocate

    def slow(tier: HostTier, slices: Sequence[Slice]) -> None:
        time.sleep(0.2)
        made.append(len(slices))
        allocate(tier, slices)

    monkeypatch.setattr(HostTier, "_allocate", slow)
    monkeypatch.setattr("flashmem.runtime.streaming.host_tier._BLOCK_BYTES", PAGE)
    with Session(model.path, mode="dma", host_budget="auto") as session:
        session.run(None, model.inputs())
    assert sum(made) < len(in_use_order(model)) and not pinned.live


def test_buffers_of_the_tier_are_no_larger_than_the_device_allows(tmp_path: Path) -> None:
    device = replace(find_device(), max_alloc_bytes=3 * PAGE)
    part = write_mini_bundle(tmp_path / "m.flashmem").open().program.slices[0]
    slices = [replace(part, offset=10**6 * n, nbytes=PAGE) for n in range(8)]
    tier = HostTier(Context(device), 8 * PAGE, slices)
    assert tier.ledger.total == 0
    tier.begin()
    tier.wait()
    assert [nbytes for _, _, nbytes in tier.ledger._objects] == [3 * PAGE, 3 * PAGE, 2 * PAGE]
    assert tier.ledger.total == 8 * PAGE
    whole = Segment(0, PAGE)
    places = [place for each in slices if (place := tier.place(each, whole)) is not None]
    for number, place in enumerate(places):
        place[:] = number
    assert [(int(place.max()), place.nbytes) for place in places] == [(number, PAGE) for number in range(8)]
    with pytest.raises(RunError, match="of the host budget of"):
        tier.ledger.buffer("staging", 1, "one byte more", host_visible=True)
    halves = Segment(0, PAGE // 2), Segment(PAGE // 2, PAGE // 2)
    tier.keep(slices[0], halves[1])
    assert tier.holds(slices[0], halves[1]) and not tier.holds(slices[0], halves[0]) and not tier.complete
    tier.keep(slices[0], halves[0])
    assert tier.holds(slices[0], whole) and len(tier.complete) == 1 and not tier.holds(slices[1], whole)
    tier.close()
    tier.close()
    assert tier.ledger.total == 0 and tier.place(slices[0], whole) is None


def test_the_tier_keeps_what_its_plan_says_and_then_others(tmp_path: Path, apart: None) -> None:
    model = write_mini_bundle(tmp_path / "m.flashmem")
    bundle, order = model.open(), in_use_order(model)
    names = {order[0].name, order[1].name, order[2].name}  # spread over the run, other slices would be kept
    weights = tuple(replace(w, pinned=w.name in names) for w in bundle.plan.weights)
    planned = planned_there([(replace(bundle.plan, weights=weights), bundle.program.slices)])
    assert planned == {identity(part) for part in order[:3]}
    size = whole_pages(order[0])
    assert {part.name for part in tier_slices(order, 3 * size, planned)} == names
    assert {part.name for part in tier_slices(order, 2 * size, planned)} < names
    more = {part.name for part in tier_slices(order, 5 * size, planned)}
    assert names < more and len(more) == 5
    assert {part.name for part in tier_slices(order, 3 * size)} != names


@pytest.mark.parametrize("mode", MODES)
def test_a_bundle_compiled_for_a_host_budget_has_its_slices_there(
    mode: TransferMode, tmp_path: Path, apart: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of what later runs load fits the host: all of it is what the plan chose, and bits are those of a resident run."""
    wait_for_tiers(monkeypatch)
    model = Path(__file__).parents[2] / "data" / "gptneo-tiny.onnx"
    options: dict[str, Any] = {
        "device": descriptor_with_own_memory(tmp_path), "memory_path": "buffer", "mode": mode, "build": False,
    }  # fmt: skip
    with pytest.raises(BudgetError) as refused:
        flashmem.compile(model, tmp_path / "none.flashmem", budget=1, **options)
    budget = int(1.2 * refused.value.smallest_bytes)
    plain = flashmem.compile(model, tmp_path / "plain.flashmem", budget=budget, **options)
    assert not any(w.pinned for w in plain.plan.weights)
    with pytest.raises(BudgetError, match="host budget of 5000 bytes is too small: staging and outputs need") as small:
        flashmem.compile(model, tmp_path / "none.flashmem", budget=budget, host_budget=5000, **options)
    streamed = sum(w.nbytes for w in plain.plan.weights if not (w.preload or w.keep))
    host = small.value.smallest_bytes + PAGE * len(plain.plan.weights) + streamed // 2
    bundle = flashmem.compile(model, tmp_path / "m.flashmem", budget=budget, host_budget=host, **options)
    pinned = {w.name for w in bundle.plan.weights if w.pinned}
    assert pinned and not any(w.keep or w.preload for w in bundle.plan.weights if w.pinned)
    inputs = examples("gptneo-tiny")
    with Session(bundle, mode=mode, strategy="preload") as session:
        expected = session.run(None, inputs)
    with Session(bundle, mode=mode, budget=budget, host_budget=host) as session:
        for run in range(3):
            assert_same(session.run(None, inputs), expected)
            report = session.last_run
            assert report is not None and report.memory.host is not None and report.memory.host.peak_bytes <= host
            if run:
                assert {load.name for load in report.loads if "read" not in dict(load.steps)} >= pinned
    monkeypatch.undo()
    with pytest.raises(UserError, match="shares its memory with the host"):
        flashmem.compile(model, tmp_path / "none.flashmem", device="pocl", budget="1MB", host_budget="1MB", build=False)


@pytest.mark.parametrize("device", list_devices()[:1], ids=lambda device: device.descriptor_name)
def test_the_loads_of_a_report_can_be_asked_for_when_the_session_is_closed(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_mini_bundle(tmp_path / "m.flashmem")
    give_own_memory(monkeypatch, device)
    with Session(model.path, mode="dma") as session:
        session.run(None, model.inputs())
        session.run(None, model.inputs())
        report = session.last_run
    assert report is not None and len(report.loads) > 0
    begun = report.ended - report.latency.exec
    for load in report.loads:
        assert [step for step, _ in load.steps] == ["read", "copy"]
        times = [load.start, *(end for _, end in load.steps)]
        assert times == sorted(times) and begun - 1 < times[0] and times[-1] < report.ended + 0.01
    assert report.loads[0] is report.loads[:1][0]


def test_a_tier_whose_thread_cannot_start_begins_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Slice("w", "w", 0, PAGE)
    tier = HostTier(Context(find_device("pocl")), None, [part])
    refuse_threads(monkeypatch, "flashmem-host-tier")
    with pytest.raises(RunError, match="the thread flashmem-host-tier could not be started"):
        tier.begin()
    tier.begin()
    tier.wait()
    assert tier.keeps(part)
    tier.close()
