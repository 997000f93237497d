"""A fifth transfer mode is a class in each of two rooms: it is planned, checked and run without another change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import flashmem
from flashmem.program.tensors import Slice
from flashmem.runtime.opencl import devices
from flashmem.runtime.streaming.modes import TRANSFERS
from flashmem.runtime.streaming.modes.alias import AliasTransfer
from flashmem.runtime.streaming.transfer import TransferLoad
from flashmem.schedule.loads import Segment
from flashmem.schedule.modes import MODES
from flashmem.schedule.modes.kind import Pools, TransferKind
from flashmem.schedule.plan import PoolLayout
from flashmem.target.descriptor import Rates, load_descriptor
from tests.support.compared import Nodes


class Toy(TransferKind):
    """The host reads a slice, and writes it to the buffer that kernels read."""

    name = "toy"
    what = "the host writes what it has read to buffers that kernels read"

    def host_bandwidth(self, rates: Rates) -> float:
        return rates.cached_bandwidth / 2

    def last_bandwidth(self, rates: Rates) -> float:
        return rates.cached_bandwidth

    def lay_out(self, pools: Pools) -> PoolLayout:
        return pools.one_buffer()


class ToyTransfer(AliasTransfer):
    """Its loads."""

    loaded: ClassVar[list[str]] = []

    def load(self, part: Slice, segment: Segment, thread: int, turn: TransferLoad) -> None:
        self.loaded.append(part.name)
        data = np.empty(segment.nbytes, np.uint8)
        self.file.read_into(data, part.offset + segment.first)
        turn.did("read")
        with self._queue.mapped(
            self._objects.places[part.name],
            segment.nbytes,
            offset=segment.first,
            unmapped=lambda event: self.arrives(part, event),
        ) as place:
            place[:] = data
        turn.did("copy")


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The descriptor of PoCL's devices with the toy mode; the modes know it as well."""
    monkeypatch.setitem(MODES, Toy.name, Toy())
    monkeypatch.setitem(TRANSFERS, Toy.name, ToyTransfer)
    monkeypatch.setattr(ToyTransfer, "loaded", [])
    shipped = load_descriptor("pocl")
    rates = replace(shipped.rates, contention={**shipped.rates.contention, Toy.name: 0.9})
    with_toy = replace(shipped, rates=rates, capacity_model="")  # which was trained on measurements of the other modes
    monkeypatch.setattr(devices, "load_descriptor", lambda name: with_toy)
    return "pocl"


def test_it_is_planned_checked_and_run(device: str, tmp_path: Path) -> None:
    nodes, random = Nodes(), np.random.default_rng(3)
    value = nodes.input(random.standard_normal((4, 256), np.float32))
    for _ in range(4):
        [value] = nodes.node("MatMul", value, nodes.constant(random.standard_normal((256, 256), np.float32) / 16))
    (tmp_path / "m.onnx").write_bytes(nodes.proto().SerializeToString())

    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "m", device=device, mode="toy", budget="900KB", build=False)

    assert bundle.plan.mode == "toy" and any(not w.preload for w in bundle.plan.weights)
    answers = {}
    for mode in ("toy", "dma"):
        with flashmem.Session(bundle, device=device, mode=mode, build_apart=False) as session:
            answers[mode] = [session.run(None, nodes.feeds)[0] for _ in range(2)]
    assert {part.name for part in bundle.program.slices} == set(ToyTransfer.loaded)
    np.testing.assert_array_equal(answers["toy"], answers["dma"])
