"""A weight file that memory cannot hold: reads past the page cache, and memory of the process for weights that stay."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashmem import Session
from flashmem.base.errors import RunError
from flashmem.runtime.memory.arena import new_pages
from flashmem.runtime.streaming.direct import UNIT, DirectReader
from flashmem.runtime.streaming.weight_file import WeightFile
from flashmem.schedule.loads import staying
from flashmem.target.descriptor import load_descriptor
from tests.support.compared import PLACES
from tests.support.mini_bundle import MiniModel, write_mini_bundle
from tests.support.uncached import cached_pages, write_uncached

CONTENT = np.random.default_rng(0).integers(0, 255, 10 * UNIT + 777, np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that the page cache does not have."""
    return write_uncached(tmp_path / "weights.bin", CONTENT)


@pytest.fixture
def file(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightFile]:
    """The same file, opened where memory cannot hold it."""
    monkeypatch.setattr("flashmem.runtime.streaming.weight_file.available", lambda: UNIT)
    opened = WeightFile(path, CONTENT.size)
    opened.look_at_memory()
    yield opened
    opened.close()


def test_what_is_read_past_the_page_cache_is_not_in_it(path: Path, file: WeightFile) -> None:
    if file.direct.refused or cached_pages(path):
        pytest.skip("the file system of the temporary folder has no such reads, or keeps all pages")
    place = new_pages(CONTENT.size)
    for offset, nbytes in ((UNIT, 3 * UNIT), (2 * UNIT, UNIT + 5), (9 * UNIT, UNIT + 777), (0, 1)):
        place[:] = 0
        file.read_into(place[:nbytes], offset)
        np.testing.assert_array_equal(place[:nbytes], CONTENT[offset : offset + nbytes])
        assert not place[nbytes:].any()
    assert file.direct.nbytes == 3 * UNIT + UNIT + 5 + UNIT + 777 + 1
    assert cached_pages(path) == 0
    file.stays = True
    file.read_into(place[:UNIT], UNIT)
    assert cached_pages(path)  # so these are counted


def test_places_that_the_disk_cannot_write_to_are_filled_through_the_page_cache(file: WeightFile) -> None:
    place = new_pages(4 * UNIT)
    for first, offset in ((1, UNIT), (0, 16)):
        file.read_into(place[first : first + UNIT], offset)
        np.testing.assert_array_equal(place[first : first + UNIT], CONTENT[offset : offset + UNIT])
    assert file.direct.nbytes == 0


@pytest.mark.parametrize("after", [0, 1], ids=["at the first read", "at the second"])
def test_a_refusal_is_noted_and_the_page_cache_used(after: int, file: WeightFile, monkeypatch: pytest.MonkeyPatch) -> None:
    own, read, reads = file.direct.descriptor, os.preadv, list[int]()

    def refuse(descriptor: int, views: list[Any], offset: int, *flags: int) -> int:
        if descriptor != own:
            return read(descriptor, views, offset, *flags)
        reads.append(offset)
        if len(reads) > after:
            raise OSError(errno.EINVAL, "Invalid argument")
        return read(descriptor, [views[0][:UNIT]], offset, *flags)

    monkeypatch.setattr(os, "preadv", refuse)
    place = new_pages(3 * UNIT)
    for _ in range(2):
        place[:] = 0
        file.read_into(place, 2 * UNIT)
        np.testing.assert_array_equal(place, CONTENT[2 * UNIT : 5 * UNIT])
    assert file.direct.refused == "Invalid argument"
    assert (len(reads), file.direct.nbytes) == (1 + after, after * UNIT)


def test_a_file_system_without_such_reads_is_no_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(name: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(name, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    reader = DirectReader(os.open(path, os.O_RDONLY))
    assert reader.refused == "Invalid argument" and not reader.takes(new_pages(UNIT), 0)
    reader.close()


@pytest.mark.parametrize("fails", [True, False], ids=["disk", "truncated"])
def test_a_failing_disk_and_a_short_file_are_errors(
    fails: bool, path: Path, file: WeightFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fails:

        def broken(*_: Any) -> int:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "preadv", broken)
    else:
        os.truncate(path, 5 * UNIT)
    with pytest.raises(RunError, match="Input/output error" if fails else "ends before byte"):
        file.read_into(new_pages(8 * UNIT), 0)


def test_own_memory_replaces_pages_of_the_mapping_until_they_are_dropped(path: Path, file: WeightFile) -> None:
    mapped = file.mapped
    file.populate(2 * UNIT, 3 * UNIT)
    file.populate(10 * UNIT, 777)  # the last page
    assert file.owned_bytes == 3 * UNIT + 777
    np.testing.assert_array_equal(mapped, CONTENT)
    assert len(owned_ranges(mapped.ctypes.data, CONTENT.size)) == 2
    file.drop(2 * UNIT, 3 * UNIT)
    assert file.owned_bytes == 777
    np.testing.assert_array_equal(mapped, CONTENT)
    file.drop(10 * UNIT, 777)
    assert not owned_ranges(mapped.ctypes.data, CONTENT.size) and not file.owned_bytes
    np.testing.assert_array_equal(mapped, CONTENT)


def owned_ranges(address: int, nbytes: int) -> list[str]:
    """The ranges of this process's memory maps in these bytes that are of no file. The last one may go on behind them."""
    found, end = [], address + -(-nbytes // UNIT) * UNIT
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, _, _, _, inode, *_ = line.split()
        first, last = (int(each, 16) for each in span.split("-"))
        if first < end and last > address and inode == "0":
            found.append(line)
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MiniModel]:
    folder = tmp_path_factory.mktemp("mini")
    return {path: write_mini_bundle(folder / f"{path}.flashmem", path, preload=2) for path in ("buffer", "texture")}  # type: ignore[arg-type]


@pytest.mark.parametrize("place", PLACES, ids="-".join)
def test_a_run_without_memory_for_the_file_has_the_same_bits_and_owns_what_stays(
    place: tuple[str, str], models: dict[str, MiniModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    (device, path), expected = place, list[np.ndarray]()
    model = models[path]
    inputs, bundle = model.inputs(seed=2), model.open()
    stays = staying(bundle.plan)
    assert stays and len(stays) < len(bundle.plan.weights)
    for mode in load_descriptor(device).modes[path]:  # type: ignore[index]
        for left in (None, UNIT):
            monkeypatch.setattr("flashmem.runtime.streaming.weight_file.available", lambda left=left: left)
            with Session(bundle, device=device, mode=mode, prepare=False) as session:
                for _ in range(3):
                    outputs = session.run(None, inputs)
                    expected = expected or outputs
                    assert all(np.array_equal(*pair) for pair in zip(outputs, expected, strict=True))
                    report = session.last_run
                    assert report is not None
                    if not report.no_direct_reads:
                        assert (report.direct_bytes > 0) == (left is not None)
                owned = session._engine.opened.file.owned_bytes
                resident = sum(part.file_bytes for part in bundle.program.slices if part.name in stays)
                assert owned == (resident if mode == "map" and left is not None else 0)
