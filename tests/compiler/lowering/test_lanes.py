"""Interleaved copy streams on every device: the bytes that a launch copies arrive complete, and its own answer is unchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyopencl as cl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

from flashmem.base.errors import BundleError
from flashmem.bundle.lane_bounds import check_lanes
from flashmem.compiler.adaptive.plan_graph import plan_graph
from flashmem.compiler.configs.listed import listed_configs, with_configs
from flashmem.compiler.kernels.reduction.configs import RowConfig
from flashmem.compiler.lowering.generated import Generated
from flashmem.compiler.lowering.templates import KernelLibrary
from flashmem.compiler.options import Options
from flashmem.compiler.stages.reading import read_graph
from flashmem.program.lanes import LANE_UNIT, LaneKind, lane_kind, lane_places
from flashmem.program.tensors import Slice
from flashmem.runtime.engine.executor import Executor
from flashmem.runtime.engine.steps import Resources, make_steps
from flashmem.runtime.kernels.cache import CompiledKernels
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.streaming import interleaved as lanes
from flashmem.runtime.streaming.interleaved import COPY_GROUP, CopyStream, LayerMoves, Move
from flashmem.target.descriptor import CodeStyle, load_descriptor

DEVICES = [pytest.param(device, id=device.descriptor_name) for device in list_devices()]
KINDS: tuple[LaneKind, ...] = ("buffer", "float", "half", "uint8", "uint16")
PHONE = load_descriptor("adreno750").code
SHAPES = ((37, 11, 64), (5, 3, 64), (64, 40, 64), (1, 1, 64), (130, 2, 192))  # width, height, pitch in texels
WORDS = (1000, 1, 77, 4099, 64)


def parts_of(kind: LaneKind) -> list[Slice]:
    """Slices of `kind`, with sizes that are multiples of nothing."""
    if kind == "buffer":
        return [Slice(f"words{n}", "w", 0, 16 * words) for n, words in enumerate(WORDS)]
    return [
        Slice(f"{kind}{n}", "w", 0, pitch * height * LANE_UNIT[kind], width, height, pitch * LANE_UNIT[kind], kind)
        for n, (width, height, pitch) in enumerate(SHAPES)
    ]


def rows_of(part: Slice) -> int:
    """Number of rows that a lane copies for the slice."""
    return part.height if part.is_image else part.nbytes // 16


def move_of(part: Slice, first: int, count: int) -> Move:
    """A part of a slice as a copy."""
    return Move(part, first, count, part.width, part.row_pitch // LANE_UNIT[part.channel] if part.is_image else 0)


@st.composite
def moves(draw: st.DrawFn, kind: LaneKind, most: int = 4) -> list[Move]:
    """Up to `most` copies of slices of a program with lanes of `kind`."""
    slices = parts_of("buffer") + (parts_of(kind) if kind != "buffer" else [])
    drawn = []
    for part in draw(st.lists(st.sampled_from(slices), min_size=1, max_size=most, unique=True)):
        first = draw(st.integers(0, rows_of(part) - 1))
        drawn.append(move_of(part, first, draw(st.integers(1, rows_of(part) - first))))
    return drawn


class Bench:
    """Staging and destinations of the slices of a lane's kind on a device."""

    def __init__(self, device: Device, kind: LaneKind) -> None:
        self.context = Context(device)
        self.queue = self.context.queue()
        self.parts = parts_of("buffer") + (parts_of(kind) if kind != "buffer" else [])
        generator = np.random.default_rng(5)
        # No NaN bits: a driver may change the bits of a NaN.
        top = {"half": 0x7BFF, "float": 0x7EFF}.get(kind, 0xFFFF)
        self.data = {part.name: generator.integers(0, top, part.file_bytes // 2).astype(np.uint16) for part in self.parts}
        for part in self.parts:
            if part.is_image and kind == "float":  # nor denormal numbers, which some devices flush to zero
                self.data[part.name] = generator.standard_normal(part.file_bytes // 4).astype(np.float32).view(np.uint16)
        self.staged, self.homes = {}, {}
        for part in self.parts:
            self.staged[part.name] = self.context.buffer(part.file_bytes)
            self.queue.write(self.staged[part.name], self.data[part.name])
            if part.is_image:
                self.homes[part.name] = self.context.image(part.width, part.height, part.channel)
            else:
                self.homes[part.name] = self.context.buffer(part.nbytes)

    def clear(self) -> None:
        """Reset: nothing has been copied."""
        for part in self.parts:
            blank = np.zeros(part.file_bytes, np.uint8)
            if part.is_image:
                self.queue.write_image(
                    self.homes[part.name], blank, first_row=0, width=part.width, rows=part.height, row_pitch=part.row_pitch
                )
            else:
                self.queue.write(self.homes[part.name], blank)

    def check(self, made: Sequence[Move]) -> None:
        """Check that the copies `made` have arrived, and that nothing else has changed."""
        for part in self.parts:
            unit = LANE_UNIT[part.channel] if part.is_image else 16
            got = np.empty(rows_of(part) * max(1, part.width) * unit, np.uint8)
            if part.is_image:
                region = (part.width, part.height)
                cl.enqueue_copy(self.queue.handle, got, self.homes[part.name], origin=(0, 0), region=region)
            else:
                self.queue.read(got, self.homes[part.name])
            rows = self.data[part.name].view(np.uint8).reshape(part.height if part.is_image else 1, -1)
            whole = rows[:, : part.width * unit] if part.is_image else rows.reshape(-1, unit)
            expected = np.zeros_like(whole)
            for move in made:
                if move.part == part:
                    expected[move.first : move.first + move.count] = whole[move.first : move.first + move.count]
            np.testing.assert_array_equal(got.reshape(expected.shape), expected, err_msg=str(part))


@cache
def bench(device: Device, kind: LaneKind) -> Bench:
    return Bench(device, kind)


@cache
def copiers(device: Device, kind: LaneKind, style: CodeStyle) -> CompiledKernels:
    channels = () if kind == "buffer" else (kind,)
    return CompiledKernels(bench(device, kind).context, KernelLibrary(style).source(kind, channels).lane, ())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", [pytest.param(CodeStyle(), id="plain"), pytest.param(PHONE, id="phone")])
def test_any_number_of_moves_by_launches_of_their_own(style: CodeStyle, kind: LaneKind, device: Device) -> None:
    if kind == "half" and style is PHONE and device.platform == "rusticl":
        pytest.skip("Mesa 26.1: llvmpipe's write_imageh writes zeros, or ends the process")
    here, kernels = bench(device, kind), copiers(device, kind, style)

    @settings(max_examples=10, deadline=None, derandomize=True)
    @given(moves(kind, most=9))
    def check(drawn: list[Move]) -> None:
        here.clear()
        streams = lanes._launches(drawn)
        assert Counter(move for stream in streams for move in stream.moves) == Counter(drawn)
        assert len(streams) <= -(-sum(move.kind != "buffer" for move in drawn) // 3) + -(-len(drawn) // 4)
        for stream in streams:
            arguments = stream.arguments(lambda part: here.staged[part.name], lambda part: here.homes[part.name], np.int32)
            kernel = kernels.kernel(stream.copier, arguments)
            here.queue.launch_all([here.queue.prepare(kernel, (max(stream.copy_items, COPY_GROUP),), (COPY_GROUP,))])
        here.queue.finish()
        here.check(drawn)

    check()


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(KINDS))
def test_the_largest_moves_ride_and_each_has_its_place(data: st.DataObject, kind: LaneKind) -> None:
    drawn = data.draw(moves(kind, most=10))
    stream = lanes._taken(drawn, kind)
    if stream is None:  # buffers only, where a lane has textures to write
        assert kind != "buffer" and all(move.kind == "buffer" for move in drawn)
        return
    left = [move for move in drawn if move not in stream.moves]
    for place in {"buffer", kind}:
        interleaved = [move for move in stream.moves if move.kind == place]
        assert len(interleaved) == min(lane_places(kind).count(place), sum(move.kind == place for move in drawn))
        others = [move.nbytes for move in left if move.kind == place]
        assert not interleaved or min(move.nbytes for move in interleaved) >= max(others, default=0)
    arguments = stream.arguments(lambda part: f"from {part.name}", lambda part: f"to {part.name}", str)
    assert len(arguments) == 6 * len(lane_places(kind))
    for place, at in zip(lane_places(kind), range(0, len(arguments), 6), strict=True):
        source, target, _, count, width, pitch = arguments[at : at + 6]
        if place != "buffer":  # a texture argument is one that this launch writes, even without a copy
            assert target.removeprefix("to ") in {move.part.name for move in stream.moves if move.kind == kind}
        assert count == "0" or source.removeprefix("from ") == target.removeprefix("to ")
        assert int(width) >= 1 and int(pitch) >= 1
    units = [int(count) * int(width) for count, width in zip(arguments[3::6], arguments[4::6], strict=True)]
    assert sum(units) * LANE_UNIT[kind] == sum(move.nbytes for move in stream.moves)
    assert units[0] * LANE_UNIT[kind] == max(move.nbytes for move in stream.moves if move.kind == kind)


def network(path: Path) -> Path:
    """One launch of each kind of template: products, convolutions (one of them strided), pooling, reductions, data movement."""
    generator = np.random.default_rng(3)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array((generator.standard_normal(shape) * 0.2).astype(np.float32), name)

    nodes = [
        helper.make_node("Conv", ["x", "w0", "b0"], ["a"], kernel_shape=[1, 1], strides=[2, 2]),
        helper.make_node("Conv", ["a", "w1"], ["b"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("MaxPool", ["b"], ["c"], kernel_shape=[3, 3], strides=[2, 2]),
        helper.make_node("Reshape", ["c", "rows"], ["d"]),
        helper.make_node("Transpose", ["d"], ["e"], perm=[1, 0]),
        helper.make_node("Softmax", ["e"], ["f"], axis=1),
        helper.make_node("MatMul", ["f", "w2"], ["g"]),
        helper.make_node("ReduceMax", ["g", "first"], ["h"], keepdims=1),
        helper.make_node("MatMul", ["g", "turned"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["shares"], axis=-1),
        helper.make_node("MatMul", ["shares", "g"], ["i"]),
        helper.make_node("Transpose", ["g"], ["turned"], perm=[1, 0]),
        helper.make_node("Mul", ["i", "h"], ["y"]),
    ]
    nodes.insert(8, nodes.pop(11))
    constants = [
        weight("w0", 70, 70, 1, 1), weight("b0", 70), weight("w1", 12, 70, 3, 3), weight("w2", 12, 37),
        onnx.numpy_helper.from_array(np.array([12, 36], np.int64), "rows"),
        onnx.numpy_helper.from_array(np.array([0], np.int64), "first"),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "lanes",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 70, 26, 26))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (36, 37))],
        constants,
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)
    return path


class Runner:
    """Every launch of `network` on a device, with lanes of its program's kind."""

    def __init__(self, device: Device, generated: Generated) -> None:
        self.program = generated.program
        self.bench = bench(device, lane_kind(self.program))
        here, generator = self.bench, np.random.default_rng(1)
        self.kernels = CompiledKernels(here.context, generated.source.lane, self.program.build_options)
        self.first = generator.standard_normal(self.program.arena_bytes // 4 + 1024).astype(np.float32)
        ledger = Ledger(here.context, None)
        self.arena = ledger.buffer("arena", self.first.nbytes, "the arena")
        constants = ledger.buffer("constants", generated.constants.nbytes, "the constants")
        here.queue.write(constants, generated.constants)
        homes: dict[str, Any] = {}
        for part in self.program.slices:
            content = generator.standard_normal(-(-part.file_bytes // 16) * 4).astype(np.float32)
            if part.is_image:
                homes[part.name] = here.context.image(part.width, part.height, part.channel)
                here.queue.write_image(
                    homes[part.name], content.view(np.uint8), first_row=0, width=part.width, rows=part.height,
                    row_pitch=part.row_pitch,
                )  # fmt: skip
            else:
                homes[part.name] = here.context.buffer(content.nbytes)
                here.queue.write(homes[part.name], content)
        self.resources = Resources(ledger, self.arena, constants, homes | here.homes, here.staged)

    def run(self, stream: CopyStream) -> list[NDArray[np.uint8]]:
        """The content of the arena after each launch with `stream`; checks that its copies have arrived."""
        layers = {layer: LayerMoves(stream) for layer in range(1, len(self.program.launches) + 1)}
        steps = make_steps(self.program, {}, layers, self.resources, self.kernels, self.kernels)
        self.bench.queue.write(self.arena, self.first)
        after = []
        for step in steps:
            self.bench.clear()
            Executor(self.bench.queue, [step]).run()
            self.bench.check(stream.moves)
            after.append(np.empty(self.first.nbytes, np.uint8))
            self.bench.queue.read(after[-1], self.arena)
        return after


TILES = [
    ("texture", "nvidia", "64x64"), ("buffer", "generic-cpu", ""), ("texture", "adreno750", ""), ("buffer", "mali-g710", ""),
    ("texture", "mali-g710", ""),
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("path", "tiles", "config"), TILES)
def test_whatever_rides_arrives_and_changes_no_bit(path: str, tiles: str, config: str, device: Device, tmp_path: Path) -> None:
    descriptor = replace(load_descriptor(tiles).on_path(path), only=config, capacity_model="", tuned="")
    if descriptor.kind == "gpu":  # rows are then joined by shuffles, if this device has them
        shuffled = RowConfig("rows", 4, 64, subgroups=True)
        descriptor = with_configs(descriptor, [*listed_configs(descriptor), shuffled])
    options = Options(descriptor, "interleave")
    generated, _ = plan_graph(read_graph(network(tmp_path / "m.onnx"), options), options)
    families = {launch.shape.family for launch in generated.program.launches}
    assert {"matmul", "conv", "pool", "movement", "reduce_rows", "reduce_columns", "attention", "elementwise"} <= families
    assert ("FM_SHUFFLE(" in generated.source.lane) == (descriptor.kind == "gpu")
    if config:
        assert any(launch.shape.k_block for launch in generated.program.launches)
    kind = lane_kind(generated.program)
    runner = Runner(device, generated)
    least = CopyStream(kind, (move_of(parts_of(kind)[0], 0, 1),))
    alone = runner.run(least)

    @settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(moves(kind, most=9))
    def check(drawn: list[Move]) -> None:
        stream = lanes._taken(drawn, kind) or least
        for layer, (got, expected) in enumerate(zip(runner.run(stream), alone, strict=True)):
            np.testing.assert_array_equal(got, expected, err_msg=generated.program.launches[layer].kernel)

    check()


def test_a_lane_that_reaches_further_than_it_says_is_refused(tmp_path: Path) -> None:
    options = Options(load_descriptor("adreno750"), "interleave")
    generated, _ = plan_graph(read_graph(network(tmp_path / "m.onnx"), options), options)
    program, text = generated.program, generated.source.lane
    check_lanes(program, text)
    for old, new, message in (
        ("lane_src1[(lane_row1 * lane_pitch1 + lane_x1) * 4 + 3]",
         "lane_src1[(lane_row1 * lane_pitch1 + lane_x1) * 5]", "leaves the staging of slice"),
        ("lane_dst0(lane_x0, lane_row0)", "lane_dst0(lane_x0, lane_row0 + 1)", "leaves the home of slice"),
        ("//@ lane_dst2(lane_x2, lane_row2)\n", "", "does not state what its stream lane touches"),
        ("(lane_row0 * lane_pitch0", "(lane_row0 * other", "states no bounds of lane_dst0, lane_src0"),
        ("const int lane_first1, const int lane_count1", "const int lane_count1, const int lane_first1",
         "does not take the arguments of a stream lane"),
    ):  # fmt: skip
        assert old in text
        with pytest.raises(BundleError, match=f"{message}.*; compile the model again$"):
            check_lanes(program, text.replace(old, new))


def test_every_lane_reads_before_the_work_and_stores_after_it(tmp_path: Path) -> None:
    """In the text of each kernel: a read, then the computation, then a store; a loop for the rest; no return before that."""
    options = Options(load_descriptor("nvidia"), "interleave")
    generated, _ = plan_graph(read_graph(network(tmp_path / "m.onnx"), options), options)
    for kernel in generated.source.kernels:
        text = generated.source.lane.split(f"void {kernel}(")[1].split("\n}\n")[0]
        assert text.index("LANE_BEGIN") < text.index("LANE_FETCH") < text.index("LANE_STORE") < text.index("LANE_DRAIN"), kernel
        between = text[text.index("LANE_FETCH") : text.index("LANE_STORE")]
        assert between.count("\n") > 2, kernel
        assert "return" not in text[: text.index("LANE_DRAIN")], kernel


def test_a_lane_where_registers_are_few_copies_after_the_work(tmp_path: Path) -> None:
    """On Mali no variable of a lane lives while a kernel computes."""
    options = Options(load_descriptor("mali-g710"), "interleave")
    generated, _ = plan_graph(read_graph(network(tmp_path / "m.onnx"), options), options)
    for kernel in generated.source.kernels:
        lines = [line.strip() for line in generated.source.lane.split(f"void {kernel}(")[1].split("\n}\n")[0].splitlines()]
        assert lines[-1] == "LANE_DRAIN", kernel
        assert sum("LANE_" in line for line in lines) == 1, kernel
