"""The simulation compared with real sessions: the same loads and the same memory, for every device, mode and strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from flashmem import Session
from flashmem.base.errors import UserError
from flashmem.base.types import TransferMode
from flashmem.program.program import fixed_bytes
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.target.descriptor import DeviceDescriptor, Rates
from flashmem.tools.simulation.scenario import Strategy, describe, layout_for
from flashmem.tools.simulation.simulator import simulate
from tests.support.mini_bundle import write_mini_bundle

CASES = [
    pytest.param(device, path, mode, id=f"{device.descriptor_name}-{path}-{mode}")
    for device in list_devices()
    for path, modes in descriptor_for(device).modes.items()
    for mode in modes
]


@pytest.mark.parametrize("strategy", ["stream", "preload"])
@pytest.mark.parametrize(("device", "path", "mode"), CASES)
def test_memory_and_loads_are_those_of_the_session(
    device: Device, path: Literal["buffer", "texture"], mode: TransferMode, strategy: Strategy, tmp_path: Path
) -> None:
    model = write_mini_bundle(tmp_path / "mini.flashmem", path)
    bundle = model.open()
    with Session(bundle, device=str(list_devices().index(device)), mode=mode, strategy=strategy) as session:
        session.run(None, model.inputs())
        real = session.last_run
    assert real is not None
    predicted = simulate(describe(bundle.program, bundle.plan, descriptor_for(device), mode, strategy=strategy)).report
    held = {category: nbytes for category, nbytes in predicted.memory.by_category.items() if nbytes}
    layout = layout_for(bundle.program, bundle.plan, mode, strategy)
    most = fixed_bytes(bundle.program) + layout.total_bytes
    if mode == "map" and strategy == "stream":  # how much of it is resident at once depends on the faster side
        assert most / 2 < predicted.memory.peak_bytes <= most
        assert held.keys() == real.memory.by_category.keys() - {c for c, n in real.memory.by_category.items() if not n}
    else:
        assert predicted.memory.peak_bytes == real.memory.peak_bytes == most
        assert held == {category: nbytes for category, nbytes in real.memory.by_category.items() if nbytes}
    if strategy == "stream" and mode != "interleave":  # otherwise W is loaded separately, and a report has the run's own loads
        assert {span.name for span in predicted.loads} == {span.name for span in real.loads}
    assert predicted.memory.over_time[-1][1] == real.memory.over_time[-1][1]


@pytest.mark.parametrize("mode", ["map", "alias", "dma", "interleave"])
def test_rates_of_the_descriptor_are_what_a_run_takes(mode: TransferMode, tmp_path: Path) -> None:
    """With one slow resource and all others fast, the run takes that resource's time: bytes over the rate."""
    bundle = write_mini_bundle(tmp_path / "mini.flashmem").open()
    parts = bundle.program.slices
    moved = {"read_only": sum(part.nbytes for part in parts if mode != "map"), "file": sum(part.nbytes for part in parts)}
    fast = Rates(1e15, 1e15, 1e15, 1e15, 1e15, 0.0, 0.0, 0.0, 0.0, 0.0)

    def seconds(disk: Literal["cold", "cached"], **slow: float) -> float:
        descriptor = DeviceDescriptor("made-up", rates=Rates(**{**vars(fast), **slow}))
        return simulate(describe(bundle.program, bundle.plan, descriptor, mode, disk=disk)).report.latency.integrated

    assert seconds("cached", disk_bandwidth=1e6) < 1e-6
    constants = bundle.program.constants_bytes
    assert seconds("cold", disk_bandwidth=1e6) >= (moved["file"]) / 1e6
    assert seconds("cold", disk_bandwidth=1e6) <= (moved["file"] + constants) / 1e6 * 1.2  # and the rows of the table
    assert seconds("cached", cached_bandwidth=1e6) >= moved["read_only"] / 1e6
    assert seconds("cached", session_seconds=2.0) == pytest.approx(2.0, abs=1e-6)
    assert seconds("cached", layer_seconds=1.0) == pytest.approx(len(bundle.program.launches), abs=1e-6)
    kernels = {launch.kernel for launch in bundle.program.launches}
    expected = {"interleave": 2 * len(kernels)}.get(mode, len(kernels))
    assert len(kernels) <= seconds("cached", kernel_seconds=1.0) + 1e-6 <= expected + 1e-5
    if mode == "dma":
        assert seconds("cached", copy_bandwidth=1e6) >= moved["file"] / 1e6
    assert seconds("cached", load_seconds=1.0) == pytest.approx(len(parts), abs=1e-3)


def test_interleaved_moves_delay_their_layers_by_the_contention(tmp_path: Path) -> None:
    bundle = write_mini_bundle(tmp_path / "mini.flashmem", preload=0).open()
    quiet = DeviceDescriptor("made-up", rates=Rates(copy_bandwidth=1e6, contention={"interleave": 0.0}))
    crowded = DeviceDescriptor("made-up", rates=Rates(copy_bandwidth=1e6, contention={"interleave": 0.5}))
    plain, slowed = (describe(bundle.program, bundle.plan, descriptor, "interleave") for descriptor in (quiet, crowded))
    delay = sum(layer.seconds for layer in slowed.layers) - sum(layer.seconds for layer in plain.layers)
    interleaved = 0.0
    for number in range(1, len(bundle.program.launches) + 1):
        moved = [w.nbytes * chunks / w.chunks for w in bundle.plan.weights for layer, chunks in w.moves if layer == number]
        interleaved += sum(sorted(moved)[-4:])
    assert delay == pytest.approx(0.5 * interleaved / 1e6, rel=0.01)
    unknown = DeviceDescriptor("made-up", rates=Rates(contention={"map": 0.5}))
    with pytest.raises(UserError, match="no contention rate for transfer mode 'interleave'"):
        describe(bundle.program, bundle.plan, unknown, "interleave")
