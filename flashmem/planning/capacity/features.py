"""What a measured predictor knows of a launch: launch features, which the dataset keeps, and numbers made of them.

Everything comes from the launch itself, so that a program can be priced on a machine that never saw the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flashmem.base.types import TRANSFER_MODES, MemoryPath, OperatorClass, TransferMode
from flashmem.program.launches import KernelShape, Launch

Matrix = NDArray[np.float32]

FAMILIES: Final = (
    "matmul", "conv", "depthwise", "matmul_dynamic", "elementwise", "reduce_rows", "reduce_columns", "gather", "movement",
    "pool", "resize", "attention",
)  # fmt: skip
"""Kernel families: the templates. A launch of another one is priced by its size alone."""

MAX_RATIO: Final = 3.0
"""The most that is streamed beside a kernel when profiling, as a multiple of the bytes it reads itself."""


@dataclass(frozen=True, kw_only=True)
class LaunchFeatures(KernelShape):
    """One launch as the dataset describes it: what its kernel does, its cost, and its work-items.

    `items` and `group`: work-items in all, and in a work-group; `across`: work-items in the first direction.
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
        """The kernel's own input: activations and weights that it reads."""
        return max(self.bytes + self.weight_bytes - 4 * self.rows * self.columns, 64)


_SHAPE: Final = tuple(each.name for each in fields(KernelShape))


def launch_features(launch: Launch, weight_bytes: int, memory_path: MemoryPath) -> LaunchFeatures:
    """The features of `launch`, which reads `weight_bytes` of weights beside its activations."""
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

LOAD_FEATURES: Final = (
    *KERNEL_FEATURES, "log_seconds", *(f"mode_{mode}" for mode in TRANSFER_MODES), "log_streamed", "ratio", "share",
)  # fmt: skip
"""`ratio`: streamed bytes over the kernel's own; `share`: the time the transfer takes alone over the kernel's."""

GROWING: Final = frozenset({"log_streamed", "ratio", "share"})
"""Features that grow with the streamed bytes and with nothing else: predictions must not fall as they rise."""


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
    """[kernels, LOAD_FEATURES]: `kernel_features`, and beside each kernel `streamed` bytes at `rates` bytes per second."""
    flags = np.array([[mode == known for known in TRANSFER_MODES] for mode in modes], np.float32)
    load = np.stack([np.log2(1 + streamed / 4096), streamed / own_bytes, streamed / rates / seconds], 1)
    parts = [kernels, np.log2(seconds)[:, None], flags.reshape(len(modes), len(TRANSFER_MODES)), load]
    return np.concatenate(parts, 1).astype(np.float32)


def _log(number: float) -> float:
    return math.log2(1 + number)
