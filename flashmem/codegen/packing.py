"""Weights in the order in which kernels read them (kernels/templates/mac.cl.j2).

A contraction's weights are a matrix [depth, columns], cut into panels of `panel` columns (zero beyond the last; never across
two groups of a convolution). In a buffer a panel is [depth][panel], one after the other: the MAC loop reads straight on. In
a texture k runs down and columns across, four to a texel, so that neighbours in both directions are near in its cache; where
`depth` passes the device's image height, the image is folded: rows `fold_rows`.. continue to the right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from flashmem.device import DeviceDescriptor
from flashmem.errors import UserError
from flashmem.graph.ir import Node
from flashmem.program import TEXEL_BYTES, Channel, MemoryPath

Columns = Callable[[int, int], NDArray[Any]]
"""(first, end) -> that range of output columns as [depth, end - first]."""


Storage = Literal["float32", "float16", "int8", "uint8", "int16", "uint16", "int4", "uint4"]
"""What a packed element is. Two of 4 bits share a byte."""


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


def weight_columns(node: Node, array: NDArray[Any]) -> Columns:
    """Reader of the columns of those weights, or of what goes with them (scales), whose depth may be less: `array`."""
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

    def columns(first: int, end: int) -> NDArray[np.floating]:
        group, within = divmod(first, inner)  # the range lies in one group
        part = flat[group * depth : (group + 1) * depth, within : within + end - first]
        return part.transpose(2, 0, 1).reshape(-1, end - first)

    return columns


@dataclass(frozen=True)
class PackedSlice:
    """Panels `first_panel`.. of a weight, packed in `nbytes`: for a texture, rows padded to `row_pitch` bytes."""

    first_panel: int
    panels: int
    nbytes: int
    width: int = 0
    height: int = 0
    row_pitch: int = 0


@dataclass(frozen=True)
class Packing:
    """How one weight is packed. `fold_unit`: rows the kernel reads without a seek; a fold never splits one."""

    depth: int
    group_columns: int
    groups: int
    panel: int
    storage: Storage
    path: MemoryPath
    fold_unit: int
    descriptor: DeviceDescriptor = field(compare=False)

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
        """What elements are before they are packed, if of 4 bits."""
        return np.dtype("uint8" if self.storage == "uint4" else "int8" if self.storage == "int4" else self.storage)

    @property
    def channel(self) -> Channel:
        """The channel type of textures."""
        if self.storage in ("float32", "float16"):
            return "float" if self.storage == "float32" else "half"
        return "uint16" if self.bits == 16 else "uint8"

    @property
    def panel_texels(self) -> int:
        """Texels across a panel: four bytes, or four wider elements, each."""
        return self.panel // (8 if self.bits == 4 else 4)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of a panel."""
        return self.panel * self.bits // 8

    @property
    def panel_bytes(self) -> int:
        """Bytes of a panel, without the padding of an image's rows."""
        return self.depth * self.row_bytes

    @property
    def folds(self) -> int:
        """Times the image is folded; 1 if it is not."""
        if self.path == "buffer":
            return 1
        units = self.descriptor.image_max_height // self.fold_unit
        if units == 0:
            raise UserError(
                f"a convolution over {self.fold_unit} channels passes the device's image height; use --memory-path buffer"
            )
        return -(-self.depth // (units * self.fold_unit))

    @property
    def fold_rows(self) -> int:
        """Rows of the image; `depth` if it is not folded."""
        units = math.ceil(self.depth / self.fold_unit)
        return min(math.ceil(units / self.folds) * self.fold_unit, self.depth)

    def panels_per_slice(self, slice_bytes: int) -> int:
        """As many panels as `slice_bytes` and the device's image width and allocation limit admit; at least one."""
        most = min(slice_bytes, self.descriptor.max_alloc_bytes) // self.panel_bytes
        if self.path == "texture":
            across = self.descriptor.image_max_width // (self.panel_texels * self.folds)
            if across == 0:
                raise UserError(f"a weight of depth {self.depth} passes the device's image limits; use --memory-path buffer")
            most = min(most, across)
        return max(1, min(most, self.panels))

    def slices(self, slice_bytes: int) -> list[PackedSlice]:
        """The weight's slices; panels are spread evenly over them."""
        count = -(-self.panels // self.panels_per_slice(slice_bytes))
        bounds = [self.panels * i // count for i in range(count + 1)]
        return [self.sized(first, end - first) for first, end in pairwise(bounds)]

    def sized(self, first: int, count: int) -> PackedSlice:
        """The slice of `count` panels from panel `first` on."""
        if self.path == "buffer":
            return PackedSlice(first, count, count * self.panel_bytes)
        width = count * self.panel_texels * self.folds
        alignment = self.descriptor.image_pitch_alignment or 1
        pitch = -(-width // alignment) * alignment * TEXEL_BYTES[self.channel]
        return PackedSlice(first, count, self.fold_rows * pitch, width, self.fold_rows, pitch)

    def pack(self, part: PackedSlice, columns: Columns) -> NDArray[Any]:
        """The contents of one of the weight's slices."""
        made = (self._panel(part.first_panel + i, columns) for i in range(part.panels))
        width = self.row_bytes // self._packed_dtype.itemsize
        if self.path == "buffer":
            panels = np.empty((part.panels, self.depth, width), self._packed_dtype)
            for i, panel in enumerate(made):
                panels[i] = panel
            return panels
        image = np.zeros((part.height, part.row_pitch // self._packed_dtype.itemsize), self._packed_dtype)
        for i, panel in enumerate(made):
            for fold in range(self.folds):
                rows = panel[fold * part.height : (fold + 1) * part.height]
                start = (fold * part.panels + i) * width
                image[: len(rows), start : start + width] = rows
        return image

    @property
    def _packed_dtype(self) -> np.dtype[Any]:
        return np.dtype("uint8") if self.bits == 4 else self.dtype

    def _panel(self, index: int, columns: Columns) -> NDArray[Any]:
        """One panel, [depth, elements of a row]."""
        group, within = divmod(index, self.group_panels)
        start = group * self.group_columns + within * self.panel
        stop = min(start + self.panel, (group + 1) * self.group_columns)
        panel = np.zeros((self.depth, self.panel), self.dtype)
        panel[:, : stop - start] = columns(start, stop)
        if self.bits != 4:
            return panel
        # The first half of the columns lies in low nibbles, so that vectors unpack without a shuffle.
        low, high = np.split(panel.view(np.uint8), 2, axis=1)
        return (low & 15) | (high << 4)
