"""The weight file: one mapping for all threads."""

from __future__ import annotations

import mmap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from flashmem.runtime.streaming.weight_file import WeightFile


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
