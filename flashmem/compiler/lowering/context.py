"""Lowering context: the tensors, constants, weight slices and launches of one program while it is generated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import UserError
from flashmem.base.types import ITEMSIZE, SLACK, TENSOR_ALIGNMENT, MemoryPath, StoredType
from flashmem.compiler.configs.workload import Workload
from flashmem.compiler.ir.broadcast import row_part
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.ir.graph import Node, Value
from flashmem.compiler.ir.limits import ELEMENTS
from flashmem.compiler.ir.view_nodes import unreshaped
from flashmem.compiler.kernels.contraction.configs import Contraction
from flashmem.compiler.lowering.pointwise import PointwiseBody
from flashmem.compiler.lowering.templates import KernelLibrary
from flashmem.compiler.memory.buffers import BufferAssignment, BufferRange
from flashmem.compiler.memory.constants import RESIDENT_CONSTANT_BYTES, nbytes_of
from flashmem.compiler.operators import REGISTRY, is_elementwise
from flashmem.compiler.operators.vector import STORED, Vector
from flashmem.compiler.selection.selector import KernelSelector
from flashmem.compiler.weights.packing import PackedSlice, Packing
from flashmem.compiler.weights.packing_list import PackingList, Pieces
from flashmem.compiler.weights.sharing import NOTHING_STORED, PackedWeight, Placements, StoredWeights
from flashmem.compiler.weights.slicing import MOST_BYTES, Slicing
from flashmem.program.launches import Arg, KernelShape, Launch
from flashmem.program.tensors import Slice
from flashmem.target.descriptor import DeviceDescriptor

WORK_GROUP = 64
"""Work-items of a work-group for kernels without a tile."""


Cuts = Mapping[tuple[Value, Packing], Sequence[PackedSlice]]
"""The slices of packed weights, by weight and packing."""


@dataclass(frozen=True)
class PackedBefore:
    """The slices of weights that another program of the same graph has packed.

    `joined`: one launch reads contiguous slices. `kept`: only configs that read these forms are chosen.
    """

    cuts: Cuts = field(default_factory=dict)
    joined: bool = True
    kept: bool = False

    def forms(self, weight: Value) -> frozenset[tuple[int, int]]:
        """Columns of a panel and depth of the packed forms of `weight`, if these are kept."""
        if not self.kept:
            return frozenset()
        return frozenset((packing.panel, packing.depth) for value, packing in self.cuts if value is weight)


MOST_OFFSET = 1 << 32
"""Offsets in bytes are below this number in kernels with aligned vector loads: they have 32 bits."""


def joinable(parts: Sequence[PackedSlice], descriptor: DeviceDescriptor) -> list[PackedSlice]:
    """Join slices for a single launch into one slice where that is possible.

    They must follow one another in the file without gaps, as plain buffers, and their sum may not exceed the largest slice.
    """
    total = sum(part.nbytes for part in parts)
    raw = sum(part.raw for part in parts)
    gaps = any(part.nbytes % descriptor.page_bytes for part in parts[:-1])
    if gaps or any(part.width for part in parts) or total > min(MOST_BYTES, descriptor.max_alloc_bytes):
        return list(parts)
    return [PackedSlice(parts[0].first_panel, sum(part.panels for part in parts), total, raw)]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor: its shape, the type of its elements in memory, and its place in a buffer."""

    shape: tuple[int, ...]
    dtype: StoredType
    place: BufferRange

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return ITEMSIZE[self.dtype] * math.prod(self.shape)


@dataclass
class LoweringContext:
    """A program under construction, to which lowerings add. Values with the same place and size in memory share a tensor.

    `half`: float weights are packed in half. `tf32`: products of floats may round their operands to TF32. `earlier`: weights
    that programs for other shapes have placed in the file. `before`: those of another program for these shapes.
    """

    descriptor: DeviceDescriptor
    memory_path: MemoryPath
    half: bool
    tf32: bool
    slicing: Slicing
    kernels: KernelLibrary
    selector: KernelSelector
    buffers: BufferAssignment
    weights: PackingList
    earlier: StoredWeights = NOTHING_STORED
    placements: Placements = field(default_factory=Placements)
    launches: list[Launch] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    constants: bytearray = field(default_factory=bytearray)
    packed: dict[tuple[Value, Packing], list[tuple[str, PackedSlice]]] = field(default_factory=dict)
    configs: dict[tuple[Value, Workload, bool], Contraction] = field(default_factory=dict)
    before: PackedBefore = field(default_factory=PackedBefore)
    status_value: Value | None = None
    _names: dict[tuple[BufferRange, int], str] = field(default_factory=dict)
    _slice_names: set[str] = field(default_factory=set)
    _asked: set[Value] = field(default_factory=set)
    _placed: dict[Value, Arg] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.constants += self.earlier.constants
        self.placements.small |= self.earlier.small

    # -- memory

    def storage(self, value: Value) -> StoredType:
        """The type of the elements of a tensor or constant in memory."""
        return self.buffers.storage(value)

    def stored(self, value: Value) -> str:
        """The type in OpenCL C of an element of `value` in memory."""
        return STORED[self.storage(value)]

    def copied(self, source: Value, target: Value) -> tuple[str, str]:
        """The types in OpenCL C of both sides of a copy: ushort where both are half, so that bits are copied unchanged."""
        both = self.stored(source), self.stored(target)
        return ("ushort", "ushort") if both == ("half", "half") else both

    def nbytes(self, value: Value) -> int:
        """Bytes of the elements of `value` in memory."""
        return ITEMSIZE[self.storage(value)] * value.size

    def tensor(self, value: Value) -> Arg:
        """The tensor of an activation.

        Raises:
            UserError: it has more elements than kernels can count. The model's own tensors were checked before.
        """
        key = self.buffers.of(value), self.nbytes(value)
        if key not in self._names:
            if value.size > ELEMENTS:
                raise UserError(
                    f"{value.name!r}, which a part of the model is computed by, has {value.size} elements, but at most "
                    f"{ELEMENTS} are supported; make its inputs smaller"
                )
            source = unreshaped(value)
            name = source.name if source.name not in self.tensors else f"{source.name}#{len(self.tensors)}"
            self._names[key] = name
            self.tensors[name] = StoredTensor(source.shape, self.storage(value), key[0])
        self._asked.add(self.buffers.aliases.base(value))
        return Arg("tensor", self._names[key])

    def known(self, value: Value) -> str | None:
        """The name of the tensor of `value` if a launch uses it or a range of it, else None."""
        return str(self.tensor(value).value) if self.buffers.aliases.base(value) in self._asked else None

    def operand(self, value: Value) -> Arg:
        """The argument for a tensor or a constant, which a kernel reads in row-major order."""
        assert row_part(value) is None, f"{value.name} is read as a whole, but is a part of rows"
        base = self.buffers.aliases.base(value)
        return self.tensor(value) if base.constant is None else self.constant(base)

    def constant(self, value: Value) -> Arg:
        """A constant in row-major order: resident if it is small, else a separate slice."""
        if value not in self._placed:
            assert value.constant is not None
            read = value.constant.array
            dtype = np.dtype(value.dtype)
            nbytes = nbytes_of(value)
            self._placed[value] = self.data(value.name, nbytes, lambda: np.ascontiguousarray(read(), dtype))
        return self._placed[value]

    def data(self, name: str, nbytes: int, make: Callable[[], NDArray[Any]]) -> Arg:
        """The unpacked array of `nbytes` bytes that `make` returns. Small arrays are resident; equal ones are stored once."""
        if nbytes <= RESIDENT_CONSTANT_BYTES:
            content = make().tobytes()
            small = self.placements.small
            if content not in small:
                offset = len(self.constants)
                self.constants += content + bytes(SLACK)
                self.constants += bytes(-len(self.constants) % TENSOR_ALIGNMENT)
                small[content] = Arg("constant", offset, len(content) + SLACK)
            return small[content]
        size = nbytes + SLACK
        part = self.earlier.plain_as(size, make)
        if part is None:
            [offset] = self.weights.place(name, [size], lambda: [np.pad(make().reshape(-1).view(np.uint8), (0, SLACK))])
            part = Slice(self.free_name(name), name, offset, size, raw=nbytes)
        self._read_slices([part])
        self.placements.plain.append((part, make))
        return Arg("slice", part.name)

    def _read_slices(self, slices: Sequence[Slice]) -> None:
        """Add slices to the program, except those it already has under another name of the weight."""
        self.slices += [part for part in slices if part.name not in self._slice_names]
        self._slice_names |= {part.name for part in slices}

    def free_name(self, name: str, form: str = "{}") -> str:
        """`name`, or a similar name, for which no slice of the model's programs has the name `form.format(name)`."""
        free = name
        number = len(self.packed)
        while form.format(free) in self._slice_names or form.format(free) in self.earlier.names:
            free = f"{name}#{number}"
            number = number + 1
        return free

    def parts(self, node: Node, packing: Packing, row_items: int) -> list[PackedSlice]:
        """The slices of the packed weights of `node`.

        They are those in the file, or the best ones for a first launch with `row_items` work-items for each panel.
        """
        weight = node.input(1)
        if (weight, packing) in self.packed:
            return [part for _, part in self.packed[weight, packing]]
        if (weight, packing) in self.before.cuts:
            parts = self.before.cuts[weight, packing]
            return joinable(parts, self.descriptor) if self.before.joined else list(parts)
        found = self.earlier.packed_as(node, packing)
        return self.slicing.slices(packing, row_items) if found is None else list(found.parts)

    def place_packed(
        self, node: Node, packing: Packing, parts: Sequence[PackedSlice], pieces: Pieces
    ) -> list[tuple[str, PackedSlice]]:
        """Place the packed weights of `node`, or their scales, once, and return the named slices. `pieces` makes the data."""
        weight = node.input(1)
        key = (weight, packing)
        if key not in self.packed:
            found = self.earlier.packed_as(node, packing)
            if found is None or found.parts != tuple(parts):
                name = self.free_name(weight.name, "{}[0]")
                offsets = self.weights.place(weight.name, [part.nbytes for part in parts], pieces)
                slices = tuple(
                    Slice(
                        f"{name}[{i}]", weight.name, offset, part.nbytes, part.width, part.height, part.row_pitch,
                        packing.channel, part.raw,
                    )
                    for i, (part, offset) in enumerate(zip(parts, offsets, strict=True))
                )  # fmt: skip
                found = PackedWeight(node, packing, slices, tuple(parts))
            self._read_slices(found.slices)
            self.placements.packed.append(found)
            self.packed[key] = [(part.name, each) for part, each in zip(found.slices, found.parts, strict=True)]
        return self.packed[key]

    def zeros(self, count: int) -> Arg:
        """A resident array of `count` zeros."""
        return self.data("zeros", 4 * count, lambda: np.zeros(count, np.float32))

    def status(self) -> Arg:
        """The tensor to which a kernel writes the number of its launch when it reads an index out of range."""
        if self.status_value is None:
            self.status_value = Value("status", (1,), "int32")
        return self.tensor(self.status_value)

    # -- launches

    def launch(
        self,
        group: FusionGroup,
        kernel: str,
        args: Sequence[Arg | int],
        items: Sequence[int],
        local: Sequence[int],
        shape: KernelShape,
        *,
        macs: int = 0,
        nbytes: int = 0,
        part: str = "",
        others: Sequence[FusionGroup] = (),
    ) -> None:
        """Append one launch: `items` work-items in each direction, rounded up to whole work-groups.

        `others`: groups that it computes too.
        """
        finishing = [node for node in group.nodes if is_elementwise(node)]
        special = sum(REGISTRY[node.op].special for node in finishing)
        family = kernel.rsplit("_", 1)[0]
        self.launches.append(
            Launch(
                name=(group.main.name or group.output.name) + part,
                kernel=kernel,
                global_size=tuple(-(-n // size) * size for n, size in zip(items, local, strict=True)),
                local_size=tuple(local),
                args=tuple(Arg("int", arg) if isinstance(arg, int) else arg for arg in args),
                operator_class=REGISTRY[group.main.op].operator_class,
                operators=tuple(node.name for each in (group, *others) for node in each.nodes),
                macs=macs,
                bytes=nbytes or sum(self.nbytes(v) for v in (*group.main.inputs, group.output) if v is not None),
                shape=replace(shape, family=shape.family or family, simple_ops=len(finishing) - special, special_ops=special),
            )
        )

    def attributes(self, local: Sequence[int]) -> str:
        """The attribute that fixes a kernel's work-group size, so that the driver compiles it once, for that size."""
        sizes = [*local, 1, 1][:3]
        return f"__attribute__((reqd_work_group_size({sizes[0]}, {sizes[1]}, {sizes[2]})))"

    def work_group(self, items: Sequence[int]) -> tuple[int, ...]:
        """A work-group of WORK_GROUP items: the widest of a few shapes that leaves few idle. Few shapes mean few kernels."""
        if len(items) == 1:
            return (WORK_GROUP,)
        columns, rows, *others = items
        whole = {
            (width, WORK_GROUP // width): -(-columns // width) * -(-rows * width // WORK_GROUP) * WORK_GROUP
            for width in (64, 16, 4, 1)
        }
        shape = next(shape for shape, size in whole.items() if size <= 1.7 * min(whole.values()))
        return (*shape, *(1 for _ in others))

    def vector_for(self, columns: int) -> int:
        """The widest vector that a row of `columns` fills at least once."""
        return min(self.descriptor.tile.vector, 1 << (columns.bit_length() - 1))

    def vector_dividing(self, columns: int) -> int:
        """The widest vector of the device that divides `columns`."""
        return min(self.descriptor.tile.vector, columns & -columns)

    def epilogue(self, group: FusionGroup, vector: int) -> PointwiseBody:
        """The pointwise body of the epilogue of `group`; its seed is the main operator's output."""
        seed = group.main.outputs[0]
        columns = REGISTRY[group.main.op].columns
        return PointwiseBody(
            tuple(group.epilogue),
            seed,
            seed.shape,
            columns(group.main) if columns else len(seed.shape),
            vector,
            self.storage,
            overwritten=self.buffers.overwritten.get(group.main),
        )

    def epilogue_values(self, body: PointwiseBody, seed: str = "v") -> dict[str, Any]:
        """Template variables of a pointwise body.

        They are its function, its parameters, the call that finishes `seed`, and the operand that the kernel overwrites, or "".
        """
        overwritten = [i for i, operand in enumerate(body.operands) if operand.value is body.overwritten]
        over = f"e{overwritten[0]}" if overwritten else ""
        if not body.nodes:
            return {"epilogue": "", "operands": "", "finish": "", "over": over}
        names = ([seed] if body.seed is not None else []) + [*body.places(), *body.names()]
        parameters = "".join(f", {parameter}" for parameter in body.parameters())
        return {
            "over": over,
            "epilogue": body.function("KERNEL_NAME_epilogue"),
            "operands": parameters,
            "finish": f"KERNEL_NAME_epilogue({', '.join(names)})",
        }

    def prologue(self, group: FusionGroup, split: int, vector: int, epilogue: PointwiseBody) -> PointwiseBody:
        """The pointwise body of the prologue of `group`; columns are the dimensions from `split` on.

        Its operands follow those of `epilogue` among the kernel's parameters.
        """
        behind = len(epilogue.operands), len(epilogue.numbers)
        domain = group.main.input(0).shape
        return PointwiseBody(tuple(group.prologue), None, domain, split, vector, self.storage, behind=behind)

    def vectors(self, vector: int) -> dict[str, Any]:
        """Template variables for the types of a vector of `vector` elements."""
        kinds = Vector(vector)
        return {"vector": vector, "vec": kinds.named("float"), "ivec": kinds.named("int")}

    def operand_args(self, body: PointwiseBody) -> list[Arg]:
        """The arguments of a pointwise body's operands and of its numbers, in order."""
        operands = []
        for value in (operand.value for operand in body.operands):
            part = row_part(value)
            operands.append(self.operand(value if part is None else part[0]))
        return operands + [Arg("int", number) for number in body.numbers]
