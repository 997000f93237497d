"""Tensors in shared virtual memory, as on NVIDIA's driver: the answers are those of buffers, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import flashmem
from flashmem.base.errors import RunError
from flashmem.base.types import TransferMode
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl import shared_memory
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.opencl.discovery import find_device
from flashmem.runtime.opencl.shared_memory import SharedMemory
from tests.support.chain_model import WIDTH, chained, smallest_budget, write_chain
from tests.support.inputs import floats
from tests.support.own_memory import descriptor_with_own_memory, give_own_memory
from tests.support.state_models import StateModel, delays, recurrence


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    made = Ledger(Context(replace(find_device("pocl"), by_address=True)), 1 << 20)
    yield made
    made.close()


def test_parts_are_ranges_of_one_allocation(ledger: Ledger) -> None:
    queue = ledger._context.queue()
    whole, other = ledger.buffer("arena", 4096, "tensors"), ledger.buffer("outputs", 1024, "an output")
    assert isinstance(whole, SharedMemory) and ledger.total == 5120
    data = np.arange(512, dtype=np.int32)
    queue.write(whole, data)
    part, inside = ledger.part("arena", whole, 1024, 1024), ledger.part("arena", whole, 1536, 256)
    queue.write(inside, np.full(32, -1, np.int32), offset=128)
    queue.copy(part, other, 1024)
    found = np.empty(256, np.int32)
    queue.read(found, other)
    np.testing.assert_array_equal(found, np.r_[data[256:416], np.full(32, -1), data[448:512]])
    later = np.empty(16, np.int32)
    queue.read_later(later, inside).wait()
    np.testing.assert_array_equal(later, data[384:400])
    ledger.give_back("arena", "outputs")
    assert ledger.total == 0


def test_memory_that_no_tensors_share_is_a_buffer(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not isinstance(ledger.buffer("weights", 1024, "weights"), SharedMemory)
    monkeypatch.setattr(shared_memory, "MOST_BYTES", 1024)
    assert not isinstance(ledger.buffer("arena", 1025, "tensors"), SharedMemory)


def test_a_refusal_is_one_sentence(ledger: Ledger) -> None:
    with pytest.raises(RunError, match=r"^OpenCL failed to allocate 0 bytes of shared virtual memory: MEM_OBJECT_ALLOC"):
        shared_memory.allocate(ledger._context.handle, 0, lambda: None)


@pytest.mark.parametrize("mode", ["dma", "interleave"])
def test_streamed_answers(mode: TransferMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, x = write_chain(tmp_path / "m.onnx"), floats(9, WIDTH, kind="of many sizes")
    device = descriptor_with_own_memory(tmp_path)
    options: dict[str, Any] = {
        "device": device,
        "mode": mode,
        "memory_path": "buffer",
        "shapes": {"x": x.shape},
        "build": False,
    }
    options["build"] = False
    budget = smallest_budget(tmp_path / "m.onnx", tmp_path, **options)
    bundle = flashmem.compile(tmp_path / "m.onnx", tmp_path / "m.flashmem", budget=budget, **options)
    found = []
    for by_address in (False, True):
        give_own_memory(monkeypatch, find_device("pocl"), by_address=by_address)
        with flashmem.Session(bundle, mode=mode, prepare=False) as session:
            found += [session.run(None, {"x": x})[0] for _ in range(3)]
            bound = session._engine.bound
            assert bound is not None and isinstance(bound.activations.arena, SharedMemory) == by_address
            assert session.last_run is not None and session.last_run.loads
    np.testing.assert_allclose(found[0], chained(x, weights), rtol=0, atol=1e-4)
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@pytest.mark.parametrize("model", [recurrence("of many sizes"), delays()], ids=["recurrence", "delays"])
def test_states_and_outputs_on_the_device(model: StateModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(model.proto, tmp_path / "m.onnx")
    bundle = flashmem.compile(
        tmp_path / "m.onnx",
        tmp_path / "b.flashmem",
        device=descriptor_with_own_memory(tmp_path),
        states=model.states,
        build=False,
    )
    found = []
    for by_address in (False, True):
        give_own_memory(monkeypatch, find_device("pocl"), by_address=by_address)
        with flashmem.Session(bundle, prepare=False) as session:
            binding = session.io_binding()
            for name in model.outputs():
                binding.bind_output(name, "opencl")
            for number in range(4):
                for name, data in model.inputs(number).items():
                    binding.bind_cpu_input(name, data)
                session.run_with_iobinding(binding)
            found.append([*binding.copy_outputs_to_cpu(), *session.states().values()])
            session.reset()
            assert not any(each.any() for each in session.states().values())
    for buffers, addresses in zip(*found, strict=True):
        np.testing.assert_array_equal(addresses, buffers)
