"""Cost of a byte that a kernel copies while it computes, and of one that a separate launch copies.

    python -m benchmarks.streaming.lanes [--device D] [--path P] [--seconds S] [--json FILE] [--markdown FILE] [--fresh]

For each kernel, on every memory path of a GPU (of a CPU on the first), bursts of four kinds alternate:

- launches alone;
- launches with an empty stream lane;
- launches with a lane that copies bytes;
- launches alone, and between any two a launch that copies the same bytes (`Session(lanes=False)`).

The results are medians over the bursts, in seconds by the host's clock, so that the cost of a launch counts. The number of
bytes is chosen by the time of copying them alone: a fifth of the kernel's time, all of it, three times it. The cost of a byte
is the time that it adds to the kernel alone.

Rows of `--json` for the same device and driver are not measured again. Each row is written after its measurement. After
`--seconds`, no further row begins.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.command import Arguments, run_command
from flashmem.base.errors import RunError
from flashmem.base.files import written_whole
from flashmem.base.types import MemoryPath
from flashmem.compiler.ir.graph import Graph
from flashmem.profiler.shapes import Attention, Convolution, Matmul
from flashmem.profiler.sketch import Sketch
from flashmem.profiler.timing import Stand, generated
from flashmem.program.lanes import LANE_UNIT, LaneKind, lane_kind, lane_places
from flashmem.program.tensors import Slice
from flashmem.runtime.engine.steps import Resources, Step, make_steps
from flashmem.runtime.opencl.context import PreparedLaunch
from flashmem.runtime.request.options import device_here, find_descriptor
from flashmem.runtime.streaming.interleaved import CopyStream, LayerMoves, Move

Row = dict[str, Any]
SHARES = (0.2, 1.0, 3.0)
"""Time of copying alone, over the kernel alone."""

_PLACE_BYTES, _WIDTH = 32 << 20, 2048  # of staging and destination, larger than any cache; texels of a row
_BURST, _ROUNDS, _MOST = 4e-3, 5, 200
_TURNS = 16  # places in that memory that the launches of a burst use in turn


@dataclass(frozen=True)
class Case:
    """A kernel: its class in the paper's terms, the template, and a graph whose program contains it."""

    group: str
    family: str
    name: str
    graph: Callable[[], Graph]


def _activation(op: str, *shape: int, out: tuple[int, ...] = (), operands: int = 1, **attributes: Any) -> Callable[[], Graph]:
    """One operator on activations, followed by a small product: its program has textures where a model's would."""

    def graph() -> Graph:
        g = Sketch()
        made = g.node(op, [g.input(*shape) for _ in range(operands)], out or shape, **attributes)
        return g.finish(g.node("MatMul", [made, g.weight(made.shape[-1], 8)], (*made.shape[:-1], 8)))

    return graph


CASES = (
    Case("reusable", "matmul", "product 128x768x3072", Matmul(128, 768, 3072).graph),
    Case("reusable", "matmul", "product 197x768x768", Matmul(197, 768, 768).graph),
    Case("reusable", "conv", "convolution 3x3, 128x28x28-128", Convolution(128, 28, 28, 128, (3, 3)).graph),
    Case("reusable", "conv", "convolution 1x1 /2, 256x56x56-512", Convolution(256, 56, 56, 512, (1, 1), (2, 2)).graph),
    Case("elemental", "elementwise", "sum of 128x3072", _activation("Add", 128, 3072, operands=2)),
    Case("elemental", "elementwise", "GELU of 197x3072", _activation("Gelu", 197, 3072)),
    Case("elemental", "movement", "transpose of 12x128x64", _activation(
        "Transpose", 1, 128, 12, 64, out=(1, 12, 128, 64), perm=[0, 2, 1, 3])),
    Case("elemental", "pool", "maximum 3x3 /2 of 64x112x112", _activation(
        "MaxPool", 1, 64, 112, 112, out=(1, 64, 56, 56), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])),
    Case("hierarchical", "reduce_rows", "softmax of 1536x128", _activation("Softmax", 1536, 128, axis=-1)),
    Case("hierarchical", "reduce_columns", "softmax down 768x197", _activation("Softmax", 768, 197, axis=0)),
    Case("hierarchical", "attention", "attention 12 of 197x64", Attention(12, 197, 64).graph),
)  # fmt: skip


class Bench:
    """One device; its memory for copies is allocated once for each memory path."""

    def __init__(self, device: str, paths: Sequence[MemoryPath] = ()) -> None:
        """`paths`: the memory paths to measure. Empty: all of a GPU, and the first of a CPU."""
        self.device, self.descriptor = device_here(device), find_descriptor(device)
        every = self.descriptor.memory_paths
        self.paths = tuple(paths) or (every if self.device.kind == "gpu" else every[:1])
        self.stand = Stand(self.device)
        self.queue = self.stand.context.queue()
        self._memory: dict[LaneKind, tuple[list[Slice], dict[str, Any], dict[str, Any]]] = {}

    def about(self) -> Row:
        """The device and versions of the rows."""
        return {
            "device": self.device.name,
            "kind": self.device.kind,
            "driver": f"{self.device.platform} {self.device.driver_version}",
            "descriptor": self.descriptor.name,
        }

    def rows(self, known: Sequence[Row], deadline: float) -> Iterator[Row]:
        """The missing rows, until the deadline; a case that the device refuses has the error."""
        there = {(row["name"], row["path"]) for row in known}
        for case in CASES:
            for path in self.paths:
                if (case.name, path) not in there and time.monotonic() < deadline:
                    try:
                        yield from self._rows(case, path)
                    except RunError as error:
                        yield {
                            "name": case.name,
                            "path": path,
                            "class": case.group,
                            "family": case.family,
                            "failed": str(error),
                        }

    def _rows(self, case: Case, path: MemoryPath) -> list[Row]:
        made = generated(case.graph(), self.descriptor.on_path(path))
        launch = next((each for each in made.program.launches if each.shape.family == case.family), None)
        if launch is None:
            raise RunError(f"the compiler makes no kernel {case.family} of it")
        kind = lane_kind(made.program)
        resources = self._with_room(self.stand.resources(made), kind)
        texts, options = (made.source.plain, made.source.lane), made.program.build_options
        plain, laned = (self.stand.context.build(text, options) for text in texts)
        held: list[Step] = []  # kernels do not keep their memory alive

        def launches(moves: Sequence[LayerMoves | None]) -> list[list[PreparedLaunch]]:
            program = replace(made.program, launches=(launch,) * len(moves))
            layers = {layer: each for layer, each in enumerate(moves, start=1) if each is not None}
            steps = make_steps(program, {}, layers, resources, plain, laned)
            held.extend(steps)
            return [[self.queue.prepare(c.kernel, c.global_size, c.local_size) for c in step.commands] for step in steps]

        alone = launches([None])
        empty = launches([LayerMoves(self._stream(kind, 0, 0))])
        seconds = self._settled(alone)
        large = launches([LayerMoves(None, (self._stream(kind, 3 * _PLACE_BYTES // 4, 0),))])
        both = self._settled(large)
        rate = 3 * _PLACE_BYTES / 4 / max(both - seconds, 1e-9)
        found = []
        for share in SHARES:
            nbytes = int(min(max(share * seconds * rate, 1 << 14), 2 * _PLACE_BYTES))
            turns = max(1, min(_TURNS, 2 * _PLACE_BYTES // nbytes))
            streams = [self._stream(kind, nbytes, turn) for turn in range(turns)]
            moved = sum(move.nbytes for move in streams[0].moves)
            variants = {
                "alone": alone,
                "empty": empty,
                "interleaved": launches([LayerMoves(stream) for stream in streams]),
                "separate": launches([LayerMoves(None, (stream,)) for stream in streams]),
            }
            times = self._compare(variants)
            interleaved, separate = ((times[each] - times["alone"]) / moved for each in ("interleaved", "separate"))
            found.append({
                "name": case.name, "path": path, "class": case.group, "family": case.family, "share": share,
                "kernel": launch.kernel, "bytes": moved, "seconds": times, "interleaved_ns_per_kib": 1024e9 * interleaved,
                "separate_ns_per_kib": 1024e9 * separate, "ratio": interleaved / separate if separate > 0 else None,
            })  # fmt: skip
        return found

    def _with_room(self, resources: Resources, kind: LaneKind) -> Resources:
        """The resources with staging and destinations for copies."""
        if kind not in self._memory:
            context, parts = self.stand.context, []
            staged: dict[str, Any] = {}
            homes: dict[str, Any] = {}
            for number, place in enumerate(lane_places(kind)):
                name, pitch = f"move{number}", _WIDTH * LANE_UNIT[kind]
                staged[name] = context.buffer(_PLACE_BYTES)
                if place == "buffer":
                    parts.append(Slice(name, name, 0, _PLACE_BYTES))
                    homes[name] = context.buffer(_PLACE_BYTES)
                else:
                    rows = _PLACE_BYTES // pitch
                    parts.append(Slice(name, name, 0, _PLACE_BYTES, _WIDTH, rows, pitch, place))
                    homes[name] = context.image(_WIDTH, rows, place)
            self._memory[kind] = parts, staged, homes
        _, staged, homes = self._memory[kind]
        return replace(resources, weights={**resources.weights, **homes}, staged=staged)

    def _stream(self, kind: LaneKind, nbytes: int, turn: int) -> CopyStream:
        """Copies of about `nbytes`, shared by all places except a buffer beside textures; other launches use other memory."""
        parts = [part for part in self._memory[kind][0] if kind == "buffer" or part.is_image]
        moves = []
        for part in parts:
            unit = LANE_UNIT[kind]
            count = nbytes // len(parts) // unit
            first = turn * count % max(1, _PLACE_BYTES // unit - count)
            moves.append(Move(part, first, count, part.width, part.row_pitch // unit if part.is_image else 0))
        return CopyStream(kind, tuple(moves))

    def _play(self, launches: Sequence[Sequence[PreparedLaunch]], count: int) -> float:
        """Seconds of one step in a burst of `count` steps."""
        begun = time.perf_counter()
        for number in range(count):
            self.queue.launch_all(launches[number % len(launches)])
        self.queue.finish()
        return (time.perf_counter() - begun) / count

    def _settled(self, launches: Sequence[Sequence[PreparedLaunch]]) -> float:
        """Seconds of a step, without the first ones."""
        first = min(self._play(launches, 1) for _ in range(3))
        count = max(1, min(_MOST, math.ceil(_BURST / first)))
        return statistics.median(self._play(launches, count) for _ in range(3))

    def _compare(self, variants: dict[str, list[list[PreparedLaunch]]]) -> dict[str, float]:
        """Medians of alternating bursts."""
        counts = {}
        for name, launches in variants.items():
            self._play(launches, len(launches))  # each once: some drivers compile then
            counts[name] = max(1, min(_MOST, math.ceil(_BURST / self._play(launches, 1))))
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(_ROUNDS):
            for name, launches in variants.items():
                times[name].append(self._play(launches, counts[name]))
        return {name: statistics.median(found) for name, found in times.items()}


def markdown(data: Row) -> str:
    """The page: means by class and path, then every row."""
    about, rows = data["about"], [row for row in data["rows"] if row.get("ratio")]
    lines = [
        f"{about['device']} ({about['driver']}), {data['date']}. ns a KiB: interleaved, in a launch of its own; ratio.",
        "",
    ]
    lines += ["| class | path | copy / kernel | ratio, median | least | most |", "|---|---|---|---|---|---|"]
    for key in dict.fromkeys((row["class"], row["path"], row["share"]) for row in rows):
        ratios = [row["ratio"] for row in rows if (row["class"], row["path"], row["share"]) == key]
        numbers = f"{statistics.median(ratios):.2f} | {min(ratios):.2f} | {max(ratios):.2f}"
        lines.append(f"| {key[0]} | {key[1]} | {key[2]:g} | {numbers} |")
    lines += [
        "",
        "| kernel | path | µs alone, empty lane | KiB | interleaved | separate | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        alone, empty = (1e6 * row["seconds"][each] for each in ("alone", "empty"))
        lines.append(
            f"| {row['name']} | {row['path']} | {alone:.1f}, {empty:.1f} | {row['bytes'] / 1024:.0f} | "
            f"{row['interleaved_ns_per_kib']:.1f} | {row['separate_ns_per_kib']:.1f} | {row['ratio']:.2f} |"
        )
    failed = [f"- {row['name']}, {row['path']}: {row['failed']}" for row in data["rows"] if "failed" in row]
    return "\n".join([*lines, *(["", "Failed:", "", *failed] if failed else [])]) + "\n"


def measure(args: argparse.Namespace) -> Row:
    """Run all measurements; each result is written to `--json` at once."""
    deadline = time.monotonic() + args.seconds
    bench = Bench(args.device, args.path)
    data: Row = {"about": bench.about(), "date": datetime.now(UTC).isoformat(timespec="minutes"), "rows": []}
    if args.json and args.json.is_file() and not args.fresh:
        kept = json.loads(args.json.read_text())
        if kept["about"] == data["about"]:
            data["rows"] = [row for row in kept["rows"] if "failed" not in row]
    try:
        for row in bench.rows(tuple(data["rows"]), deadline):
            data["rows"].append(row)
            if args.json:
                with written_whole(args.json) as file:
                    file.write((json.dumps(data, indent=1) + "\n").encode())
    finally:
        bench.stand.close()
    return data


def main() -> None:
    """Measure the missing rows, and print the page."""
    parser = Arguments(__doc__)
    parser.add_device()
    parser.add_argument("--path", action="append", default=[], choices=("buffer", "texture"), help="repeatable")
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--json", type=Path, help="where the rows are kept as they come")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--fresh", action="store_true", help="measure everything anew")
    args = parser.parse_args()
    parser.check_device(args.device)
    text = markdown(measure(args))
    print(text)
    if args.markdown:
        with written_whole(args.markdown) as file:
            file.write(text.encode())


if __name__ == "__main__":
    run_command(main)
