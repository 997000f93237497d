"""The program: what the device executes, as plain data.

`codegen` writes it, the bundle stores it, the runtime plays it; numpy and OpenCL have no part in it. Offsets and sizes are
bytes unless a name says otherwise. A *layer* is one kernel launch (a fused group of operators makes one,
or one for each slice of its weight); layers are numbered 1..N in execution order, as in the plan (`flashmem.planning.plan`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

MemoryPath = Literal["buffer", "texture"]
Channel = Literal["float", "half", "uint8", "uint16"]
"""What one of the four numbers of a texel is. Signed integers lie in unsigned channels, bit for bit."""

TEXEL_BYTES: dict[Channel, int] = {"float": 16, "half": 8, "uint8": 4, "uint16": 8}

OperatorClass = Literal["elemental", "reusable", "hierarchical"]
Optimize = Literal["cold", "steady"]
"""Whether kernels are chosen for the first answer, building and loading included, or for later ones."""

TableType = Literal["float32", "float16", "int8", "uint8", "int4", "uint4"]
"""What the elements of a table are that the host picks rows from. Two of 4 bits share a byte, low nibble first."""

DType = Literal["bool", "float32", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
"""Element types on the device, by numpy's names. float16, bfloat16 and float64 of a model are computed as float32 there."""

StoredType = Literal["bool", "float16", "float32", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
"""What an element is in memory: its type, or float16 for a float32 that `--precision fp16` rounds when it is stored."""

ITEMSIZE: dict[StoredType, int] = {
    "bool": 1, "float16": 2, "float32": 4, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4,
    "uint64": 8,
}  # fmt: skip
"""Bytes of one element in the device's memory."""

TENSOR_ALIGNMENT = 512
"""Arena and constant offsets: sub-buffer alignment of every known device (CL_DEVICE_MEM_BASE_ADDR_ALIGN; NVIDIA: 4096 bits)."""

SLACK = 128
"""Bytes after each tensor and constant: a vector load at the last element may run this far."""

POOL_ALIGNMENT = 4096
"""Where slices start in pools and in staging: suits sub-buffers and textures over buffers of every known device."""

DEFAULT_PAGE = 4096
"""Bytes of the pages that a weight file is laid out for where a descriptor does not say otherwise (`Program.page_bytes`)."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """An activation in the arena: `dtype` is what it is stored in. `nbytes` includes the slack that lets a vector load run past
    the last element.
    """

    name: str
    shape: tuple[int, ...]
    dtype: StoredType
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of one weight that is one texture (or one buffer): the unit the plan streams.

    `offset`, `nbytes`: its place in `weights.bin`, `offset` a multiple of the program's
    `page_bytes`. For the memory path `texture`
    it is an image of `height` rows of `width` RGBA texels of `channel` type, each row padded in the file to `row_pitch`
    bytes; `width == 0` marks a plain buffer on either path. `raw` of its bytes are the weight's own elements, the rest is
    padding.
    """

    name: str
    weight: str
    offset: int
    nbytes: int
    width: int = 0
    height: int = 0
    row_pitch: int = 0
    channel: Channel = "float"
    raw: int = 0

    @property
    def is_image(self) -> bool:
        """Whether it is a texture on the memory path `texture`."""
        return self.width > 0

    @property
    def file_bytes(self) -> int:
        """Bytes in the weight file, the padding of an image's rows included."""
        return self.row_pitch * self.height if self.is_image else self.nbytes


@dataclass(frozen=True, slots=True)
class Arg:
    """One kernel argument: a tensor, a slice, a constant (byte `offset` in the constants region), or a number."""

    kind: Literal["tensor", "slice", "constant", "int", "float"]
    value: str | int | float
    nbytes: int = 0  # of a constant


@dataclass(frozen=True, slots=True)
class KernelShape:
    """What a kernel does, beyond its arithmetic and its bytes: what a measured predictor tells kernels apart by.

    `rows` x `columns` elements are written, each from `depth` elements (1 where nothing is summed). Source elements lie in
    runs of `run` neighbours; after a run, or between elements if it is 1, the address jumps by `stride` elements. A load
    takes `vector` elements. Each written element passes `simple_ops` elementwise operators and `special_ops` transcendental
    ones. Of a contraction's variant: `tile_rows` x `tile_columns` elements of a work-item (0: not said), `stage` steps of depth
    in local memory at a time, `split` parts of the depth.
    """

    family: str = ""  # the template: matmul, conv, elementwise ...
    rows: int = 1
    columns: int = 1
    depth: int = 1
    run: int = 1
    stride: int = 1
    vector: int = 1
    simple_ops: int = 0
    special_ops: int = 0
    tile_rows: int = 0
    tile_columns: int = 0
    stage: int = 0
    split: int = 1


@dataclass(frozen=True, slots=True)
class Launch:
    """Layer ℓ: one kernel launch. `macs` and `bytes` (activations read and written) describe its cost to the planner.

    With transfer mode `interleave` the kernel named `kernel` in the *lane* source takes, after `args`, the stream lane's
    arguments (see kernels/templates/lane.cl.j2).
    """

    name: str
    kernel: str
    global_size: tuple[int, ...]
    local_size: tuple[int, ...] | None
    args: tuple[Arg, ...]
    operator_class: OperatorClass
    operators: tuple[str, ...]  # the ONNX nodes fused into it, for plans a person reads
    macs: int
    bytes: int
    shape: KernelShape = KernelShape()


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of the model, as the user sees it: ONNX name, shape and dtype; `tensor` is its device twin.

    `tensor` is None for an input that no kernel reads (it only selects table rows on the host, see `RowGather`), and for an
    output without elements. `ready` is the layer after which an output is read, since its place in the arena may be another
    tensor's from then on; None: after the last.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str  # numpy name of the ONNX type: float32, float16, int64, int32, bool ...
    tensor: str | None
    ready: int | None = None


@dataclass(frozen=True, slots=True)
class RowGather:
    """Rows of a table picked on the host by the input `indices`: only the rows asked for are ever read.

    The table lies in `weights.bin` at `offset`. `rows` x `columns` elements of `dtype`. Element (r, c) is at
    r * row_stride + c * column_stride bytes if `panel` is 1; a table shared with a matmul is packed in panels of `panel`
    rows, where it is at (r // panel) * row_stride + (r % panel) * itemsize + c * column_stride. Of 4 bits two elements share a
    byte, low nibble first, each row starts on a byte, and `column_stride` is 0. The tensor's elements are float32 or
    float16 or, of integers, int8 or uint8.
    """

    indices: str
    tensor: str
    offset: int
    rows: int
    columns: int
    row_stride: int
    column_stride: int
    dtype: TableType
    panel: int = 1


@dataclass(frozen=True)
class LaunchOrder:
    """How launches were ordered: the most bytes of activations alive at once in the order of the model and in the one taken,
    and a bound that no order is below. Each fused group counts as one launch.
    """

    given_bytes: int
    peak_bytes: int
    bound_bytes: int
    method: str

    @property
    def gap(self) -> float:
        """By what part the peak may be above the best one."""
        return self.peak_bytes / self.bound_bytes - 1 if self.bound_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Joined:
    """Slices of one weight, side by side in `weights.bin`, none of them an image: one buffer, for a launch that reads all."""

    name: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SteadyLaunch:
    """What later runs play instead of layers `first` to `last`: another kernel, one launch instead of several, or both.

    It reads what they read and writes what they write. One that stands for several layers takes the place of the last, and
    needs all its slices to be there before the first: they must be resident. `launch` may name one of `Program.joined` where
    others name a slice.
    """

    first: int
    last: int
    launch: Launch


@dataclass(frozen=True)
class Program:
    """Everything the runtime needs to execute, save the weights and the plan."""

    memory_path: MemoryPath
    precision: Literal["fp32", "fp16"]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    tensors: tuple[Tensor, ...]
    slices: tuple[Slice, ...]
    launches: tuple[Launch, ...]
    row_gathers: tuple[RowGather, ...]
    arena_bytes: int
    constants_offset: int  # in weights.bin, page aligned
    constants_bytes: int
    weights_bytes: int  # size of weights.bin
    hands_over: bool = False  # the arena is host memory, and outputs stored as the user gets them become arrays where they lie
    status: str | None = None  # the int32 tensor in which a kernel leaves its layer's number when it read a bad index
    build_options: tuple[str, ...] = ()
    order: LaunchOrder | None = None
    live_bytes: int = 0  # most bytes of activations that are needed at once; `arena_bytes` holds them
    page_bytes: int = DEFAULT_PAGE  # slices start at multiples of it, so that each can be mapped and dropped on its own
    steady: tuple[SteadyLaunch, ...] = ()  # ascending, no two of the same layer
    joined: tuple[Joined, ...] = ()

    def uses(self) -> dict[str, tuple[int, int]]:
        """First and last layer (1-based) that reads each slice."""
        return first_and_last(self.launches, "slice")

    def readable(self) -> dict[str, Slice]:
        """What launches may name as a slice: `slices`, and what is joined of them."""
        found = {part.name: part for part in self.slices}
        for joined in self.joined:
            parts = [found[name] for name in joined.parts]
            nbytes, raw = sum(part.nbytes for part in parts), sum(part.raw for part in parts)
            found[joined.name] = Slice(joined.name, parts[0].weight, parts[0].offset, nbytes, raw=raw)
        return found

    def to_json(self) -> dict[str, Any]:
        """The program as plain data, for the bundle."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Program:
        """The program that `to_json` wrote. Raises KeyError, TypeError or ValueError on anything else."""

        def each(kind: type, rows: list[dict[str, Any]]) -> tuple[Any, ...]:
            return tuple(kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for row in rows)

        made: dict[int, Any] = {}

        def shared(kind: type, row: dict[str, Any]) -> Any:
            """One object for one row: `parsed` gives equal ones once."""
            if id(row) not in made:
                made[id(row)] = kind(**row)
            return made[id(row)]

        def launch(row: dict[str, Any]) -> dict[str, Any]:
            args, shape = tuple(shared(Arg, arg) for arg in row["args"]), shared(KernelShape, row.get("shape", {}))
            return {**row, "args": args, "shape": shape}

        steady = [{**row, "launch": each(Launch, [launch(row["launch"])])[0]} for row in data.get("steady", ())]
        return cls(
            **{
                **data,
                "inputs": each(Port, data["inputs"]),
                "outputs": each(Port, data["outputs"]),
                "tensors": each(Tensor, data["tensors"]),
                "slices": each(Slice, data["slices"]),
                "launches": each(Launch, [launch(row) for row in data["launches"]]),
                "row_gathers": each(RowGather, data["row_gathers"]),
                "build_options": tuple(data["build_options"]),
                "order": LaunchOrder(**data["order"]) if data.get("order") else None,
                "steady": each(SteadyLaunch, steady),
                "joined": each(Joined, list(data.get("joined", ()))),
            }
        )


def first_and_last(launches: Iterable[Launch], kind: Literal["tensor", "slice"]) -> dict[str, tuple[int, int]]:
    """The first and the last layer, from 1, that has each tensor, or slice, among its arguments."""
    found: dict[str, tuple[int, int]] = {}
    for layer, launch in enumerate(launches, start=1):
        for arg in launch.args:
            if arg.kind == kind:
                first, _ = found.get(str(arg.value), (layer, layer))
                found[str(arg.value)] = (first, layer)
    return found


LaneKind = Channel | Literal["buffer"]
"""What a stream lane writes: textures of a channel type (and a buffer), or buffers alone."""

LANE_UNIT: dict[LaneKind, int] = {"float": 16, "half": 8, "uint8": 4, "uint16": 8, "buffer": 16}
"""Bytes of a unit that such a lane moves: a texel, or as many bytes of a buffer."""


def lane_places(kind: LaneKind) -> tuple[LaneKind, ...]:
    """What each of the moves writes that one launch can take along (kernels/templates/lane.cl.j2)."""
    return ("buffer",) * 4 if kind == "buffer" else (kind, kind, kind, "buffer")


def parsed(text: str | bytes) -> Any:
    """What JSON says, equal objects as one: a large model's launches have ten thousands of arguments, most of them equal.

    Raises:
        ValueError: not JSON.
    """
    seen: dict[Any, dict[str, Any]] = {}

    def one(row: dict[str, Any]) -> dict[str, Any]:
        try:
            return seen.setdefault((*row.items(), *map(type, row.values())), row)
        except TypeError:  # it holds others
            return row

    return json.loads(text, object_hook=one)


def lane_kind(program: Program) -> LaneKind:
    """What the stream lanes of a program's kernels write: buffers, or textures of the channel type that most bytes have."""
    totals: dict[LaneKind, int] = {}
    for part in program.slices:
        if part.is_image and program.memory_path == "texture":
            totals[part.channel] = totals.get(part.channel, 0) + part.nbytes
    return max(totals, key=lambda channel: totals[channel], default="buffer")


def fixed_bytes(program: Program) -> int:
    """What a session holds whatever the plan: activations, constants, arrays that outputs are copied to, and host scratch."""
    return program.arena_bytes + program.constants_bytes + output_bytes(program) + scratch_bytes(program)


def port_dtype(port: Port) -> DType:
    """The element type that a port is computed in on the device. Its tensor says what it is stored in.

    Raises:
        ValueError: it has none.
    """
    if port.dtype in _FLOATS:
        return "float32"
    for dtype in get_args(DType):
        if dtype == port.dtype:
            found: DType = dtype
            return found
    raise ValueError(f"port {port.name!r} has the unknown dtype {port.dtype!r}")


def panel_bytes(gather: RowGather) -> int:
    """Bytes from the first element of a panel of rows to the end of its last one: what is read at once."""
    if gather.dtype.endswith("int4"):
        return -(-gather.columns // 2)
    itemsize = {"float32": 4, "float16": 2}.get(gather.dtype, 1)
    return (gather.columns - 1) * gather.column_stride + gather.panel * itemsize


def raw_bytes(program: Program) -> int:
    """What of the weight file is elements of the model's weights; the rest pads rows of images, panels, and slices to pages.

    Resident constants count as they lie.
    """
    tables = [gather for gather in program.row_gathers if gather.panel == 1]  # the others lie in a weight's panels
    rows = {(table.offset, table.rows * table.row_stride) for table in tables}
    return program.constants_bytes + sum(part.raw for part in program.slices) + sum(nbytes for _, nbytes in rows)


def copied_outputs(program: Program) -> tuple[Port, ...]:
    """The outputs that a run copies, each to an array of its own: all that do not become arrays where they lie."""
    stored = {tensor.name: tensor.dtype for tensor in program.tensors}
    return tuple(
        port
        for port in program.outputs
        if port.tensor is not None and not (program.hands_over and stored[port.tensor] == port.dtype)
    )


def output_bytes(program: Program) -> int:
    """The arrays that outputs are copied to."""
    return sum(array_bytes(port) for port in copied_outputs(program))


def array_bytes(port: Port) -> int:
    """The array of a port, in its own type."""
    return math.prod(port.shape) * _FLOATS.get(port.dtype, ITEMSIZE[port_dtype(port)])


def scratch_bytes(program: Program) -> int:
    """The largest host array a run needs beside the user's: an input or output in another dtype, or gathered table rows."""
    tensors = {tensor.name: tensor for tensor in program.tensors}
    sizes = {tensor.name: ITEMSIZE[tensor.dtype] * math.prod(tensor.shape) for tensor in program.tensors}
    ports = [port for port in (*program.inputs, *program.outputs) if port.tensor and port.dtype != tensors[port.tensor].dtype]
    converted = [ITEMSIZE[tensors[str(port.tensor)].dtype] * math.prod(port.shape) for port in ports]
    gathered = [sizes[g.tensor] + panel_bytes(g) for g in program.row_gathers]
    return max(converted + gathered, default=0)


_FLOATS = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes of one element of a model's floating point types."""


KERNEL_MARK = "//# "
"""Begins the line that names a kernel in a source: what follows, up to the next such line, is all that the kernel needs."""


@dataclass(frozen=True)
class Source:
    """OpenCL C of a program: `plain` for map, alias and dma; `lane` is the same kernels, each with a stream lane.

    A text is one part for each kernel (`kernel_texts`), and each part a program of its own.
    """

    plain: str
    lane: str
    kernels: tuple[str, ...] = field(default=())


def kernel_texts(text: str) -> dict[str, str]:
    """The parts of a source by kernel. What stands before the first mark belongs to all of them."""
    shared, *parts = f"\n{text}".split(f"\n{KERNEL_MARK}")
    return {name.strip(): f"{shared}\n{rest}".lstrip("\n") for name, _, rest in (part.partition("\n") for part in parts)}


def kernel_source(parts: dict[str, str]) -> str:
    """The source that has these parts."""
    return "".join(f"{KERNEL_MARK}{name}\n{part}\n" for name, part in parts.items())
