"""Measures the machine's rates: every field of `flashmem.target.descriptor.Rates`, with the runtime's own parts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from flashmem.base.types import TransferMode
from flashmem.runtime.opencl.device import Device
from flashmem.schedule.modes import INTERLEAVE, MODES
from flashmem.target.descriptor import DeviceDescriptor, Rates
from flashmem.target.instruction_set import other_tiles

from .bench import LANE_BYTES, Bench
from .dataset import Row
from .loads import CHUNK, PARTS
from .sessions import measure_opening

CPU_GEMMS = ((128, 1024, 1024), (256, 768, 3072), (512, 1024, 1024))
GPU_GEMMS = ((512, 1024, 1024), (1024, 2048, 2048), (4096, 2048, 2048))
TRAFFIC_ELEMENTS = (48 << 20) // 12
ONE_GROUP = 64
_COPY_BYTES = 32 << 20
DELAYED_GEMM = (197, 768, 3072)
WORTH = 0.05
"""The least fraction of the time that another instruction set's tile must save; less is within the noise of a machine."""


@dataclass(frozen=True)
class MachineRates:
    """The descriptor's rates, and those of each transfer mode alone ("path mode", bytes per second, from the page cache)."""

    rates: Rates
    mode_rates: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """The rates as JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> MachineRates:
        """The rates from the result of `to_dict`."""
        return cls(Rates(**data["rates"]), data["mode_rates"])


def measure_rates(benches: Sequence[Bench], device: str, progress: Callable[[str], None]) -> MachineRates:
    """Measure all rates. The contention of copy streams is that of one product; the dataset refines it (`lane_contention`).

    `benches`: one for each path, the default first. `device` identifies the device for `flashmem run`. The disk is the one with
    the benches' files.
    """
    bench = benches[0]
    mode = bench.descriptor.modes[bench.path][0]
    progress("arithmetic")
    flops = _flops(bench)
    progress("memory")
    bandwidth = _bandwidth(bench)
    launch = _launch(bench)
    progress("transfers")
    alone = {f"{each.path} {m}": each.loads.transfer_rate(m) for each in benches for m in each.descriptor.modes[each.path]}
    cached = alone[f"{bench.path} {mode}"]
    copy = _copy_rate(bench) if MODES[mode].copies else cached
    delays: dict[TransferMode, float] = {}
    for each in benches:  # a mode that only another path has is measured there
        delays |= _contention(each, alone, delays)
    progress("disk")  # last: afterwards, part of the benches' file is not in the page cache
    disk = bench.loads.cold_rate(mode)
    load = bench.loads.slice_seconds(mode)
    progress("sessions")
    opening = measure_opening(bench.supply, device, mode)
    return MachineRates(
        Rates(
            gemm_flops=flops,
            memory_bandwidth=bandwidth,
            copy_bandwidth=copy,
            disk_bandwidth=disk,
            cached_bandwidth=cached,
            launch_seconds=launch,
            load_seconds=load,
            session_seconds=opening.session,
            kernel_seconds=opening.kernel,
            layer_seconds=opening.layer,
            run_seconds=opening.run,
            contention=delays,
        ),
        alone,
    )


def measure_main_rates(device: Device, descriptor: DeviceDescriptor, folder: Path) -> dict[str, float]:
    """The rates of kernels and loads by their names in `Rates`, in about 2 s; the disk is that of `folder`.

    Contention and the costs of opening a session need more time.

    Raises:
        RunError: the device refuses a kernel.
    """
    with Bench(device, descriptor, folder) as bench:
        mode = descriptor.modes[bench.path][0]
        flops = _flops(bench)
        found = {"gemm_flops": flops, "memory_bandwidth": _bandwidth(bench), "launch_seconds": _launch(bench)}
        if descriptor.rates.conv_flops:
            found["conv_flops"] = descriptor.rates.conv_flops * flops / descriptor.rates.gemm_flops
        found["cached_bandwidth"] = bench.loads.transfer_rate(mode)
        found["copy_bandwidth"] = _copy_rate(bench) if MODES[mode].copies else found["cached_bandwidth"]
        found["disk_bandwidth"] = bench.loads.cold_rate(mode)
        found["load_seconds"] = bench.loads.slice_seconds(mode)
    return found


def fastest_tile(device: Device, descriptor: DeviceDescriptor, folder: Path) -> str:
    """The instruction set whose plain tile multiplies fastest on a CPU, of those whose kernels every bundle has, in about 1 s.

    It depends on the runtime's compiler too, which may prefer narrower registers than the processor has. Tiles take turns. It
    is that of the device unless another one saves `WORTH` of the time; "" for a GPU.

    Raises:
        RunError: the device refuses a kernel.
    """
    own = device.instruction_set
    if not own:
        return ""
    flops: dict[str, float] = {}
    for name in (own, *other_tiles(own)) * 2:
        with Bench(device, descriptor.for_instruction_set(name), folder) as bench:
            found = _gemm(bench, *CPU_GEMMS[0]) * (1 if name == own else 1 - WORTH)
        flops[name] = max(found, flops.get(name, 0.0))
    return max(flops, key=lambda name: flops[name])


def lane_contention(rows: Sequence[Row], mode_rates: dict[str, float], path: str) -> float | None:
    """The contention of copy streams: the fraction of a transfer's time by which its moves delay the kernel.

    It is the median over contractions; None if no row shows it. Only moves that take less time alone than the kernel count:
    beyond that, the kernel waits for the transfer.
    """
    rate = mode_rates.get(f"{path} {INTERLEAVE.name}")
    found = []
    for row in rows:
        if (
            rate
            and row.mode == INTERLEAVE.name
            and row.features.memory_path == path
            and row.features.operator_class == "reusable"
        ):
            alone = row.streamed_bytes / rate
            if row.seconds > 2e-4 and 0.15 * row.seconds < alone < 0.7 * row.seconds:
                found.append((row.slowdown - 1) * row.seconds / alone)
    return max(0.0, statistics.median(found)) if found else None


def _contention(bench: Bench, mode_rates: dict[str, float], measured: Collection[TransferMode]) -> dict[TransferMode, float]:
    """By mode that is not in `measured`, the fraction of a transfer's time by which it delays products.

    Loader threads delay products that run three times as long as the transfer. A copy stream delays its own kernel, by the
    bytes that it moves in a third of the kernel's time.
    """
    product = bench.prepare(bench.supply.matmul(*DELAYED_GEMM))
    found: dict[TransferMode, float] = {}
    for mode in bench.descriptor.modes[bench.path]:
        if mode in measured:
            continue
        rate = mode_rates[f"{bench.path} {mode}"]
        if not MODES[mode].by_kernels:
            transfer = PARTS * CHUNK / rate
            found[mode] = max(0.0, product.delay(mode, PARTS, math.ceil(3 * transfer / product.seconds)) / transfer)
            continue
        beside = product.measure(mode, min(LANE_BYTES / 2, rate * product.seconds / 3))
        assert beside is not None  # the device has memory for so many bytes
        found[mode] = max(0.0, (beside.slowdown - 1) * product.seconds * rate / beside.streamed_bytes)
    return found


def _flops(bench: Bench) -> float:
    return max(_gemm(bench, *shape) for shape in (CPU_GEMMS if bench.descriptor.kind == "cpu" else GPU_GEMMS))


def _bandwidth(bench: Bench) -> float:
    traffic = bench.supply.elementwise(TRAFFIC_ELEMENTS)
    return traffic.launch.bytes / bench.prepare(traffic).seconds


def _launch(bench: Bench) -> float:
    return bench.prepare(bench.supply.elementwise(ONE_GROUP)).seconds


def _gemm(bench: Bench, rows: int, depth: int, columns: int) -> float:
    target = bench.supply.matmul(rows, depth, columns)
    return 2 * target.launch.macs / bench.prepare(target).seconds


def _copy_rate(bench: Bench) -> float:
    """Bytes per second from host memory to the device, by the command that loads use."""
    staging = bench.context.buffer(_COPY_BYTES, host_visible=True)
    buffer = bench.context.buffer(_COPY_BYTES)
    data = bench.queue.map(staging, _COPY_BYTES)
    try:
        data[:] = 1
        bench.queue.write(buffer, data)
        times = []
        for _ in range(7):
            begun = perf_counter()
            bench.queue.write(buffer, data)
            times.append(perf_counter() - begun)
    finally:
        bench.queue.unmap(data)
    return _COPY_BYTES / statistics.median(times)
