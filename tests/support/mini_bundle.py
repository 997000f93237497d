"""A small bundle with hand-written kernels, for the tests of the online half: no compiler, no ONNX.

The model: rows of a table, selected by `tokens`, are averaged and added to `x`; then layers of y = tanh(W y + b), each weight
cut into slices with one launch each; outputs are y, y as float16, and the number of its positive elements, as int64.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from flashmem.base.types import DEFAULT_PAGE
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.writer import BundleWriter
from flashmem.planning.memory.layout import lay_out_pools
from flashmem.program.kernel_text import Source
from flashmem.program.lanes import LaneKind, lane_places
from flashmem.program.launches import Arg, Launch
from flashmem.program.program import Program
from flashmem.program.tensors import HostEmbeddingLookup, Port, Slice, Tensor
from flashmem.schedule.plan import OverlapPlan, PlannedWeight
from flashmem.target.descriptor import DeviceDescriptor

WIDTH = 200  # elements of the vector: 50 texels a row
LAYERS = 12
SLICES = 2  # of a weight
TOKENS, VOCABULARY, PANEL = 5, 70, 32
CHUNK = 4096
PITCH_ALIGNMENT = 1024  # bytes: 64 RGBA float texels, as Intel's CPU runtime requires


def _lane(lane: LaneKind) -> tuple[str, str, str]:
    """Parameters of a lane, a loop for each of its copies, and its bounds; written independently of the compiler's."""
    parameters, body, stated = [], "", ""
    for m, kind in enumerate(lane_places(lane)):
        words, element = (2, "uint2") if lane == "half" else (4, "uint4")
        target = f"__global {element}*" if kind == "buffer" else "__write_only image2d_t"
        numbers = ", ".join(f"int lane_{name}{m}" for name in ("first", "count", "width", "pitch"))
        parameters.append(f"__global const uint* lane_src{m}, {target} lane_dst{m}, {numbers}")
        if kind == "buffer":
            move = f"lane_dst{m}[u] = vload{words}(u, lane_src{m});"
        else:
            read = (
                f"vload_half4(at, (__global const half*)lane_src{m})"
                if kind == "half"
                else f"as_float4(vload4(at, lane_src{m}))"
            )
            move = (
                f"for (int x = 0; x < lane_width{m}; ++x) {{ const int at = u * lane_pitch{m} + x;"
                f"write_imagef(lane_dst{m}, (int2)(x, u), {read}); }}"
            )
        body += f"""
            for (int t = get_global_id(0); t < lane_count{m}; t += get_global_size(0)) {{
                int u = lane_first{m} + t; {move}
            }}"""
        place = f"[lane_u{m}]" if kind == "buffer" else f"(lane_width{m} - 1, lane_u{m})"
        stated += f"""
            //@ zero lane_first{m}, lane_count{m}
            //@ lane_u{m} < lane_first{m} + lane_count{m}
            //@ lane_src{m}[(lane_u{m} * lane_pitch{m} + lane_width{m} - 1) * {words} + {words - 1}]
            //@ lane_dst{m}{place}"""
    return ", ".join(parameters), body, stated


def _source(path: str, channel: Literal["float", "half"]) -> Source:
    def kernels(lane: LaneKind | None) -> str:
        extra, body, stated = _lane(lane) if lane else ("", "", "")
        extra = f", {extra}" if extra else ""
        if path == "texture":
            weight = "__read_only image2d_t w"
            fetch = "read_imagef(w, sampler, (int2)(k, row))"
            reached = "w(width / 4 - 1, row)"
        else:
            weight = f"__global const {channel}* w"
            fetch = f"{'vload_half4' if channel == 'half' else 'vload4'}(row * (width / 4) + k, w)"
            reached = "w[row * width + width - 1]"
        return f"""
            __constant sampler_t sampler = CLK_NORMALIZED_COORDS_FALSE | CLK_ADDRESS_CLAMP_TO_EDGE | CLK_FILTER_NEAREST;
            //# blend
            //@ items global_0
            //@ i < global_0
            //@ rows[(count - 1) * global_0 + i]
            //@ x[i]
            //@ out[i]
            {stated}
            __kernel void blend(__global const float* rows, __global const float* x, __global float* out, int count,
                              float share{extra}) {{
                {body}
                int i = get_global_id(0);
                float sum = 0.0f;
                for (int r = 0; r < count; ++r) sum += rows[r * get_global_size(0) + i];
                out[i] = x[i] + share * sum;
            }}
            //# matvec
            //@ items global_0
            //@ zero first
            //@ row < global_0
            //@ x[width - 1]
            //@ y[first + row]
            //@ {reached}
            //@ bias[first + row]
            {stated}
            __kernel void matvec(__global const float* x, __global float* y, {weight}, __global const float* bias,
                                 int width, int first{extra}) {{
                {body}
                int row = get_global_id(0);
                float4 sum = (float4)(0.0f);
                for (int k = 0; k < width / 4; ++k) sum += {fetch} * vload4(k, x);
                y[first + row] = tanh(sum.x + sum.y + sum.z + sum.w + bias[first + row]);
            }}
            //# positive
            //@ items 1
            //@ y[width - 1]
            //@ count[0]
            {stated}
            __kernel void positive(__global const float* y, __global long* count, int width{extra}) {{
                {body}
                int n = 0;
                for (int i = 0; i < width; ++i) n += y[i] > 0.0f;
                count[0] = n;
            }}
        """

    def copier(lane: LaneKind) -> str:
        parameters, body, stated = _lane(lane)
        return f"""
            //# lane_copy_{lane}
            {stated}
            __kernel void lane_copy_{lane}({parameters}) {{
                {body}
            }}"""

    own: LaneKind = "buffer" if path == "buffer" else channel
    lane = kernels(own) + copier("buffer")
    if path == "texture":
        lane += copier(channel)
    plain, lane = ("\n".join(map(str.strip, text.splitlines())) for text in (kernels(None), lane))
    return Source(plain, lane)


@dataclass(frozen=True)
class MiniModel:
    """A bundle, and its expected results."""

    path: Path
    table: NDArray[Any] = field(repr=False)
    weights: list[NDArray[Any]] = field(repr=False)
    biases: list[NDArray[np.float32]] = field(repr=False)

    def inputs(self, seed: int = 0) -> dict[str, NDArray[Any]]:
        rng = np.random.default_rng(seed)
        tokens = rng.integers(-VOCABULARY, VOCABULARY, (1, TOKENS)).astype(np.int64)
        return {"tokens": tokens, "x": rng.standard_normal((WIDTH,), np.float32)}

    def reference(self, inputs: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """The expected outputs, computed in float64: shares nothing with the kernels."""
        y = inputs["x"].astype(np.float64) + self.table.astype(np.float64)[inputs["tokens"][0]].mean(axis=0)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            y = np.tanh(weight.astype(np.float64) @ y + bias)
        return [y.astype(np.float32), y.astype(np.float16), np.array([(y > 0).sum()], np.int64)]

    def open(self) -> Bundle:
        return Bundle.open(self.path)


def write_mini_bundle(
    path: Path,
    memory_path: Literal["buffer", "texture"] = "buffer",
    *,
    channel: Literal["float", "half"] = "float",
    budget: int | None = None,
    preload: int = 2,
    distance: int = 4,
    seed: int = 7,
    warned: bool = False,
) -> MiniModel:
    """Write the bundle. `preload`: the number of slices in W; `distance`: i_w - z_w of the others; `seed`: for its weights;
    `warned`: compilers warn about its kernels.
    """
    rng = np.random.default_rng(seed)
    dtype = np.float16 if channel == "half" else np.float32
    table = rng.standard_normal((VOCABULARY, WIDTH)).astype(dtype)
    weights = [(rng.standard_normal((WIDTH, WIDTH)) * 0.1).astype(dtype) for _ in range(LAYERS)]
    biases = [rng.standard_normal(WIDTH).astype(np.float32) for _ in range(LAYERS)]
    writer = BundleWriter(path)
    with writer:
        gather = _append_table(writer, table)
        slices, places = _append_weights(writer, weights, memory_path, channel)
        stride = 1024
        constants = np.zeros((LAYERS, stride), np.uint8)
        for row, bias in zip(constants, biases, strict=True):
            row[: bias.nbytes] = bias.view(np.uint8)
        constants_offset = writer.append(constants, DEFAULT_PAGE)
        tensors = (
            Tensor("rows", (TOKENS, WIDTH), "float32", 0, 4096),
            Tensor("x", (WIDTH,), "float32", 4096, 1024),
            Tensor("ping", (WIDTH,), "float32", 5120, 1024),
            Tensor("pong", (WIDTH,), "float32", 6144, 1024),
            Tensor("count", (1,), "int64", 7168, 512),
        )
        final = "ping" if LAYERS % 2 == 0 else "pong"
        program = Program(
            memory_path=memory_path,
            precision="fp16" if channel == "half" else "fp32",
            inputs=(Port("tokens", (1, TOKENS), "int64", None), Port("x", (WIDTH,), "float32", "x")),
            outputs=(
                Port("y", (WIDTH,), "float32", final),
                Port("y16", (WIDTH,), "float16", final),
                Port("n", (1,), "int64", "count"),
            ),
            tensors=tensors,
            slices=tuple(slices),
            launches=_launches(slices, places, stride, final),
            host_embeddings=(gather,),
            arena_bytes=7680,
            constants_offset=constants_offset,
            constants_bytes=constants.nbytes,
            weights_bytes=writer.size,
            build_options=("-cl-std=CL1.2",),
        )
        plan = _plan(program, preload, distance)
        descriptor = DeviceDescriptor("mini")
        source = _source(memory_path, channel)
        if warned:
            source = Source(
                *(text.replace("float4 sum =", "char few = 300; float4 sum =") for text in (source.plain, source.lane))
            )
        writer.commit(program, source, plan, descriptor, {"model": "mini", "budget_bytes": budget})
    return MiniModel(path, table, weights, biases)


def _append_table(writer: BundleWriter, table: NDArray[Any]) -> HostEmbeddingLookup:
    """Packed in panels, like a table shared with a matmul."""
    panels = -(-VOCABULARY // PANEL)
    packed = np.zeros((panels * PANEL, WIDTH), table.dtype)
    packed[:VOCABULARY] = table
    packed = packed.reshape(panels, PANEL, WIDTH).transpose(0, 2, 1)
    offset = writer.append(packed, DEFAULT_PAGE)
    pitch = PANEL * table.itemsize
    name: Literal["float32", "float16"] = "float16" if table.itemsize == 2 else "float32"
    return HostEmbeddingLookup("tokens", "rows", offset, VOCABULARY, WIDTH, pitch * WIDTH, pitch, name, PANEL)


def _append_weights(
    writer: BundleWriter, weights: list[NDArray[Any]], path: str, channel: Literal["float", "half"]
) -> tuple[list[Slice], list[tuple[int, int, int]]]:
    """Slices, and (layer, first row, rows) of each. On the texture path rows are padded to the pitch."""
    slices, places = [], []
    for layer, weight in enumerate(weights):
        for number, rows in enumerate(np.array_split(np.arange(WIDTH), SLICES)):
            part = weight[rows]
            name = f"w{layer}.{number}"
            if path == "texture":
                pitch = -(-part[0].nbytes // PITCH_ALIGNMENT) * PITCH_ALIGNMENT
                padded = np.zeros((len(rows), pitch), np.uint8)
                padded[:, : part[0].nbytes] = part.view(np.uint8)
                offset = writer.append(padded, DEFAULT_PAGE)
                slices.append(Slice(name, f"w{layer}", offset, padded.nbytes, WIDTH // 4, len(rows), pitch, channel))
            else:
                offset = writer.append(part, DEFAULT_PAGE)
                slices.append(Slice(name, f"w{layer}", offset, part.nbytes))
            places.append((layer, int(rows[0]), len(rows)))
    return slices, places


def _launches(slices: list[Slice], places: list[tuple[int, int, int]], stride: int, final: str) -> tuple[Launch, ...]:
    def launch(name: str, kernel: str, size: int, args: tuple[Arg, ...]) -> Launch:
        return Launch(name, kernel, (size,), (1,), args, "reusable", (name,), 1000, 1000)

    def tensor(name: str) -> Arg:
        return Arg("tensor", name)

    blend_args = (tensor("rows"), tensor("x"), tensor("ping"), Arg("int", TOKENS), Arg("float", 1 / TOKENS))
    launches = [launch("blend", "blend", WIDTH, blend_args)]
    for part, (layer, first, rows) in zip(slices, places, strict=True):
        source, target = ("ping", "pong") if layer % 2 == 0 else ("pong", "ping")
        bias = Arg("constant", layer * stride, WIDTH * 4)
        args = (tensor(source), tensor(target), Arg("slice", part.name), bias, Arg("int", WIDTH), Arg("int", first))
        launches.append(launch(part.name, "matvec", rows, args))
    launches.append(launch("positive", "positive", 1, (tensor(final), tensor("count"), Arg("int", WIDTH))))
    return tuple(launches)


def _plan(program: Program, preload: int, distance: int) -> OverlapPlan:
    """Slices stream `distance` layers ahead, a chunk a layer and the rest at the end; every (12th or so) slice is in W."""
    uses = program.uses()
    every = -(-len(uses) // preload) if preload else len(uses) + 1
    planned = []
    for number, part in enumerate(program.slices):
        first, last = uses[part.name]
        chunks = -(-part.nbytes // CHUNK)
        if number % every == 0:
            planned.append(PlannedWeight(part.name, part.nbytes, chunks, first, last, True))
            continue
        start = max(1, first - distance)
        layers = range(start, first)
        ahead = [(layer, 1) for layer in layers[:-1]][: chunks - 1]
        moves = (*ahead, (first - 1, chunks - len(ahead)))
        planned.append(PlannedWeight(part.name, part.nbytes, chunks, first, last, False, start, moves))
    lambda_ = 0.9
    objective = lambda_ * sum(w.chunks for w in planned if w.preload)
    objective += (1 - lambda_) * sum(w.first_use - w.read_layer for w in planned if not w.preload)
    moved = [sum(n for w in planned for layer, n in w.moves if layer == at) for at in range(1, len(program.launches) + 1)]
    plan = OverlapPlan(
        "paper", CHUNK, sum(w.nbytes for w in planned), tuple(moved), tuple(planned),
        objective, 0.0, "problem", "greedy", 0.0, lambda_,
    )  # fmt: skip
    modes = ("map", "alias", "dma", "interleave")
    return replace(plan, layouts=lay_out_pools(program.slices, plan, modes))
