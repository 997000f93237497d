"""Weight packing: weights in the order in which kernels read them (kernels/templates/contraction/mac.cl.j2).

A contraction's weights are a matrix [depth, columns], divided into panels of `panel` columns. A panel is zero beyond the last
column and never spans two groups of a convolution. In a buffer, panels [depth][panel] are contiguous, so the MAC loop reads
sequentially. In a texture k runs down and columns across, four to a texel, so that neighbours in both directions are near in
its cache.

An image may be folded: rows beyond its height continue to the right. It must be if `depth` exceeds the device's image height,
and it may be if rows would be padded otherwise (`compiler/weights/textures.py`). A weight whose images would be padded
nevertheless is kept in buffers, even on the texture path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from flashmem.base.types import TEXEL_BYTES, Channel, MemoryPath
from flashmem.compiler.ir.blocks.format import BlockFormat
from flashmem.compiler.ir.graph import Node
from flashmem.compiler.weights.textures import ImageLimits, Panels, cut
from flashmem.target.descriptor import DeviceDescriptor

Columns = Callable[[int, int], NDArray[Any]]
"""(first, end) -> that range of output columns as [depth, end - first]."""


Storage = Literal["float32", "float16", "bfloat16", "int8", "uint8", "int16", "uint16", "int4", "uint4"]
"""The type of a packed element. Two of 4 bits share a byte."""


def weight_matrix(node: Node) -> tuple[int, int]:
    """(depth, columns) of the weights of a MatMul or a convolution. Depth is that of one group."""
    shape = node.input(1).shape
    if node.op.startswith("MatMul"):
        return (shape[-1], shape[-2]) if node.attributes["transposed"] else (shape[-2], shape[-1])
    taps = math.prod(shape[2:])
    if node.op == "ConvTranspose":
        group: int = node.attributes["group"]
        return taps * shape[0] // group, shape[1] * group
    return taps * shape[1], shape[0]


def phases_of(node: Node) -> tuple[int, int]:
    """Phases of a transposed convolution, vertical and horizontal: its strides, or (1, 1) if its taps are not packed by phase.

    Outputs whose distance is a multiple of the stride see the same taps, every stride-th, if dilation and stride have no common
    factor. They are one phase (sub-pixel convolution, Shi et al., CVPR 2016). Volumes and weights that are computed at run time
    are not packed by phase.
    """
    if node.op != "ConvTranspose" or len(node.input(1).shape) != 4 or node.input(1).constant is None:
        return 1, 1
    down, across = node.attributes["strides"]
    coprime = all(math.gcd(*each) == 1 for each in zip(node.attributes["strides"], node.attributes["dilations"], strict=True))
    return (down, across) if coprime else (1, 1)


def _by_phase(taps: Sequence[int], phases: Sequence[int]) -> list[int]:
    """The order of taps by their place in a stride, down and across; in row-major order within a phase."""
    places = [(i % phases[0], j % phases[1], i, j) for i in range(taps[0]) for j in range(taps[1])]
    return [i * taps[1] + j for _, _, i, j in sorted(places)]


def weight_columns(node: Node, array: NDArray[Any]) -> Columns:
    """A function that reads columns of `array`: the weights, or their scales, which may have a smaller depth."""
    if node.op.startswith("MatMul"):
        matrix = array.reshape(array.shape[-2:])
        if node.attributes["transposed"]:
            return lambda first, end: matrix[first:end].T
        return lambda first, end: matrix[:, first:end]
    outer, inner, *taps = array.shape
    flat = array.reshape(outer, inner, math.prod(taps))
    if node.op != "ConvTranspose":
        return lambda first, end: flat[first:end].transpose(2, 1, 0).reshape(-1, end - first)
    depth = outer // node.attributes["group"]
    if (phases := phases_of(node)) != (1, 1):
        flat = flat[:, :, _by_phase(taps, phases)]

    def columns(first: int, end: int) -> NDArray[np.floating]:
        group, within = divmod(first, inner)  # the range is inside one group
        part = flat[group * depth : (group + 1) * depth, within : within + end - first]
        return part.transpose(2, 0, 1).reshape(-1, end - first)

    return columns


WASTED = 0.02
"""Images are used if their padding is at most this fraction of a weight, or one page, to which slices are padded anyway."""


@dataclass(frozen=True)
class PackedSlice:
    """Panels of a weight from `first_panel` on, packed in `nbytes` bytes; `raw` of these are the weight's own elements.

    An image has `height` rows of `width` texels, padded to `row_pitch` bytes; `width` is 0 for a plain buffer.
    """

    first_panel: int
    panels: int
    nbytes: int
    raw: int = 0
    width: int = 0
    height: int = 0
    row_pitch: int = 0


@dataclass(frozen=True)
class Packing:
    """The packed form of one weight. Folds begin at multiples of `fold_unit` rows. `phases`: see `phases_of`.

    `of`: what is packed: the elements or codes, or the zero points, scales or minima of blocks. With `heads`, these come before
    the codes of each `block` rows of a panel, one for each column, in the types of `heads`. With `words`, a panel is in words
    of signed bytes (`signed_words`). With `format`, a panel has blocks of that kind.
    """

    depth: int
    group_columns: int
    groups: int
    panel: int
    storage: Storage
    path: MemoryPath
    fold_unit: int
    descriptor: DeviceDescriptor = field(compare=False)
    phases: tuple[int, int] = (1, 1)
    of: Literal["elements", "zero", "scale", "minimum"] = "elements"
    block: int = 0
    heads: tuple[Storage, ...] = ()
    words: bool = False
    format: BlockFormat | None = None

    @property
    def group_panels(self) -> int:
        """Panels of one group."""
        return -(-self.group_columns // self.panel)

    @property
    def panels(self) -> int:
        """Panels of all groups."""
        return self.groups * self.group_panels

    @property
    def bits(self) -> int:
        """Bits of one packed element."""
        return 4 if self.storage.endswith("int4") else 8 * self.dtype.itemsize

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of elements before packing; of 4-bit elements, int8 or uint8, and of bfloat16 their bits."""
        return np.dtype({"uint4": "uint8", "int4": "int8", "bfloat16": "uint16"}.get(self.storage, self.storage))

    @property
    def channel(self) -> Channel:
        """The channel type of textures."""
        if self.storage in ("float32", "float16"):
            return "float" if self.storage == "float32" else "half"
        return "uint16" if self.bits == 16 else "uint8"

    @property
    def panel_texels(self) -> int:
        """Texels across a panel; each has four bytes, or four wider elements."""
        return self.panel // (8 if self.bits == 4 else 4)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of a panel."""
        return self.panel * self.bits // 8

    @property
    def panel_bytes(self) -> int:
        """Bytes of a panel, without the padding of an image's rows."""
        if self.format:
            return self.panel * self.format.row_bytes(self.depth)
        blocks = -(-self.depth // self.block) if self.heads else 0
        return self._rows * self.row_bytes + blocks * self.panel * self.head_bytes

    @property
    def _rows(self) -> int:
        """Rows of a panel: those of the depth, and four of bytes for the sums of columns."""
        return self.depth + 4 * self.words

    @property
    def head_bytes(self) -> int:
        """Bytes of one column of a block's head."""
        return sum(np.dtype(storage).itemsize for storage in self.heads)

    def slices(self, slice_bytes: int) -> list[PackedSlice]:
        """Divide the weight into slices of at most `slice_bytes` and the device's largest allocation, including padding.

        A slice has at least one panel. On the texture path slices are images, or buffers if images would waste memory or exceed
        the device's limits.
        """
        slice_bytes = min(slice_bytes, self.descriptor.max_alloc_bytes)
        if self.path == "texture":
            images = self._images(slice_bytes)
            wasted = sum(part.nbytes for part in images) - self.panels * self.panel_bytes
            if images and wasted <= max(WASTED * self.panels * self.panel_bytes, self.descriptor.page_bytes):
                return images
        count = -(-self.panels // max(1, min(slice_bytes // self.panel_bytes, self.panels)))
        bounds = [self.panels * i // count for i in range(count + 1)]
        return [self.plain(first, end - first) for first, end in pairwise(bounds)]

    def plain(self, first: int, count: int) -> PackedSlice:
        """The plain buffer slice of `count` panels from panel `first` on."""
        return PackedSlice(first, count, count * self.panel_bytes, self._raw(first, count))

    def _images(self, slice_bytes: int) -> list[PackedSlice]:
        """The slices as images; none if the device's images are too small."""
        device = self.descriptor
        texel = TEXEL_BYTES[self.channel]
        limits = ImageLimits(device.image_max_width, device.image_max_height, device.image_pitch_alignment or 1)
        panels = Panels(self.panels, self.depth, self.panel_texels, texel, self.fold_unit)
        found = cut(panels, limits, slice_bytes)
        if found is None:
            return []
        folds = -(-self.depth // found.rows)
        parts = []
        for first, end in pairwise(found.bounds):
            width = (end - first) * self.panel_texels * folds
            pitch = limits.aligned(width) * texel
            raw = self._raw(first, end - first)
            parts.append(PackedSlice(first, end - first, found.rows * pitch, raw, width, found.rows, pitch))
        return parts

    def _raw(self, first: int, count: int) -> int:
        """Bytes of the elements of `count` panels from panel `first` on, without the zeros beyond a group's last column."""
        columns = self._column(first + count) - self._column(first)
        if self.format:
            return columns * self.format.row_bytes(self.depth)
        blocks = -(-self.depth // self.block) if self.heads else 0
        return -(-self.depth * columns * self.bits // 8) + blocks * columns * self.head_bytes

    def _column(self, index: int) -> int:
        """The first column of panel `index`; the number of columns, if it is the number of panels."""
        group, within = divmod(index, self.group_panels)
        return group * self.group_columns + within * self.panel

    def pack(self, part: PackedSlice, columns: Columns, heads: Sequence[Columns] = ()) -> NDArray[Any]:
        """Pack the contents of one of the weight's slices; `heads`: the columns of each head [blocks, columns].

        With `format`, the columns are bytes of blocks.
        """
        if self.format:
            bounds = pairwise(map(self._column, range(part.first_panel, part.first_panel + part.panels + 1)))
            return np.stack([self.format.pack(columns(start, stop).T, self.panel) for start, stop in bounds])
        if heads:
            return np.stack([self._with_heads(part.first_panel + i, columns, heads) for i in range(part.panels)])
        made = (self._panel(part.first_panel + i, columns) for i in range(part.panels))
        width = self.row_bytes // self._packed_dtype.itemsize
        if not part.width:
            panels = np.empty((part.panels, self._rows, width), self._packed_dtype)
            for i, panel in enumerate(made):
                panels[i] = panel
            return panels
        image = np.zeros((part.height, part.row_pitch // self._packed_dtype.itemsize), self._packed_dtype)
        for i, panel in enumerate(made):
            for fold, first in enumerate(range(0, self.depth, part.height)):
                rows = panel[first : first + part.height]
                start = (fold * part.panels + i) * width
                image[: len(rows), start : start + width] = rows
        return image

    @property
    def _packed_dtype(self) -> np.dtype[Any]:
        return np.dtype("uint8") if self.bits == 4 else self.dtype

    def _with_heads(self, index: int, columns: Columns, heads: Sequence[Columns]) -> NDArray[np.uint8]:
        """Pack one panel in bytes: each block's head, then its rows of codes."""
        start = self._column(index)
        stop = self._column(index + 1)
        codes = self._panel(index, columns).view(np.uint8)
        parts = []
        for storage, columns_of in zip(self.heads, heads, strict=True):
            head = np.zeros((-(-self.depth // self.block), self.panel), storage)
            head[:, : stop - start] = columns_of(start, stop)
            parts.append(head.view(np.uint8))
        rows = range(0, self.depth, self.block)
        blocks = ([*(part[at] for part in parts), codes[row : row + self.block].reshape(-1)] for at, row in enumerate(rows))
        return np.concatenate([each for block in blocks for each in block])

    def _panel(self, index: int, columns: Columns) -> NDArray[Any]:
        """Pack one panel: [depth, elements of a row]."""
        start = self._column(index)
        stop = self._column(index + 1)
        panel = np.zeros((self.depth, self.panel), self.dtype)
        panel[:, : stop - start] = columns(start, stop)
        if self.words:
            return signed_words(panel)
        if self.bits != 4:
            return panel
        # The first half of the columns is in low nibbles, so that vectors unpack without a shuffle.
        low, high = np.split(panel.view(np.uint8), 2, axis=1)
        return (low & 15) | (high << 4)


def signed_words(panel: NDArray[Any]) -> NDArray[Any]:
    """8-bit rows [depth, columns] in the order [depth / 4, columns, 4], and the sums of columns in int32 behind them.

    Codes of uint8 become signed bytes, 128 less; the sums are of signed ones. `depth` is a multiple of 4. The result has the
    type of `panel`, and four more rows.
    """
    depth, columns = panel.shape
    signed = (panel.view(np.uint8) ^ 128 if panel.dtype == np.uint8 else panel).view(np.int8)
    words = signed.reshape(depth // 4, 4, columns).swapaxes(1, 2)
    sums = signed.sum(axis=0, dtype=np.int32).astype("<i4")
    return np.concatenate([np.ascontiguousarray(words).reshape(-1), sums.view(np.int8)]).reshape(-1, columns).view(panel.dtype)
