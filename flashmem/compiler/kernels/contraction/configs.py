"""Kernel configs of contractions: MatMul and convolutions, plain, through local memory, or by Winograd's algorithm."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from flashmem.compiler.configs.config import (
    LOCAL,
    POINTERS,
    READ,
    SPILLED,
    CompiledCost,
    EstimatedDevice,
    KernelConfig,
)
from flashmem.compiler.configs.kinds import register, register_least, register_plain
from flashmem.compiler.configs.workload import FLOATS, Workload
from flashmem.target.descriptor import DeviceDescriptor, Feature

CONTRACTIONS = ("matmul", "conv", "matmul_dynamic")
"""Families of contractions: of packed weights, of the taps of an image, and of two activations."""

PRODUCTS = 16
"""Products of matrices of Winograd's F(2x2, 3x3): one for each number of a transformed tile."""

_FOLD = 2.0
"""Cost of adding a sum in half to one in float, in multiplications in float, two of which equal four in half: assumed."""

_VECTOR_OF_DEPTH = 1.0
"""Cost of a step of depth of a row, read four steps at once, in multiplications.

This and the next fit the counted slots of matmul on an Adreno 750 (docs/research/phone-compilers.md).
"""

_VECTOR_OF_COLUMNS = 2.0
"""Cost of a step of depth of a column, read with its neighbours, in multiplications."""

CODES = ("int4", "uint4", "int8", "uint8")
"""The types of quantised weights whose codes are read as words of 32 bits."""

FEW_ROWS = 8
"""The most rows for which a work-group reads quantised weights once: tokens that are checked together."""

_IDLE_ROWS = 1.02
"""The tallest tile with at most 2 % more rows than the fewest is chosen, because each height is another kernel."""


@dataclass(frozen=True)
class Contraction(KernelConfig):
    """A config of contractions: a work-item sums `rows` x `columns` outputs in vectors of `vector`.

    A work-group has `local_size` (down, across) work-items, times `parts`.
    """

    rows: int
    columns: int
    vector: int
    local_size: tuple[int, int] = (1, 1)
    families: tuple[str, ...] = field(default=CONTRACTIONS, kw_only=True)

    @property
    def staged_depth(self) -> int:
        """Steps of depth of both operands that are in local memory at a time; 0 if they are read where they are."""
        return 0

    @property
    def stages(self) -> int:
        """Stages in local memory: with two, the group reads the next one while it multiplies one."""
        return 1

    @property
    def parts(self) -> int:
        """Parts of a work-group that share the depth."""
        return 1

    @property
    def groups_deep(self) -> int:
        """Work-groups that share the depth; a second launch adds their sums."""
        return 1

    @property
    def half_run(self) -> int:
        """Steps of depth whose products are summed in half; 0 if all are summed in float."""
        return 0

    @property
    def needs(self) -> frozenset[Feature]:
        """Arithmetic in half, if sums are in half."""
        return frozenset({"half"} if self.half_run else ())

    @property
    def code(self) -> str:
        """See `KernelConfig.code`."""
        down, across = self.local_size
        numbers = (self.rows, self.columns, self.vector, f"{down}x{across}", self.staged_depth, self.stages - 1, self.parts)
        return "-".join(map(str, numbers)) + (f"-{self.half_run}" if self.half_run else "")

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of outputs that a work-group computes."""
        return self.rows * self.local_size[0], self.columns * self.local_size[1]

    @property
    def items(self) -> int:
        """Number of work-items of a work-group."""
        return math.prod(self.local_size) * self.parts

    @property
    def flat(self) -> bool:
        """Whether a work-group is flat, because its work-items share operands or outputs."""
        return self.staged_depth > 0

    def items_down(self, rows: int) -> int:
        """Work-items in the first direction for `rows` rows of outputs."""
        return -(-rows // self.block[0]) * self.items if self.flat else -(-rows // self.rows)

    @property
    def most_panel(self) -> int:
        """The most columns of a panel of packed weights, if a work-item reads several side by side; 0 if it reads one."""
        return 0

    @property
    def panel(self) -> int:
        """Columns of a panel of packed weights: those of a work-item, or of a work-group that shares its operands."""
        return self.block[1] if self.staged_depth else min(self.most_panel or self.columns, self.columns)

    @property
    def left_pitch(self) -> int:
        """Distance from one step of depth to the next in the left operand's stage, in elements."""
        return -(-self.block[0] // 4) * 4 + 4

    @property
    def stage_bytes(self) -> int:
        """Bytes of local memory for one stage of both operands."""
        return self.staged_depth * (self.left_pitch + self.block[1]) * (2 if self.half_run else 4)

    @property
    def local_bytes(self) -> int:
        """Bytes of local memory of a work-group: its stages, or the sums that its parts exchange, whichever is larger."""
        sums = 4 * math.prod(self.block) if self.parts > 1 else 0
        return max(self.stage_bytes * self.stages, sums)

    def fits(self, workload: Workload) -> bool:
        """Whether it can compute `workload`: sums in half need operands that are stored in half."""
        return not self.half_run or workload.storage == "float16"

    def cut(self, workload: Workload) -> Self:
        """The config for `workload`: a number of rows that wastes few, and panels no wider than needed."""
        rows, columns = self._cut(workload)
        return replace(self, rows=rows, columns=columns, vector=min(self.vector, columns, self.most_panel or columns))

    def _cut(self, workload: Workload) -> tuple[int, int]:
        """Rows and columns of `cut`."""
        least = 8 if workload.storage.endswith("int4") else 4
        most = self.columns if reads_neighbours(workload) else self.panel
        columns = max(least, min(most, _filled(workload.columns)))
        most = min(self.rows, workload.rows)
        whole = {height: -(-workload.rows // height) * height for height in range(most, most // 2, -1)}
        return next(height for height, size in whole.items() if size <= _IDLE_ROWS * min(whole.values())), columns

    def product(self, workload: Workload) -> Workload:
        """The product of matrices by which it computes `workload`."""
        return workload

    def in_float(self) -> Contraction:
        """The config for the same packed weights with all sums in float, and operands of which one is not in half."""
        return self

    @property
    def registers(self) -> int:
        """Estimated registers: sums, four steps of depth of both operands, and pointers.

        Sums in half are added to as many in float.
        """
        sums = self.rows * self.columns
        operands = 4 * (self.rows + self.columns)
        return (sums + (sums + operands) // 2 if self.half_run else sums + operands) + POINTERS

    def slots(self, device: EstimatedDevice) -> float:
        """Estimated cost of a step of depth for one output: its multiplication, and its share of the reads of operands.

        Each operand is read once for a block if the group shares it, otherwise once for each item.
        """
        down, across = self.block
        outputs = self.rows * self.columns
        reads: float = READ * (self.rows + self.columns)
        if self.staged_depth:
            reads = READ * ((self.rows + self.columns) * LOCAL + (down + across) * self.parts / self.items)
        elif device.vector_loads:
            reads = _VECTOR_OF_DEPTH * self.rows + _VECTOR_OF_COLUMNS * self.columns
        reads *= 0.5 if self.half_run else 1.0  # half operands need no conversion
        return (0.5 + _FOLD / self.half_run if self.half_run else 1.0) + reads / outputs

    def cost(self, workload: Workload, device: EstimatedDevice, compiled: CompiledCost | None = None) -> float:
        """See `KernelConfig.cost`. Work-groups run in waves that fill the device."""
        workload = self.product(workload)
        cut = self.cut(workload) if device.registers else self  # else measured devices would estimate far workloads anew
        down, across = cut.block
        outputs = cut.rows * cut.columns
        code = compiled or CompiledCost(cut.slots(device), cut.registers, device.spills(cut.registers))
        groups = workload.batches * math.ceil(workload.rows / down) * math.ceil(workload.columns / across)
        at_once = device.at_once(outputs, cut.items, code.registers)
        steps = math.ceil(groups / at_once) * math.ceil(workload.depth / cut.parts)
        return steps * math.sqrt(outputs) * code.slots * (SPILLED if code.spills else 1.0)


@register
@dataclass(frozen=True)
class PlainContraction(Contraction):
    """A contraction whose work-items read both operands where they are.

    With `half`, products of that many steps of depth are summed in half where operands are stored in half. The sums are added
    in float. The device needs cl_khr_fp16. With `panel_columns`, panels of packed weights are that wide, and an item with more
    columns reads neighbouring panels. `vector` is then no wider.
    """

    kind: ClassVar[str] = "plain"

    half: int = field(default=0, kw_only=True)
    panel_columns: int = field(default=0, kw_only=True)

    @property
    def most_panel(self) -> int:
        """See `Contraction.most_panel`."""
        return self.panel_columns

    @property
    def half_run(self) -> int:
        """See `Contraction.half_run`."""
        return self.half

    def in_float(self) -> Self:
        """See `Contraction.in_float`."""
        return replace(self, half=0)


def plain_tile(descriptor: DeviceDescriptor, family: str) -> PlainContraction:
    """The config of contractions of `family` that computes the device's plain tile."""
    tile = descriptor.tile
    return PlainContraction(
        "tile", tile.rows, tile.columns, tile.vector, tile.local_size, families=(family,), panel_columns=tile.panel
    )


@register_plain(*CONTRACTIONS, "deform_conv")
def _plain(descriptor: DeviceDescriptor, family: str) -> tuple[PlainContraction, ...]:
    return (plain_tile(descriptor, family),)


LEAST_COLUMNS = 4
"""Columns of the narrowest panels of packed weights."""


@register_least(*CONTRACTIONS, "deform_conv")
def _least(family: str) -> PlainContraction:
    """One row a work-item, and no work-group: compilers have little to get wrong."""
    return PlainContraction("least", 1, LEAST_COLUMNS, LEAST_COLUMNS, families=(family,))


@register
@dataclass(frozen=True)
class StagedContraction(Contraction):
    """A contraction whose work-groups copy a K-block of both operands, `k_block` steps of depth, into local memory at a time.

    With `two_stage` a group reads the next K-block while it multiplies one, which needs twice the local memory. It has
    `slice_k` parts. Each part multiplies its share of every K-block; their sums are added in a fixed order. `split_k` groups
    each multiply a share of the depth of a product with packed weights, and a second launch adds their sums in order.
    `half`: as in `PlainContraction`.
    """

    kind: ClassVar[str] = "staged"

    vector: int = field(default=4, init=False)
    k_block: int = field(kw_only=True)
    two_stage: bool = field(default=False, kw_only=True)
    slice_k: int = field(default=1, kw_only=True)
    split_k: int = field(default=1, kw_only=True)
    half: int = field(default=0, kw_only=True)

    @property
    def code(self) -> str:
        """See `KernelConfig.code`."""
        return super().code + split_code(self)

    @property
    def groups_deep(self) -> int:
        """See `Contraction.groups_deep`."""
        return self.split_k

    @property
    def staged_depth(self) -> int:
        """See `Contraction.staged_depth`."""
        return self.k_block

    @property
    def stages(self) -> int:
        """See `Contraction.stages`."""
        return 2 if self.two_stage else 1

    @property
    def parts(self) -> int:
        """See `Contraction.parts`."""
        return self.slice_k

    @property
    def half_run(self) -> int:
        """See `Contraction.half_run`."""
        return self.half

    def fits(self, workload: Workload) -> bool:
        """As for all contractions; and a panel contains the columns of one group of a grouped convolution.

        A wider panel would contain zeros in every group.
        """
        return super().fits(workload) and in_group(self, workload) and splits(self, workload)

    def cut(self, workload: Workload) -> Self:
        """The config itself: its work-groups are whole. Only groups of products with packed weights share the depth."""
        return self if workload.family == "matmul" else replace(self, split_k=1)

    def in_float(self) -> Self:
        """See `Contraction.in_float`."""
        return replace(self, half=0)

    def cost(self, workload: Workload, device: EstimatedDevice, compiled: CompiledCost | None = None) -> float:
        """See `KernelConfig.cost`. Groups that share the depth are like those of more columns."""
        if self.split_k == 1:
            return super().cost(workload, device, compiled)
        share = replace(workload, depth=math.ceil(workload.depth / self.split_k), columns=workload.columns * self.split_k)
        return super().cost(share, device, compiled) + joining(self, workload, device)


@register
@dataclass(frozen=True)
class SlicedContraction(Contraction):
    """A product of few rows with quantised weights: the `lanes` work-items of a work-group share the depth of one panel.

    Each multiplies `steps` steps of depth at a time, a multiple of four, for all rows. The sums are added in a fixed order, one
    row at a time. It reads the panels of the plain config with as many columns. `lanes` is a power of two.
    """

    kind: ClassVar[str] = "sliced"

    vector: int = field(default=4, init=False)
    local_size: tuple[int, int] = field(default=(1, 1), init=False)
    families: tuple[str, ...] = field(default=("matmul",), init=False)
    lanes: int = field(kw_only=True)
    steps: int = field(kw_only=True)

    @property
    def code(self) -> str:
        """See `KernelConfig.code`."""
        return f"{super().code}-{self.steps}"

    @property
    def parts(self) -> int:
        """See `Contraction.parts`."""
        return self.lanes

    @property
    def flat(self) -> bool:
        """See `Contraction.flat`."""
        return True

    @property
    def sums(self) -> int:
        """Sums of a vector of outputs after the first of two additions: about the square root of `lanes`."""
        return 1 << (self.lanes.bit_length() - 1) // 2

    @property
    def local_bytes(self) -> int:
        """Bytes of the sums of one row that the work-items exchange, and of those after the first addition."""
        return 4 * self.columns * (self.lanes + self.sums)

    def fits(self, workload: Workload) -> bool:
        """Whether the weights have codes of at most 8 bits, and there are few rows."""
        return workload.storage in CODES and workload.rows <= FEW_ROWS and workload.depth % self.steps == 0

    def cut(self, workload: Workload) -> Self:
        """See `Contraction.cut`; of the work-items, as many as have a step of the depth, at least 8."""
        most = max(8, 1 << (workload.depth // self.steps).bit_length() - 1)
        rows, columns = self._cut(workload)
        return replace(self, rows=rows, columns=columns, lanes=min(self.lanes, most))


@register
@dataclass(frozen=True)
class Winograd(Contraction):
    """Computes 3x3 convolutions of stride 1 by Winograd's F(2x2, 3x3), and nothing else. `rows` are tiles of 2 x 2 pixels.

    `channels` are transformed at a time, a multiple of `vector`. `steady`: for `--optimize steady` only. `panel_columns`: as in
    `PlainContraction`.
    """

    kind: ClassVar[str] = "winograd"

    families: tuple[str, ...] = field(default=("conv",), init=False)
    channels: int = field(kw_only=True)
    steady: bool = field(default=False, kw_only=True)
    panel_columns: int = field(default=0, kw_only=True)

    @property
    def most_panel(self) -> int:
        """See `Contraction.most_panel`."""
        return self.panel_columns

    @property
    def code(self) -> str:
        """See `KernelConfig.code`."""
        return f"{super().code}-w{self.channels}"

    def fits(self, workload: Workload) -> bool:
        """Whether it can compute `workload`: floats, 3x3 taps, stride 1 and one group; the caller knows the dilation."""
        return (workload.taps, workload.stride, workload.batches, workload.storage) == (9, 1, 1, "float32")

    def product(self, workload: Workload) -> Workload:
        """See `transformed`."""
        return transformed(workload)


@register
@dataclass(frozen=True)
class StagedWinograd(Winograd):
    """Winograd's algorithm with one part of a work-group for each product; `channels` are in local memory at a time."""

    kind: ClassVar[str] = "staged-winograd"

    vector: int = field(default=4, init=False)

    @property
    def staged_depth(self) -> int:
        """See `Contraction.staged_depth`."""
        return self.channels

    @property
    def parts(self) -> int:
        """See `Contraction.parts`."""
        return PRODUCTS

    @property
    def stage_bytes(self) -> int:
        """Bytes of local memory for one stage of both operands of all products."""
        return super().stage_bytes * PRODUCTS

    @property
    def local_bytes(self) -> int:
        """Bytes of its stage, or of the sums of all products, one vector of each item's columns at a time."""
        return max(self.stage_bytes, 4 * math.prod(self.block) * PRODUCTS * self.vector // self.columns)

    def cut(self, workload: Workload) -> Self:
        """The config itself: its work-groups are whole."""
        return self


MOST_PARTIAL = 1 << 24
"""Bytes of sums that the work-groups of one product may exchange through memory."""

_JOIN = 170.0
_JOINED = 12.0
"""Cost of the launch that adds them, and of each addition, in multiplications: fit an H200, 2026-11-27."""


def split_code(config: Contraction) -> str:
    """The end of the code of a config of which `groups_deep` work-groups share the depth."""
    return f"-x{config.groups_deep}" if config.groups_deep > 1 else ""


def splits(config: Contraction, workload: Workload) -> bool:
    """Whether `workload` has a share for each group, of two K-blocks at least, and few sums."""
    count = config.groups_deep
    sums = 4 * count * workload.rows * math.ceil(workload.columns / config.panel) * config.panel
    deep = workload.depth >= 2 * count * config.staged_depth and workload.storage not in CODES
    return count == 1 or (workload.family == "matmul" and deep and sums <= MOST_PARTIAL)


def joining(config: Contraction, workload: Workload, device: EstimatedDevice) -> float:
    """The cost of the launch that adds the sums of groups that share the depth."""
    return _JOIN + _JOINED * config.groups_deep * workload.rows * workload.columns / device.parallelism


def in_group(config: Contraction, workload: Workload) -> bool:
    """Whether a panel of `config` has columns of one group only, if `workload` is a grouped convolution."""
    grouped = workload.family == "conv" and workload.batches > 1
    return not (grouped and config.panel > _filled(workload.columns))


def reads_neighbours(workload: Workload) -> bool:
    """Whether a work-item may read neighbouring panels of the weights.

    Those of different groups see other channels. A row of quantised weights needs the registers for more sums of one panel.
    """
    if workload.family == "matmul_dynamic":
        return True
    floats = workload.storage in FLOATS
    return workload.family in CONTRACTIONS and workload.batches == 1 and (floats or workload.rows > 1)


def transformed(workload: Workload, tiles: int | None = None) -> Workload:
    """The product of Winograd's F(2x2, 3x3): at least rows / 4 tiles of 4 outputs, and 16 matrices of weights for 9 taps."""
    return replace(workload, rows=tiles or -(-workload.rows // 4), depth=workload.depth // workload.taps * PRODUCTS)


def _filled(columns: int) -> int:
    """`columns` rounded up to a power of two: the widest panel with more columns than zeros."""
    return 1 << (columns - 1).bit_length()
