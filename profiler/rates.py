"""The machine's rates: every field of `flashmem.device.Rates`, measured with the runtime's own parts."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from flashmem.bundle import BundleWriter
from flashmem.codegen.program import generate
from flashmem.compile import Options, plan_program
from flashmem.device import DeviceDescriptor, Rates, TransferMode
from flashmem.graph.fusion import fuse
from flashmem.graph.layout import assign_layouts
from flashmem.graph.normalize import normalize
from flashmem.planning.planner import Limits

from .bench import Bench
from .cases import elementwise_target, kernels_graph, matmul_target
from .dataset import Row

_CPU_GEMMS = ((128, 1024, 1024), (256, 768, 3072), (512, 1024, 1024))
_GPU_GEMMS = ((512, 1024, 1024), (1024, 2048, 2048), (4096, 2048, 2048))
_TRAFFIC_BYTES = 48 << 20
_COPY_BYTES = 32 << 20
_KERNELS = 28
_OPENINGS = 5


@dataclass(frozen=True)
class MachineRates:
    """The descriptor's rates, and those of each transfer mode alone ("path mode", bytes per second, from the page cache)."""

    rates: Rates
    mode_rates: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> MachineRates:
        """What `to_dict` gave."""
        return cls(Rates(**data["rates"]), data["mode_rates"])


def measure_rates(benches: Sequence[Bench], device: str, told: Callable[[str], None]) -> MachineRates:
    """All rates but contention, which the dataset gives (`contention`). `benches`: one for each path, the default first.

    `device` is how `flashmem run` finds the device. The disk is the one that the benches' files lie on.
    """
    bench = benches[0]
    mode = bench.descriptor.modes[bench.path][0]
    told("arithmetic")
    shapes = _CPU_GEMMS if bench.descriptor.kind == "cpu" else _GPU_GEMMS
    flops = max(_gemm(bench, *shape) for shape in shapes)
    told("memory")
    traffic = elementwise_target(_TRAFFIC_BYTES // 12, bench.descriptor)
    bandwidth = traffic.launch.bytes / bench.prepare(traffic).seconds
    launch = bench.prepare(elementwise_target(64, bench.descriptor)).seconds
    told("transfers")
    alone = {f"{each.path} {m}": each.loads.transfer_rate(m) for each in benches for m in each.descriptor.modes[each.path]}
    cached = alone[f"{bench.path} {mode}"]
    copy = _copy_rate(bench) if mode in ("dma", "interleave") else cached
    told("disk")
    disk = bench.loads.cold_rate(mode)
    load = bench.loads.slice_seconds(mode)
    told("sessions")
    session, kernel = _session(bench.descriptor, device, mode)
    return MachineRates(
        Rates(
            gemm_flops=flops,
            memory_bandwidth=bandwidth,
            copy_bandwidth=copy,
            disk_bandwidth=disk,
            cached_bandwidth=cached,
            launch_seconds=launch,
            load_seconds=load,
            session_seconds=session,
            kernel_seconds=kernel,
        ),
        alone,
    )


def contention(rows: Sequence[Row], mode_rates: dict[str, float], path: str) -> dict[TransferMode, float]:
    """By mode, the share of a transfer's time by which it delays what computes: the median over contractions.

    Only loads that take less time alone than the kernel are asked: beyond that it is the transfer that is waited for.
    """
    found: dict[TransferMode, list[float]] = {}
    for row in rows:
        if row.mode == "none" or row.facts.memory_path != path or row.facts.operator_class != "reusable":
            continue
        alone = row.streamed_bytes / mode_rates[f"{path} {row.mode}"]
        if row.seconds > 2e-4 and 0.15 * row.seconds < alone < 0.7 * row.seconds:
            mode: Any = row.mode
            found.setdefault(mode, []).append((row.slowdown - 1) * row.seconds / alone)
    return {mode: max(0.0, statistics.median(shares)) for mode, shares in found.items()}


def _gemm(bench: Bench, rows: int, depth: int, columns: int) -> float:
    target = matmul_target(rows, depth, columns, bench.descriptor)
    return 2 * target.launch.macs / bench.prepare(target).seconds


def _copy_rate(bench: Bench) -> float:
    """Host memory to the device, by the command that loads use."""
    staging, buffer = bench.context.buffer(_COPY_BYTES, host_visible=True), bench.context.buffer(_COPY_BYTES)
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


def _session(descriptor: DeviceDescriptor, device: str, mode: TransferMode) -> tuple[float, float]:
    """(opening a session, one kernel from the program cache): fresh processes run two bundles that differ in kernels alone.

    The cache is filled first. What a warm run takes is not counted.
    """
    with tempfile.TemporaryDirectory(prefix="flashmem-sessions-") as name:
        inside = Path(name)
        bundles = [inside / f"{count}.flashmem" for count in (1, _KERNELS)]
        few, many = (_bundle(path, descriptor, mode, int(path.stem)) for path in bundles)
        for path in bundles:
            _open(path, device, inside)
        times = [[_open(path, device, inside) for path in bundles] for _ in range(_OPENINGS)]
    kernel = max(1e-6, statistics.median(most - least for least, most in times) / (many - few))
    return max(1e-4, statistics.median(least for least, _ in times) - few * kernel), kernel


def _bundle(path: Path, descriptor: DeviceDescriptor, mode: TransferMode, count: int) -> int:
    graph = assign_layouts(normalize(kernels_graph(count)))
    made = generate(graph, fuse(graph), descriptor)
    # The rates are being measured and the model is not trained: the plan must not ask for it.
    options = Options(replace(descriptor, capacity_model=""), mode, Limits())
    with BundleWriter(path) as writer:
        made.weights.write(writer)
        writer.commit(made.program, made.source, plan_program(made.program, options), descriptor, {"mode": mode})
    return len(made.source.kernels)


def _open(bundle: Path, device: str, cache: Path) -> float:
    """Seconds to open a session and run once, above a warm run, in a fresh process that has loaded the driver."""
    command = [sys.executable, "-m", "flashmem.profiler.opening", str(bundle), device]
    environment = {**os.environ, "FLASHMEM_CACHE_DIR": str(cache)}
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
