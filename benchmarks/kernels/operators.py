"""Time of single operators: flashmem's kernels compared with the platform's libraries, in one process.

    python -m benchmarks.kernels.operators [--device D] [--seconds S] [--json FILE] [--plot FILE.png] [--markdown FILE]

On an NVIDIA GPU: cuBLAS, cuDNN and scaled_dot_product_attention of PyTorch, float32 without TF32. Both sides are timed as in
a model, by events around 20 runs one after the other, which a CUDA graph, or the queue of a busy device, holds: an event
around a single launch would add 1.3 to 4 us to it. On a CPU: OpenBLAS through numpy for products, and single operators of ONNX
Runtime for convolutions and attention; flashmem is timed by OpenCL's profiling events. Every memory path of the device is
measured, with the configs and the tuning database of its descriptor. Medians; ratios are the peer's time over flashmem's.
Everything is resident. Layout conversions around a convolution are not counted.

The groups "tensor cores", "convolutions by tensor cores" and "attention by tensor cores" are measured on halves on the
buffer path: by the configs of the descriptor, by those without tensor cores, and by PyTorch in float16. "products in tf32" and
"convolutions in tf32" are measured likewise with `--precision tf32`, beside PyTorch with TF32 on.

Each shape is written to `--json` after its measurement. After `--seconds`, no further shape begins. `--models` adds whole
models with everything resident, compared with PyTorch's eager mode (benchmarks/kernels/models.py). `--from FILE` measures
nothing and shows the results in such a file. The comparison needs PyTorch or ONNX Runtime.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.command import Arguments, run_command
from benchmarks.kernels.cases import ATTENTION, CLIFFS, DECODING, LOW_BITS, LOW_PRECISION, REFERENCE, Case, cases
from benchmarks.kernels.decoding import FAMILIES, Decode
from benchmarks.kernels.peers import Peer, peer_of
from flashmem.base.files import written_whole
from flashmem.base.types import MemoryPath, Precision
from flashmem.compiler.configs.listed import listed_configs
from flashmem.compiler.lowering.generated import Generated
from flashmem.profiler.timing import Stand, generated
from flashmem.runtime.engine.steps import Command
from flashmem.runtime.opencl.context import CompiledProgram
from flashmem.runtime.request.options import device_here, find_descriptor
from flashmem.target.descriptor import DeviceDescriptor

Row = dict[str, Any]
_AHEAD = 8
_OPERATORS = 0.6  # share of the time, if models are measured too
_ROUNDS = 3  # on a CPU, flashmem and the peer alternate
_PAUSE = 0.15  # seconds between them: OpenBLAS and ONNX Runtime threads spin for a while after their work


_OTHER = "without tensor cores"
"""The column of a case of tensor cores with the device's other configs."""


@dataclass
class _Work:
    """A case with its kernels being built, by memory path; of tensor cores, also by the other configs."""

    case: Case
    made: dict[str, Generated] = field(default_factory=dict)
    building: dict[str, Future[CompiledProgram]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class Bench:
    """Times cases on one device and with its peer."""

    def __init__(self, device: str, paths: Sequence[MemoryPath] = ()) -> None:
        """`paths`: the memory paths to measure. Empty: all of a GPU, and the first of a CPU, which has no texture hardware."""
        self.device = device_here(device)
        self.descriptor = find_descriptor(device)
        every = self.descriptor.memory_paths
        self.paths = paths or (every if self.device.kind == "gpu" else every[:1])
        self.stand = Stand(self.device)
        self.peer: Peer | None = peer_of(self.descriptor.kind)
        # Ahead-of-time builds would slow the measurements on a CPU.
        self._ahead = _AHEAD if self.device.kind == "gpu" else 1
        self._builders = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="build")

    def about(self) -> Row:
        """The device, the versions and the settings of the measurement."""
        rates = self.descriptor.rates
        return {
            "device": self.device.name,
            "kind": self.descriptor.kind,
            "driver": f"{self.device.platform} {self.device.driver_version}",
            "descriptor": self.descriptor.name,
            "tuned": self.descriptor.tuned,
            "configs": [config.name for config in listed_configs(self.descriptor)],
            "peer": self.peer.about if self.peer else None,
            "paths": list(self.paths),
            "memory_bandwidth": rates.memory_bandwidth,
            "date": datetime.now(UTC).isoformat(timespec="minutes"),
        }

    def close(self) -> None:
        """Free everything."""
        self._builders.shutdown(cancel_futures=True)
        self.stand.close()

    def rows(self, wanted: Iterable[Case], deadline: float) -> Iterator[Row]:
        """A row for each case begun before the deadline; a failed case has the error."""
        coming = iter(wanted)
        waiting: deque[_Work] = deque()
        while time.monotonic() < deadline:
            while len(waiting) < self._ahead and (case := next(coming, None)) is not None:
                waiting.append(self._begin(case))
            if not waiting:
                return
            yield self._row(waiting.popleft())

    def _begin(self, case: Case) -> _Work:
        work = _Work(case)
        precision = LOW_PRECISION.get(case.group, "fp32")
        for path, descriptor in self._descriptors(precision).items():
            try:
                if isinstance(case.shape, Decode):
                    descriptor = replace(descriptor, only=case.shape.config)
                work.made[path] = generated(case.shape.graph(), descriptor, precision)
                work.building[path] = self._builders.submit(self.stand.build, work.made[path])
            except Exception as error:  # an error of one kernel; the others are measured
                work.failed[path] = _sentence(error)
        return work

    def _descriptors(self, precision: Precision) -> dict[str, DeviceDescriptor]:
        """The descriptors by which a case is compiled, by the name of its column."""
        if precision == "fp32":
            return {path: self.descriptor.on_path(path) for path in self.paths}
        buffer = self.descriptor.on_path("buffer")
        features = tuple(each for each in buffer.features if each != "mma")
        return {"buffer": buffer, _OTHER: replace(buffer, features=features)}

    def _row(self, work: _Work) -> Row:
        for future in work.building.values():
            future.exception()  # all kernels are built before the first is timed
        times: dict[str, list[float]] = {}
        ready: dict[str, list[Command]] = {}
        for path, future in work.building.items():
            try:
                future.result()
                program = self.stand.build(work.made[path])
                layouts = getattr(work.case.shape, "layouts", False)
                families = FAMILIES if isinstance(work.case.shape, Decode) else ()
                ready[path] = self.stand.commands(work.made[path], program, layouts=layouts, families=families)
            except Exception as error:
                self._failed(work, path, error)
        for _ in range(1 if self.device.kind == "gpu" else _ROUNDS):
            for path in ready:
                try:
                    if path not in work.failed:
                        self._pause()
                        times.setdefault(path, []).append(self._seconds(ready[path]))
                except Exception as error:
                    self._failed(work, path, error)
            try:
                if self.peer is not None and "peer" not in work.failed and not isinstance(work.case.shape, Decode):
                    precision = LOW_PRECISION.get(work.case.group, "fp32")
                    times.setdefault("peer", []).append(self.peer.seconds(work.case.shape, precision))
            except Exception as error:
                work.failed["peer"] = _sentence(error)
        case, shape = work.case, work.case.shape
        itemsize = 2 if LOW_PRECISION.get(case.group) == "fp16" else 4
        return {
            "group": case.group, "kind": type(shape).__name__, "shape": str(shape), "count": case.count, "flops": shape.flops,
            "bytes": shape.nbytes if isinstance(shape, Decode) else itemsize * shape.elements, "failed": work.failed,
            "seconds": {who: statistics.median(found) for who, found in times.items() if found and who not in work.failed},
            "kernels": {path: _kernels(made) for path, made in work.made.items()},
        }  # fmt: skip

    def _seconds(self, commands: Sequence[Command]) -> float:
        """Seconds of one run, among others on a GPU, as PyTorch's."""
        return self.stand.time_in_a_row(commands) if self.device.kind == "gpu" else self.stand.time(commands).seconds

    def _pause(self) -> None:
        if self.device.kind != "gpu":
            time.sleep(_PAUSE)

    def _failed(self, work: _Work, path: str, error: Exception) -> None:
        work.failed[path] = _sentence(error)
        if not self.stand.works():  # after some failures a device refuses all commands in that context
            self.stand.close()
            self.stand = Stand(self.device)


def _kernels(made: Generated) -> list[str]:
    """The launches of a program: kernel, work-items, work-group."""
    sizes = ((each.kernel, "x".join(map(str, each.global_size)), each.local_size) for each in made.program.launches)
    return [f"{kernel} {items} / {'x'.join(map(str, group or ()))}" for kernel, items, group in sizes]


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def ratio(row: Row, path: str) -> float | None:
    """The peer's time over flashmem's; None if one of them is missing."""
    ours, theirs = row["seconds"].get(path), row["seconds"].get("peer")
    return theirs / ours if ours and theirs else None


def mean(ratios: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def markdown(data: Row) -> str:
    """The page: machine and versions, means by group, and every shape."""
    about, rows = data["about"], data["rows"]
    paths, peer = about["paths"], about["peer"]
    unit = 1e12 if about["kind"] == "gpu" else 1e9
    name = "TFLOP/s" if about["kind"] == "gpu" else "GFLOP/s"
    tuned = "with its tuning database" if about["tuned"] else "not tuned"
    lines = [
        f"{about['device']} ({about['driver']}), descriptor {about['descriptor']}, {tuned}, {about['date']}; "
        f"{'peer: ' + peer if peer else 'no peer'}. Medians, float32 unless stated; a ratio is the peer's time over ours.",
        "",
        "| shapes of | count | " + " | ".join(f"{path}: mean, least" for path in paths) + " |",
        "|---|---|" + "---|" * len(paths),
    ]
    for group in dict.fromkeys(row["group"] for row in rows if row["group"] not in LOW_PRECISION):
        those = [row for row in rows if row["group"] == group]
        cells = []
        for path in paths:
            ratios = [found for row in those if (found := ratio(row, path))]
            cells.append(f"{mean(ratios):.2f}, {min(ratios):.2f}" if ratios else "")
        lines.append(f"| {group} | {len(those)} | " + " | ".join(cells) + " |")
    products = [row for row in rows if row["group"] not in (REFERENCE, ATTENTION, *LOW_PRECISION) and row["kind"] == "Matmul"]
    for path in paths:
        ratios = [found for row in products if (found := ratio(row, path))]
        if ratios:
            lines.append(f"\nAll {len(ratios)} products of the models, {path}: {mean(ratios):.2f}, least {min(ratios):.2f}.")
    lines += [
        "",
        f"| shapes of | shape | {' | '.join(f'{path} {name}' for path in paths)} | peer {name} | ratios |",
        "|---|---|" + "---|" * (len(paths) + 2),
    ]
    decoding = [row for row in rows if row["group"] == DECODING]
    timed = [row for row in rows if row["group"] in (CLIFFS, LOW_BITS)]
    low = [row for row in rows if row["group"] in LOW_PRECISION]
    for row in (row for row in rows if row not in timed and row not in decoding and row not in low):
        rates = [f"{row['flops'] / s / unit:.3g}" if (s := row["seconds"].get(who)) else "" for who in (*paths, "peer")]
        ratios_cell = " / ".join(f"{found:.2f}" if (found := ratio(row, path)) else "–" for path in paths)
        lines.append(f"| {row['group']} | {row['shape']} | {' | '.join(rates)} | {ratios_cell} |")
    if timed:
        lines += [
            "",
            f"| operator | {' | '.join(f'{path} ms, GB/s' for path in paths)} | peer ms | ratios |",
            "|---|---|---|" + "---|" * len(paths),
        ]
    for row in timed:
        times = [f"{1e3 * s:.3g}, {row['bytes'] / s / 1e9:.3g}" if (s := row["seconds"].get(path)) else "" for path in paths]
        theirs = f"{1e3 * s:.3g}" if (s := row["seconds"].get("peer")) else ""
        ratios_cell = " / ".join(f"{found:.2f}" if (found := ratio(row, path)) else "–" for path in paths)
        lines.append(f"| {row['shape']} | {' | '.join(times)} | {theirs} | {ratios_cell} |")
    if decoding:
        lines += [
            "",
            "| attention of a decoder | us | bound by the cache's bytes, us | share |",
            "|---|---|---|---|",
        ]
    for row in decoding:
        bound = row["bytes"] / about["memory_bandwidth"]
        for path in (path for path in paths if path in row["seconds"]):
            s = row["seconds"][path]
            lines.append(f"| {row['shape']} ({path}) | {1e6 * s:.3g} | {1e6 * bound:.3g} | {bound / s:.2f} |")
    if low:
        lines += ["", *_by_tensor_cores(low)]
    failed = [f"- {row['shape']}, {who}: {why}" for row in rows for who, why in row["failed"].items()]
    if failed:
        lines += ["", "Failed:", "", *failed]
    text = "\n".join(lines) + "\n"
    if data.get("models"):
        from benchmarks.kernels import models as kernel_models

        text += kernel_models.markdown(data["models"])
    return text


def _by_tensor_cores(rows: Sequence[Row]) -> Iterator[str]:
    """The lines about operators in half and in TF32."""
    for group in dict.fromkeys(row["group"] for row in rows):
        for who in ("buffer", _OTHER):
            ratios = [found for row in rows if row["group"] == group and (found := ratio(row, who))]
            if ratios:
                name = group if who == "buffer" else f"{group}: {who}"
                yield f"{LOW_PRECISION[group]}, {name}: {len(ratios)} shapes, mean {mean(ratios):.2f}, least {min(ratios):.2f}."
                yield ""
    yield "| shapes of | shape | TFLOP/s | without tensor cores | peer | ratios |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        rates = [
            f"{row['flops'] / s / 1e12:.3g}" if (s := row["seconds"].get(who)) else "" for who in ("buffer", _OTHER, "peer")
        ]
        ratios_cell = " / ".join(f"{found:.2f}" if (found := ratio(row, who)) else "–" for who in ("buffer", _OTHER))
        yield f"| {row['group']} | {row['shape']} | {' | '.join(rates)} | {ratios_cell} |"


def measure(args: argparse.Namespace) -> Row:
    """Run all measurements; each result is written to `--json` at once."""
    begun = time.monotonic()
    bench = Bench(args.device, args.path)
    data: Row = {"about": bench.about(), "rows": []}
    wanted = [case for case in cases(bench.descriptor) if not args.group or case.group in args.group]
    try:
        operators = args.seconds * (_OPERATORS if args.models else 1)
        for row in bench.rows(wanted[: args.most], begun + operators):
            data["rows"].append(row)
            ratios = ", ".join(f"{who} {found:.2f}" for who in row["seconds"] if who != "peer" and (found := ratio(row, who)))
            text = ratios or ", ".join(f"{who} {s:.3g} s" for who, s in row["seconds"].items())
            failed = "".join(f"; {who} failed: {why}" for who, why in row["failed"].items())
            print(f"{row['group']} {row['shape']}: {text}{failed}", file=sys.stderr, flush=True)
            keep(data, args.json)
    finally:
        keep(data, args.json)
        bench.close()
    if args.models:
        from benchmarks.kernels import models as kernel_models

        data["models"] = []
        for row in kernel_models.rows(args.device, begun + args.seconds):
            data["models"].append(row)
            print(f"{row['model']}: {row['seconds']} {row['failed'] or ''}", file=sys.stderr, flush=True)
            keep(data, args.json)
    left = len(wanted) - len(data["rows"])
    if left:
        print(f"{left} shapes were not begun", file=sys.stderr, flush=True)
    return data


def keep(data: Row, path: Path | None) -> None:
    """Write the results so far."""
    if path is not None:
        with written_whole(path) as file:
            file.write((json.dumps(data, indent=1) + "\n").encode())


def main() -> None:
    """Measure, or read earlier results; print the page, and draw the plot."""
    parser = Arguments(__doc__)
    parser.add_device()
    parser.add_argument("--path", action="append", default=[], choices=("buffer", "texture"), help="repeatable")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--group", action="append", default=[], help="only shapes of this group; repeatable")
    parser.add_argument("--most", type=int, help="no more shapes than these")
    parser.add_argument("--models", action="store_true", help="whole models too, everything resident, against PyTorch's")
    parser.add_argument("--json", type=Path, help="where the numbers are kept as they come")
    parser.add_argument("--from", type=Path, dest="given", metavar="FILE", help="show this file of --json; measure nothing")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="the roofline")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    args = parser.parse_args()
    parser.check_device(args.device)
    data = json.loads(args.given.read_text()) if args.given else measure(args)
    text = markdown(data)
    print(text)
    if args.markdown:
        with written_whole(args.markdown) as file:
            file.write(text.encode())
    if args.plot:
        from benchmarks.kernels.plot import draw

        draw(data, args.plot)


if __name__ == "__main__":
    run_command(main)
