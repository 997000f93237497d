"""The weight file: one mapping for all threads."""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashmem.base.errors import RunError
from flashmem.runtime.streaming.weight_file import WeightFile
from tests.support.refused_threads import refuse_threads


def test_threads_that_map_the_file_at_the_same_time_get_one_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that has imported pages of a second mapping would read unmapped memory once that is replaced."""
    (tmp_path / "weights.bin").write_bytes(bytes(range(256)) * 64)
    made: list[Any] = []

    def slow(*arguments: Any, real: Any = mmap.mmap, **named: Any) -> Any:
        made.append(arguments)
        time.sleep(0.05)
        return real(*arguments, **named)

    monkeypatch.setattr(mmap, "mmap", slow)
    file = WeightFile(tmp_path / "weights.bin", 256 * 64)
    threads = [threading.Thread(target=file.populate, args=(0, 4096)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert file.mapped[:256].tolist() == list(range(256))
    file.close()


@pytest.mark.parametrize(("left", "stays"), [(None, True), (1 << 40, True), (16 << 10, False)])
def test_pages_stay_in_the_page_cache_if_memory_can_hold_the_file(
    left: int | None, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advised: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda descriptor, *advice: advised.append(advice))
    monkeypatch.setattr("flashmem.runtime.streaming.weight_file.available", lambda: left)
    (tmp_path / "weights.bin").write_bytes(bytes(1 << 16))
    file = WeightFile(tmp_path / "weights.bin", 1 << 16)
    file.look_at_memory()
    file.populate(4096, 8192)
    assert file.owned_bytes == (0 if stays else 8192)
    file.drop(4096, 8192)
    advised.clear()
    file.read_into(np.empty(4096, np.uint8), 16000)  # not from a whole page on
    assert advised == ([] if stays else [(16000, 4096, os.POSIX_FADV_DONTNEED)])
    file.close()


def test_a_file_whose_thread_cannot_start_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(10))
    file = WeightFile(tmp_path / "w.bin", 10)
    refuse_threads(monkeypatch, "flashmem-announcer")
    with pytest.raises(RunError, match="the thread flashmem-announcer could not be started"):
        file.announce([(0, 10)])
    file.close()
    assert file._file.closed
