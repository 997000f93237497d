"""A device with memory of its own, imitated by a CPU runtime, and the reads of weight files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from flashmem.program.tensors import Slice
from flashmem.runtime.opencl.context import Bytes
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.request import options
from flashmem.runtime.streaming.host_tier import HostTier
from flashmem.runtime.streaming.weight_file import WeightFile


def give_own_memory(monkeypatch: pytest.MonkeyPatch, device: Device, *, by_address: bool = False) -> None:
    """Sessions find `device`, as one that shares no memory with its host; `by_address`: see `Device.by_address`."""
    imitated = replace(device, unified_memory=False, by_address=by_address)
    monkeypatch.setattr(options, "find_device", lambda *_, **__: imitated)


def wait_for_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that open have the memory of their tier at once, so that the first run fills it."""
    make = HostTier.__init__

    def waiting(tier: HostTier, *arguments: Any) -> None:
        make(tier, *arguments)
        tier.begin()
        tier.wait()

    monkeypatch.setattr(HostTier, "__init__", waiting)


def descriptor_with_own_memory(folder: Path) -> str:
    """A file with PoCL's descriptor, with the modes of a device with memory of its own."""
    text = (resources.files("flashmem") / "devices" / "pocl.toml").read_text("utf-8")
    text = re.sub(r"(?m)^(capacity_model|counted|tuned) = .*\n", "", text)
    path = folder / "apart.toml"
    text = re.sub(r"(?m)^buffer = .*$", 'buffer = ["dma", "interleave"]', text)
    path.write_text(re.sub(r"(shares_memory|uses_host_memory) = true", r"\1 = false", text))
    return str(path)


@dataclass
class Reads:
    """The bytes that were read of each slice in `slices`, by name."""

    slices: dict[str, Slice] = field(default_factory=dict)
    nbytes: Counter[str] = field(default_factory=Counter)

    def watch(self, slices: Iterable[Slice]) -> None:
        """Count the reads of these slices from now on."""
        self.slices, self.nbytes = {part.name: part for part in slices}, Counter()

    def note(self, offset: int, nbytes: int) -> None:
        """Count a read, which may be of several slices."""
        for part in self.slices.values():
            common = min(offset + nbytes, part.offset + part.file_bytes) - max(offset, part.offset)
            if common > 0:
                self.nbytes[part.name] += common

    def taken(self) -> dict[str, int]:
        """The reads since the last call."""
        made, self.nbytes = dict(self.nbytes), Counter()
        return made


def reads_of_files(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Counts reads of weight files from now on."""
    seen, read_into, complete = Reads(), WeightFile.read_into, WeightFile.complete

    def here(file: WeightFile, data: Bytes, offset: int) -> None:
        seen.note(offset, data.nbytes)
        read_into(file, data, offset)

    def elsewhere(file: WeightFile, data: Bytes, offset: int, descriptor: int, got: int) -> None:
        seen.note(offset, got)
        complete(file, data, offset, descriptor, got)

    monkeypatch.setattr(WeightFile, "read_into", here)
    monkeypatch.setattr(WeightFile, "complete", elsewhere)
    return seen
