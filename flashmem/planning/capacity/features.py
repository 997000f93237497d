"""Features of a launch for the measured predictor: those in the dataset, and the numbers computed from them.

All features depend on the launch alone, so that a machine without the device can predict the latency of a program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flashmem.base.types import MemoryPath, OperatorClass, TransferMode
from flashmem.program.launches import KernelShape, Launch
from flashmem.schedule.modes import ALIAS, DMA, INTERLEAVE, MAP

Matrix = NDArray[np.float32]

FAMILIES: Final = (
    "matmul", "conv", "depthwise", "matmul_dynamic", "elementwise", "reduce_rows", "reduce_columns", "gather", "movement",
    "pool", "resize", "attention",
)  # fmt: skip
"""Kernel families: the templates. For other families, the size of the launch is its only feature."""

MAX_RATIO: Final = 3.0
"""The most bytes streamed during a kernel when profiling, as a multiple of the bytes that it reads itself."""


@dataclass(frozen=True, kw_only=True)
class LaunchFeatures(KernelShape):
    """One launch in the dataset: the shape and cost of its kernel, and its work-items.

    `items` and `group`: work-items in all, and in a work-group; `across`: work-items in the first dimension.
    """

    operator_class: OperatorClass
    memory_path: MemoryPath
    macs: int
    bytes: int
    weight_bytes: int
    items: int
    across: int
    group: int

    @property
    def own_bytes(self) -> int:
        """Bytes of activations and weights that the kernel reads itself."""
        return max(self.bytes + self.weight_bytes - 4 * self.rows * self.columns, 64)


_SHAPE: Final = tuple(each.name for each in fields(KernelShape))


def launch_features(launch: Launch, weight_bytes: int, memory_path: MemoryPath) -> LaunchFeatures:
    """The features of `launch`, which reads `weight_bytes` of weights in addition to its activations."""
    return LaunchFeatures(
        **{name: getattr(launch.shape, name) for name in _SHAPE},
        operator_class=launch.operator_class,
        memory_path=memory_path,
        macs=launch.macs,
        bytes=launch.bytes,
        weight_bytes=weight_bytes,
        items=math.prod(launch.global_size),
        across=launch.global_size[0],
        group=math.prod(launch.local_size or (1,)),
    )


KERNEL_FEATURES: Final = (
    *(f"is_{family}" for family in FAMILIES), "is_texture", "log_rows", "log_columns", "log_depth", "log_run", "log_stride",
    "log_vector", "log_macs", "log_bytes", "log_weight_bytes", "log_items", "log_across", "log_group", "log_groups",
    "log_outputs", "log_intensity", "log_special", "simple_ops", "special_ops", "log_outputs_per_item", "log_roofline",
    "log_tile_rows", "log_tile_columns", "log_k_block", "log_slice_k",
)  # fmt: skip

TRAINED_MODES: Final = tuple(kind.name for kind in (MAP, ALIAS, DMA, INTERLEAVE))
"""The transfer modes of the measurements that models are trained on."""

LOAD_FEATURES: Final = (
    *KERNEL_FEATURES, "log_seconds", *(f"mode_{mode}" for mode in TRAINED_MODES), "log_streamed", "ratio", "share",
)  # fmt: skip
"""`ratio`: streamed bytes over the kernel's own. `share`: the time of the transfer alone over the time of the kernel."""

GROWING: Final = frozenset({"log_streamed", "ratio", "share"})
"""Features that grow with the streamed bytes alone: predictions must not fall as they grow."""


def roofline_seconds(features: LaunchFeatures, flops: float, bandwidth: float, launch: float) -> float:
    """The slower of arithmetic (FLOP per second) and traffic (bytes per second), plus the launch itself."""
    return max(2 * features.macs / flops, (features.bytes + features.weight_bytes) / bandwidth) + launch


def kernel_features(kernels: Sequence[LaunchFeatures], roofline: Sequence[float]) -> Matrix:
    """[kernels, KERNEL_FEATURES]; `roofline` is each kernel's `roofline_seconds`."""
    rows = []
    for kernel, seconds in zip(kernels, roofline, strict=True):
        outputs = kernel.rows * kernel.columns
        family = [float(kernel.family == known) for known in FAMILIES]
        logarithms = (
            kernel.rows, kernel.columns, kernel.depth, kernel.run, kernel.stride, kernel.vector, kernel.macs, kernel.bytes,
            kernel.weight_bytes, kernel.items, kernel.across, kernel.group, kernel.items / kernel.group, outputs,
            kernel.macs / (kernel.bytes + kernel.weight_bytes + 1), kernel.special_ops * outputs,
        )  # fmt: skip
        numbers = [kernel.simple_ops, kernel.special_ops, math.log2(outputs / kernel.items), math.log2(seconds)]
        config = map(_log, (kernel.tile_rows, kernel.tile_columns, kernel.k_block, kernel.slice_k))
        rows.append([*family, float(kernel.memory_path == "texture"), *map(_log, logarithms), *numbers, *config])
    return np.array(rows, np.float32).reshape(len(kernels), len(KERNEL_FEATURES))


def load_features(
    kernels: Matrix,
    own_bytes: NDArray[np.float64],
    seconds: NDArray[np.float64],
    modes: Sequence[TransferMode],
    streamed: NDArray[np.float64],
    rates: NDArray[np.float64],
) -> Matrix:
    """[kernels, LOAD_FEATURES]: `kernel_features`, and the load during each kernel: `streamed` bytes at `rates` bytes a
    second."""
    flags = np.array([[mode == known for known in TRAINED_MODES] for mode in modes], np.float32)
    load = np.stack([np.log2(1 + streamed / 4096), streamed / own_bytes, streamed / rates / seconds], 1)
    parts = [kernels, np.log2(seconds)[:, None], flags.reshape(len(modes), len(TRAINED_MODES)), load]
    return np.concatenate(parts, 1).astype(np.float32)


def _log(number: float) -> float:
    return math.log2(1 + number)
