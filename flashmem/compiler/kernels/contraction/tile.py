"""Contraction tiles: the variable `t` of the templates of contractions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from flashmem.base.types import DType
from flashmem.compiler.ir.blocks.format import BlockFormat
from flashmem.compiler.kernels.contraction.configs import Contraction, PlainContraction, SlicedContraction, Winograd
from flashmem.compiler.kernels.contraction.quantisation import QuantisationParameters
from flashmem.compiler.kernels.contraction.tensor_cores import TensorContraction
from flashmem.compiler.operators.vector import STORED, Vector
from flashmem.program.launches import KernelShape

_ELEMENT = {"float32": "float", "float16": "half", "bfloat16": "ushort", "int4": "uchar", "uint4": "uchar"}
"""OpenCL C types of packed elements that differ from those of tensors; two integers of 4 bits are one element."""


@dataclass(frozen=True)
class Operands:
    """What a contraction multiplies: the types of its operands, sums and results, and the zero points and scales.

    `weights`: the type of packed weights. `scalar`: of sums; `activation`: of the left operand in memory; `stored`: of results
    in memory. `block_depth`: steps of depth that share a zero point and a scale; 0 if all of them do. `dots`: the type of the
    left operand's bytes, if words of both operands are multiplied by dot products (`dot_products`). `format`: the kind of
    ggml's blocks that weights are in, whose scales and minima are in their heads.
    """

    weights: str = "float32"
    scalar: str = "float"
    activation: str = "float"
    stored: str = "float"
    zero: QuantisationParameters | None = None
    scale: QuantisationParameters | None = None
    weight_zero: QuantisationParameters | None = None
    weight_scale: QuantisationParameters | None = None
    weight_minimum: QuantisationParameters | None = None
    block_depth: int = 0
    dots: str = ""
    format: BlockFormat | None = None

    @property
    def floats(self) -> bool:
        """Whether the sums and the left operand are floats that the kernel does not dequantise."""
        return self.scalar == "float" and self.activation in ("float", "half") and self.zero is self.scale is None

    @property
    def element(self) -> str:
        """The type of a packed weight, or of a word of four."""
        if self.dots:
            return "uint"
        return _ELEMENT.get(self.weights) or STORED[cast(DType, self.weights)]

    @property
    def nibbles(self) -> str:
        """The type of weights of 4 bits; empty for others."""
        return self.weights if self.weights.endswith("int4") else ""

    @property
    def above(self) -> int:
        """How much codes are too large as kernels read them, unsigned, besides their zero points."""
        return self.format.offset if self.format else 8 if self.nibbles == "int4" else 0

    @property
    def integers(self) -> bool:
        """Whether weights are integers that are widened to int when they are read."""
        return bool(self.nibbles) or (self.element in ("char", "uchar", "short", "ushort") and not self.bfloat)

    @property
    def bfloat(self) -> bool:
        """Whether weights are the upper halves of floats."""
        return self.weights == "bfloat16"

    @property
    def subtracts_rows(self) -> bool:
        """Whether dot products need the sum of a row: the packed weights, which are signed, have a zero point."""
        return bool(self.dots) and (self.weight_zero is not None or self.weights == "uint8")


@dataclass(frozen=True)
class MainLoop:
    """How the main loop reads its operands and sums their products.

    `depth_vector`: steps of depth of the left operand that a plain config reads by one load; a row has a multiple of them.
    `strands`: products with quantised weights are summed unscaled, in so many sums in turn; 0: weights are dequantised first.
    `words`: such weights of 4 bits are read so many words at a time. `pieces`: numbers of bfloat16 whose sum is an element of
    the left operand, if tensor cores multiply quantised weights. `shared_epilogue`: one copy of the epilogue finishes all sums,
    for slow compilers and processors whose stack is in cache.
    """

    depth_vector: int = 1
    strands: int = 0
    words: int = 0
    pieces: int = 0
    shared_epilogue: bool = False


@dataclass(frozen=True)
class Layout:
    """Where operands and results are in memory.

    `panel`: columns of a panel of packed weights, if a group's block spans several; 0: those of the config. `texture`: weights
    are images; `folded`: the image is folded. `head_bytes`: bytes of the zero points, scales and minima before the codes of
    each block of a panel; 0 if they are operands of their own. `whole`: a stage never passes the end of the depth, nor of the
    channels of a tap; of unscaled sums: neither does a step. `aligned`: rows of the left operand start at a multiple of 16
    bytes; `aligned_columns`: the same for the right one. `scattered`: the result is stored with columns first.
    """

    panel: int = 0
    texture: bool = False
    folded: bool = False
    head_bytes: int = 0
    whole: bool = False
    aligned: bool = False
    aligned_columns: bool = False
    scattered: bool = False


@dataclass(frozen=True)
class ContractionTile:
    """A contraction as the templates write it (`t`): a config cut to it, its operands, their places, and the main loop."""

    config: Contraction
    operands: Operands = Operands()
    layout: Layout = Layout()
    loop: MainLoop = MainLoop()

    @property
    def rows(self) -> int:
        """Rows of a work-item's outputs."""
        return self.config.rows

    @property
    def columns(self) -> int:
        """Columns of a work-item's outputs."""
        return self.config.columns

    @property
    def vector(self) -> int:
        """Columns of a vector of sums."""
        return self.config.vector

    @property
    def half(self) -> int:
        """Steps of depth whose products are summed in half, or 0."""
        return self.config.half_run

    @property
    def k_block(self) -> int:
        """Steps of depth of both operands in local memory at a time, or 0."""
        return self.config.staged_depth

    @property
    def two_stage(self) -> bool:
        """Whether the next K-block is loaded while one is multiplied."""
        return self.config.stages > 1

    @property
    def slice_k(self) -> int:
        """Parts of a work-group that share the depth."""
        return self.config.parts

    @property
    def split_k(self) -> int:
        """Work-groups that share the depth."""
        return self.config.groups_deep

    @property
    def sliced(self) -> int:
        """Work-items of a group that share the depth of a panel, or 0."""
        return self.config.lanes if isinstance(self.config, SlicedContraction) else 0

    @property
    def steps(self) -> int:
        """Steps of depth that each of them multiplies at a time, or 1."""
        return self.config.steps if isinstance(self.config, SlicedContraction) else 1

    @property
    def tensor(self) -> TensorContraction | None:
        """The config, if tensor cores multiply."""
        return self.config if isinstance(self.config, TensorContraction) else None

    @property
    def flat(self) -> bool:
        """Whether a work-group is flat, because its work-items share operands or outputs."""
        return self.config.flat

    @property
    def winograd(self) -> int:
        """Channels that Winograd's algorithm transforms at a time, or 0."""
        return self.config.channels if isinstance(self.config, Winograd) else 0

    @property
    def items(self) -> int:
        """Work-items of a work-group."""
        return self.config.items

    @property
    def left_pitch(self) -> int:
        """Distance from one step of depth to the next in the left operand's stage, in elements."""
        return self.config.left_pitch

    @property
    def stage_bytes(self) -> int:
        """Bytes of local memory for one stage of both operands."""
        return self.config.stage_bytes + self.k_block * 4 * (self.right_pitch - self.block_columns)

    @property
    def local_bytes(self) -> int:
        """Bytes of local memory of a work-group."""
        return max(self.config.local_bytes, self.stage_bytes * self.config.stages)

    @property
    def vectors(self) -> int:
        """Number of vectors across a work-item's outputs."""
        return self.columns // self.vector

    @property
    def vec(self) -> str:
        """The type of a vector of sums."""
        return self.vec_of(self.operands.scalar)

    def vec_of(self, scalar: str) -> str:
        """The type of a vector of `scalar`, with as many elements."""
        return Vector(self.vector).named(scalar)

    @property
    def panel(self) -> int:
        """Columns of a panel of packed weights."""
        return self.layout.panel or self.config.panel

    @property
    def panels(self) -> int:
        """Panels of packed weights side by side that a work-item reads, or a group that shares its operands."""
        return (self.block_columns if self.k_block else self.columns) // self.panel

    @property
    def panel_elements(self) -> int:
        """Elements of a row of a panel."""
        return self.panel // 2 if self.operands.nibbles else self.panel

    @property
    def panel_texels(self) -> int:
        """Texels of a row of a panel."""
        return self.panel_elements // 4

    def row_offset(self, i: int) -> int:
        """Distance in rows from a work-item's first row to its i-th."""
        if self.tensor:
            return i * self.tensor.between[0]
        return i % self.row_run + i // self.row_run * self.row_run * self.down if self.k_block else i

    def column_offset(self, j: int) -> int:
        """Distance in columns from a work-item's first column to the first of its j-th vector."""
        if self.tensor:
            return j * self.tensor.between[1]
        return j * self.vector * (self.across if self.k_block else 1)

    def row_items(self, rows: str) -> str:
        """Work-items in the first direction, as a C expression."""
        if not self.flat:
            return f"({rows} + {self.rows - 1}) / {self.rows}"
        return f"({rows} + {self.block_rows - 1}) / {self.block_rows} * {self.items}"

    def panel_items(self, panels: str) -> str:
        """Work-items in the second direction, as a C expression."""
        return panels if self.panels == 1 else f"({panels} + {self.panels - 1}) / {self.panels}"

    def joined(self) -> ContractionTile:
        """The tile of the launch that adds the sums of groups that share the depth: four outputs of a row at a time."""
        return ContractionTile(
            PlainContraction(self.config.name, 1, 4, 4), self.operands, replace(self.layout, texture=False, panel=0), self.loop
        )

    def launched(self, rows: int, panels: int) -> tuple[int, int]:
        """Work-items in both directions."""
        return self.config.items_down(rows), -(-panels // self.panels)

    def described(self, shape: KernelShape) -> KernelShape:
        """`shape` with the numbers of this config."""
        return replace(
            shape,
            vector=self.vector,
            tile_rows=self.rows,
            tile_columns=self.columns,
            k_block=self.k_block,
            slice_k=self.slice_k,
        )

    @property
    def group(self) -> tuple[int, int]:
        """The work-group in both directions."""
        return (self.items, 1) if self.flat else self.config.local_size

    @property
    def down(self) -> int:
        """Work-items of one part of a group, one below the other."""
        return self.config.local_size[0]

    @property
    def across(self) -> int:
        """Work-items of one part of a group, side by side."""
        return self.config.local_size[1]

    @property
    def part_items(self) -> int:
        """Work-items of one part of a group."""
        return self.down * self.across

    @property
    def block_rows(self) -> int:
        """Rows of a work-group's outputs."""
        return self.config.block[0]

    @property
    def block_columns(self) -> int:
        """Columns of a work-group's outputs."""
        return self.config.block[1]

    @property
    def right_pitch(self) -> int:
        """Distance from one step of depth to the next in the right operand's stage, in elements."""
        return self.block_columns + 4 * (self.operands.integers and not self.loop.pieces)

    @property
    def row_run(self) -> int:
        """Neighbouring rows that a work-item reads at once."""
        return next(run for run in (4, 2, 1) if self.rows % run == 0)

    @property
    def staged(self) -> str:
        """The element type of operands in local memory."""
        return "half" if self.half else "float"

    @property
    def row_type(self) -> str:
        """The type of neighbouring rows at one step of the depth."""
        return Vector(self.row_run).named(self.staged)

    @property
    def left_quads(self) -> int:
        """Quads of the left operand's stage that a work-item copies."""
        return -(-self.block_rows * self.k_block // 4 // self.items)

    @property
    def right_quads(self) -> int:
        """Quads of the right operand's stage that a work-item copies."""
        return -(-self.block_columns * self.k_block // 4 // self.items)
