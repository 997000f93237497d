"""Weights that several bundles share: loaded once, held once, and never released while another model uses them."""

from __future__ import annotations

import gc
import hashlib
import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from flashmem import Bundle, Runtime
from flashmem.base.errors import RunError
from flashmem.base.pages import whole_pages
from flashmem.program.program import fixed_bytes
from flashmem.program.tensors import Slice
from flashmem.runtime.kernels.cache import kernel_key
from flashmem.runtime.kernels.cache_files import packed_entries
from flashmem.runtime.kernels.required import required_kernels
from flashmem.runtime.memory.accounts import Account, Budget
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.streaming.shared_pages import SharedSlice, SharedSlices
from flashmem.runtime.streaming.weight_file import WeightFile
from flashmem.schedule.loads import pages, whole
from flashmem.target.descriptor import MemoryPath
from tests.support.bundle_changes import files_of, fit
from tests.support.mini_bundle import MiniModel, write_mini_bundle

CASES = [
    pytest.param(device, path, id=f"{device.descriptor_name}-{path}")
    for device in list_devices()
    for path in descriptor_for(device).memory_paths
    if "map" in descriptor_for(device).modes[path]
]
PART = Slice("w", "w", 4096, 8192)
BYTES = whole_pages(8192)


class Disk:
    """Replaces a weight file: records which pages are read in and dropped."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.kept = 0
        self.failing = False

    def populate(self, offset: int, nbytes: int) -> None:
        self.notes.append("populate")
        if self.failing:
            raise RunError("the disk fails")

    def drop(self, offset: int, nbytes: int) -> None:
        self.notes.append("drop")

    def has_same(self, offset: int, other: Disk, there: int, nbytes: int) -> bool:
        return True

    def keep(self) -> None:
        self.kept += 1

    def close(self) -> None:
        self.kept -= 1


def place_on(disk: Disk) -> SharedSlice:
    return SharedSlice(disk, PART)  # type: ignore[arg-type]


def test_the_second_who_loads_borrows_and_holds_when_the_first_lets_go() -> None:
    budget, disk = Budget(2 * BYTES), Disk()
    first, second = Account(budget), Account(budget)
    place = place_on(disk)
    place.load(whole(PART), "a", first, "w")
    place.load(whole(PART), "b", second, "w")
    assert disk.notes == ["populate"] and (first.total, second.total, budget.total) == (BYTES, 0, BYTES)
    assert budget.room == 0  # each may continue with them, whatever the other does
    place.free("a")
    assert disk.notes == ["populate"] and (first.total, second.total, budget.room) == (0, BYTES, BYTES)
    place.free("b")
    assert disk.notes == ["populate", "drop"] and budget.total == 0 and budget.room == 2 * BYTES
    assert budget.peak == BYTES


def test_a_borrower_who_lets_go_first_changes_nothing_for_the_holder() -> None:
    budget, disk = Budget(None), Disk()
    first, second = Account(budget), Account(budget)
    place = place_on(disk)
    place.load(whole(PART), "a", first, "w")
    place.load(whole(PART), "b", second, "w")
    place.free("b")
    assert disk.notes == ["populate"] and first.total == BYTES and budget.committed == BYTES
    place.free("a")
    assert disk.notes == ["populate", "drop"] and budget.committed == 0


def test_what_is_borrowed_is_refused_beyond_the_budget_and_covered_by_a_promise() -> None:
    budget, disk = Budget(2 * BYTES - 1), Disk()
    first, second = Account(budget), Account(budget)
    place = place_on(disk)
    place.load(whole(PART), "a", first, "w")
    with pytest.raises(RunError, match="raise the budget"):
        place.load(whole(PART), "b", second, "w")
    budget.limit = 2 * BYTES
    assert second.promise(BYTES) and not second.promise(BYTES + 1)
    place.load(whole(PART), "b", second, "w")
    assert budget.room == 0
    second.clear()
    assert budget.room == BYTES


def test_a_load_that_fails_leaves_nothing_and_the_next_one_tries_again() -> None:
    budget, disk = Budget(None), Disk()
    account, place = Account(budget), place_on(disk)
    disk.failing = True
    with pytest.raises(RunError, match="the disk fails"):
        place.load(whole(PART), "a", account, "w")
    assert budget.total == 0 and not place.holds(whole(PART))
    disk.failing = False
    place.load(whole(PART), "b", account, "w")
    assert budget.total == BYTES and place.holds(whole(PART))


def test_who_comes_while_pages_are_brought_in_waits_for_them() -> None:
    disk, budget = Disk(), Budget(None)
    begun, go = threading.Event(), threading.Event()
    note = disk.populate

    def slow(offset: int, nbytes: int) -> None:
        note(offset, nbytes)
        begun.set()
        assert go.wait(30)

    disk.populate = slow  # type: ignore[method-assign]
    place, accounts = place_on(disk), [Account(budget), Account(budget)]
    threads = [
        threading.Thread(target=place.load, args=(whole(PART), user, account, "w"))
        for user, account in zip("ab", accounts, strict=True)
    ]
    threads[0].start()
    assert begun.wait(30)
    threads[1].start()
    threads[1].join(0.05)
    assert threads[1].is_alive()
    go.set()
    for thread in threads:
        thread.join(30)
    assert disk.notes == ["populate"] and sorted(account.total for account in accounts) == [0, BYTES]


def test_a_place_lasts_and_keeps_its_file_while_somebody_has_it() -> None:
    disk, other, places = Disk(), Disk(), SharedSlices()
    first = places.take(disk, PART, b"same")  # type: ignore[arg-type]
    assert places.take(other, PART, b"same") is first  # type: ignore[arg-type]
    assert places.take(other, PART, b"another") is not first  # type: ignore[arg-type]
    assert (disk.kept, other.kept) == (1, 1)
    places.give_up(first, b"same")
    assert disk.kept == 1
    places.give_up(first, b"same")
    assert disk.kept == 0
    assert places.take(other, PART, b"same") is not first  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[MiniModel]]:
    folder = tmp_path_factory.mktemp("twins")
    paths: tuple[MemoryPath, ...] = ("buffer", "texture")
    return {path: [write_mini_bundle(folder / f"{path}{n}.flashmem", path, seed=3) for n in (0, 1)] for path in paths}


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each part of a weight file that is read in."""
    seen: list[int] = []
    populate = WeightFile.populate

    def counted(file: WeightFile, offset: int, nbytes: int) -> None:
        seen.append(nbytes)
        populate(file, offset, nbytes)

    monkeypatch.setattr(WeightFile, "populate", counted)
    return seen


def slices_bytes(bundle: Bundle) -> int:
    return sum(pages(part) for part in bundle.program.slices)


@pytest.mark.parametrize(("device", "path"), CASES)
def test_two_bundles_of_the_same_weights_load_and_hold_them_once(
    device: Device, path: MemoryPath, twins: dict[str, list[MiniModel]], brought: list[int]
) -> None:
    (a, b), inputs = twins[path], twins[path][0].inputs()
    whole_weights, fixed = slices_bytes(a.open()), fixed_bytes(a.open().program)
    with Runtime(device=str(list_devices().index(device))) as runtime:
        first, second = runtime.open(a.path, mode="map"), runtime.open(b.path, mode="map")
        answers = [model.run(None, inputs) for model in (first, second, first, second)]
        np.testing.assert_allclose(answers[0][0], a.reference(inputs)[0], rtol=0, atol=2e-5)
        for answer in answers:
            for got, expected in zip(answer, answers[0], strict=True):
                np.testing.assert_array_equal(got, expected)
        assert sum(brought) == sum(part.file_bytes for part in a.open().program.slices)
        assert runtime.held <= whole_weights + 2 * fixed < 2 * whole_weights
        first.close()  # the owner of their file
        held = runtime.held
        assert whole_weights < held <= whole_weights + fixed
        count = len(brought)
        again = second.run(None, inputs)
        assert len(brought) == count and all(np.array_equal(x, y) for x, y in zip(again, answers[0], strict=True))
        second.close()
        assert runtime.held == 0
        third = runtime.open(b.path, mode="map")
        assert all(np.array_equal(x, y) for x, y in zip(third.run(None, inputs), answers[0], strict=True))
        assert len(brought) == 2 * count


def test_one_that_has_to_give_memory_up_takes_none_from_the_other(
    twins: dict[str, list[MiniModel]], brought: list[int]
) -> None:
    a, b = twins["buffer"]
    inputs = a.inputs()
    with Runtime() as runtime:
        first, second = runtime.open(a.path, mode="map"), runtime.open(b.path, mode="map")
        wanted = first.run(None, inputs)
        second.run(None, inputs)
        before = runtime.held
        first.loaded.drop_residents()
        assert runtime.held == before and first.loaded.resident_bytes == 0
        count = len(brought)
        for model in (second, first):
            assert all(np.array_equal(x, y) for x, y in zip(model.run(None, inputs), wanted, strict=True))
        assert len(brought) == count
        small = fixed_bytes(a.open().program) + a.open().plan.layouts["map"].total_bytes
        runtime.set_budget(small).result(30)
        for model in (first, second, first):
            assert all(np.array_equal(x, y) for x, y in zip(model.run(None, inputs), wanted, strict=True))
        assert runtime.held <= small


def test_slices_of_the_same_bytes_are_told_from_others(twins: dict[str, list[MiniModel]], tmp_path: Path) -> None:
    other = write_mini_bundle(tmp_path / "other.flashmem", seed=4).open()
    first, second = (model.open().checksums.content_hashes for model in twins["buffer"])
    assert first == second and len(set(first.values())) == len(first)
    assert not set(first.values()) & set(other.checksums.content_hashes.values())
    part = other.program.slices[-1]
    content = np.fromfile(other.weights_path, np.uint8)[part.offset : part.offset + part.file_bytes].tobytes()
    assert other.checksums.content_hashes[part.name] == hashlib.blake2b(content, digest_size=16).digest()


def forged(folder: Path, of: MiniModel, *, seed: int) -> MiniModel:
    """A bundle with other weights, whose checksums.bin claims those of `of`."""
    made = write_mini_bundle(folder / "forged.flashmem", seed=seed)
    checksums, true = files_of(made.path) / "checksums.bin", (files_of(of.path) / "checksums.bin").read_bytes()
    hash_bytes = 16 * len(made.open().program.slices)
    checksums.write_bytes(checksums.read_bytes()[:-hash_bytes] + true[-hash_bytes:])
    fit(made.path, "checksums.bin")
    assert made.open().checksums.content_hashes == of.open().checksums.content_hashes
    return made


@pytest.mark.parametrize("verify_weights", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_a_bundle_that_lies_about_its_weights_changes_no_answer_but_its_own(
    order: tuple[int, ...], verify_weights: bool, twins: dict[str, list[MiniModel]], tmp_path: Path
) -> None:
    """In any order; and honest bundles still share."""
    models = [twins["buffer"][0], forged(tmp_path, twins["buffer"][0], seed=4), twins["buffer"][1]]
    inputs = models[0].inputs()
    with Runtime(verify_weights=verify_weights) as runtime:
        opened = {which: runtime.open(models[which].path, mode="map") for which in order}
        for _ in range(2):
            for which in order:
                answer = opened[which].run(None, inputs)
                np.testing.assert_allclose(answer[0], models[which].reference(inputs)[0], rtol=0, atol=2e-5)
        weights = slices_bytes(models[0].open())
        assert 2 * weights <= runtime.held < 2.5 * weights
        opened[order[0]].close()
        for which in order[1:]:
            answer = opened[which].run(None, inputs)
            np.testing.assert_allclose(answer[0], models[which].reference(inputs)[0], rtol=0, atol=2e-5)


def test_files_are_compared_once_and_not_by_a_name_that_another_may_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, files = np.random.default_rng(0), list[WeightFile]()
    content = rng.integers(0, 255, 200_000, np.uint8)
    changed = content.copy()
    changed[150_000] ^= 1
    read, reads = WeightFile.read_into, list[int]()

    def counted(file: WeightFile, data: NDArray[np.uint8], offset: int) -> None:
        reads.append(data.nbytes)
        read(file, data, offset)

    monkeypatch.setattr(WeightFile, "read_into", counted)
    for number, each in enumerate((content, content, changed)):
        (tmp_path / f"{number}.bin").write_bytes(each.tobytes())
        files.append(WeightFile(tmp_path / f"{number}.bin", each.size))
    one, same, other = files
    assert one.has_same(0, one, 0, 200_000) and reads == []
    assert not one.has_same(0, one, 4096, 100_000)
    for _ in range(2):
        before = len(reads)
        assert one.has_same(0, same, 0, 200_000) and not one.has_same(0, other, 0, 200_000)
        assert one.has_same(0, other, 0, 150_000) and not one.has_same(149_000, other, 149_000, 1_001)
    assert len(reads) == before and max(reads) <= 64 << 10
    os.truncate(tmp_path / "2.bin", 100)
    assert not one.has_same(4096, other, 4096, 4096)
    with pytest.raises(RunError, match="short read"):
        other.has_same(4096, one, 4096, 4096)
    same.close()
    del same, files[1]
    gc.collect()
    assert len(one._same) == 2  # itself and the one that still exists
    for file in files:
        file.close()


def test_kernels_that_a_bundle_brings_are_for_that_bundle_alone(
    twins: dict[str, list[MiniModel]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing proves that a binary belongs to the text of its key."""
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    model, device = twins["buffer"][0], list_devices()[0]
    bundle, inputs = model.open(), model.inputs()
    plain, _ = required_kernels(bundle.program, bundle.source, {}, {})
    lies = {}
    for wanted in plain:
        context = Context(device)
        program = context.build(wanted.text.replace("tanh(", "cos("), bundle.program.build_options)
        lies[kernel_key(device, wanted, bundle.program.build_options)] = program.binary()
    stranger = replace(bundle, binaries=packed_entries(lies))
    with Runtime(device="0", prepare=False) as runtime:
        first = runtime.open(stranger, mode="map")
        assert not np.allclose(first.run(None, inputs)[0], model.reference(inputs)[0], rtol=0, atol=2e-5)
        second = runtime.open(bundle, mode="map")
        np.testing.assert_allclose(second.run(None, inputs)[0], model.reference(inputs)[0], rtol=0, atol=2e-5)
