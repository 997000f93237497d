"""Weights in the order in which kernels read them (kernels/templates/mac.cl.j2).

A contraction's weights are a matrix [depth, columns], cut into panels of `panel` columns (zero beyond the last; never across
two groups of a convolution). In a buffer a panel is [depth][panel], one after the other: the MAC loop reads straight on. In
a texture k runs down and columns across, four to a texel, so that neighbours in both directions are near in its cache; where
`depth` passes the device's image height, the image is folded: rows `fold_rows`.. continue to the right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from flashmem.device import DeviceDescriptor
from flashmem.errors import UserError
from flashmem.graph.ir import Node
from flashmem.program import MemoryPath

Columns = Callable[[int, int], NDArray[np.floating]]
"""(first, end) -> that range of output columns as [depth, end - first]."""


def weight_columns(node: Node) -> tuple[int, int, Columns]:
    """(depth, columns, reader) of the constant weights of a MatMul, Conv or ConvTranspose. Depth is that of one group."""
    weight = node.input(1)
    assert weight.constant is not None
    array = weight.constant.array()
    if node.op == "MatMul":
        matrix = array.reshape(weight.shape[-2:])
        if node.attributes["transposed"]:
            return matrix.shape[1], matrix.shape[0], lambda first, end: matrix[first:end].T
        return matrix.shape[0], matrix.shape[1], lambda first, end: matrix[:, first:end]
    taps = weight.shape[2] * weight.shape[3]
    if node.op == "Conv":
        columns, channels = weight.shape[:2]
        flat = array.reshape(columns, channels, taps)
        return taps * channels, columns, lambda first, end: flat[first:end].transpose(2, 1, 0).reshape(-1, end - first)
    channels, columns = weight.shape[:2]
    flat = array.reshape(channels, columns, taps)
    return taps * channels, columns, lambda first, end: flat[:, first:end].transpose(2, 0, 1).reshape(-1, end - first)


@dataclass(frozen=True)
class PackedSlice:
    """Panels `first_panel`.. of a weight, packed: for a texture `data` has its rows padded to `row_pitch` bytes."""

    first_panel: int
    panels: int
    data: NDArray[np.floating]
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
    half: bool
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
    def itemsize(self) -> int:
        """Bytes of one packed element."""
        return 2 if self.half else 4

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
        most = min(slice_bytes, self.descriptor.max_alloc_bytes) // (self.depth * self.panel * self.itemsize)
        if self.path == "texture":
            across = self.descriptor.image_max_width // (self.panel // 4 * self.folds)
            if across == 0:
                raise UserError(f"a weight of depth {self.depth} passes the device's image limits; use --memory-path buffer")
            most = min(most, across)
        return max(1, min(most, self.panels))

    def slices(self, columns: Columns, slice_bytes: int) -> Iterator[PackedSlice]:
        """The weight's slices, packed one after the other; panels are spread evenly over them."""
        count = -(-self.panels // self.panels_per_slice(slice_bytes))
        bounds = [self.panels * i // count for i in range(count + 1)]
        for first, end in pairwise(bounds):
            yield self._pack(columns, first, end)

    def _pack(self, columns: Columns, first: int, end: int) -> PackedSlice:
        dtype = np.float16 if self.half else np.float32
        count = end - first
        panels = np.zeros((count, self.depth, self.panel), dtype)
        for i in range(count):
            group, within = divmod(first + i, self.group_panels)
            start = group * self.group_columns + within * self.panel
            stop = min(start + self.panel, (group + 1) * self.group_columns)
            panels[i, :, : stop - start] = columns(start, stop)
        if self.path == "buffer":
            return PackedSlice(first, count, panels)
        rows, folds = self.fold_rows, self.folds
        texels = count * self.panel // 4
        width = texels * folds
        alignment = self.descriptor.image_pitch_alignment or 1
        pitch = -(-width // alignment) * alignment
        image = np.zeros((rows, pitch * 4), dtype)
        across = panels.transpose(1, 0, 2).reshape(self.depth, texels * 4)
        for fold in range(folds):
            part = across[fold * rows : (fold + 1) * rows]
            image[: len(part), fold * texels * 4 : (fold + 1) * texels * 4] = part
        return PackedSlice(first, count, image, width, rows, pitch * 4 * self.itemsize)
