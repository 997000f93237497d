"""Pairs of a compiled kernel and a shape, each on a GPU: the launches that boosters are trained on.

A kernel's text holds no sizes of rows or depth, so that one text serves many shapes: its counts stay, passes, work-items and
bytes follow the shape. GPUs are the shipped ones, and drawn ones with other widths and rates, so that the boosters learn what
a width does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flashmem.planning.capacity.features import LaunchFeatures
from flashmem.planning.capacity.hardware import ByMode, Hardware
from flashmem.profiler.phone_compilers.compiled_dataset import KernelRow
from flashmem.profiler.phone_compilers.pipeline import PipelineModel

SHAPES, DRAWN = 8, 4
"""Shapes of each row (its own and drawn ones), and drawn GPUs of each shape."""

_CONTRACTIONS = ("matmul", "conv", "matmul_dynamic")
_MOST_ITEMS = 1 << 24


@dataclass(frozen=True)
class Pair:
    """A kernel of `row` with the shape in `launch` on `gpu`, a shipped device's if `device` names one."""

    row: KernelRow
    launch: LaunchFeatures
    gpu: Hardware
    device: str
    own: bool  # whether the shape is that of the row

    @property
    def model(self) -> PipelineModel:
        """The pipeline model of the kernel on the GPU, which gives the labels."""
        return PipelineModel(self.row.compiled, self.gpu)


def pairs(rows: Sequence[KernelRow], gpus: dict[str, Hardware], seed: int = 0) -> Iterator[Pair]:
    """All pairs of `rows`: each shape on one of `gpus` in turn, its own shape on all of them, and on drawn ones."""
    draw = np.random.default_rng(seed)
    known = list(gpus.items())
    for number, row in enumerate(rows):
        for shape in range(SHAPES):
            launch = reshaped(row.features, draw) if shape else row.features
            for name, gpu in known if not shape else [known[(number + shape) % len(known)]]:
                yield Pair(row, launch, gpu, name, shape == 0)
            for _ in range(DRAWN):
                yield Pair(row, launch, drawn(known[int(draw.integers(len(known)))][1], draw), "", shape == 0)


def reshaped(launch: LaunchFeatures, draw: np.random.Generator) -> LaunchFeatures:
    """The launch with drawn numbers of rows and, of products, of depth. Its kernel's text stays the same."""
    rows = max(1, round(launch.rows * 2 ** draw.uniform(-2, 2)))
    ratio = min(rows / launch.rows, max(1.0, _MOST_ITEMS / launch.items))
    rows = max(1, round(launch.rows * ratio))
    deeper = 2 ** draw.uniform(-1.5, 1.5) if launch.family in _CONTRACTIONS and launch.depth >= 64 else 1.0
    depth = max(16, round(launch.depth * deeper / 16) * 16) if deeper != 1.0 else launch.depth
    deeper = depth / launch.depth
    written = 4 * launch.rows * launch.columns
    read = max(0, launch.bytes - written)
    groups = max(1, math.ceil(launch.items * ratio / launch.group))
    return replace(
        launch, rows=rows, depth=depth, run=max(1, round(launch.run * deeper)) if launch.run > 1 else launch.run,
        macs=round(launch.macs * ratio * deeper), bytes=round(read * ratio * deeper + min(written, launch.bytes) * ratio),
        weight_bytes=round(launch.weight_bytes * deeper), items=groups * launch.group,
        across=max(1, round(launch.across * ratio)),
    )  # fmt: skip


def drawn(gpu: Hardware, draw: np.random.Generator) -> Hardware:
    """A GPU with other widths and rates."""

    def scaled(low: float, high: float) -> float:
        return float(2 ** draw.uniform(low, high))

    slots, memory, host = scaled(-2, 1), scaled(-1.5, 1), scaled(-1.5, 1.5)
    return replace(
        gpu, slots=gpu.slots * slots, texture=gpu.texture * slots * scaled(-1, 1), load=gpu.load * slots * scaled(-1, 1),
        half_rate=float(draw.choice((1.0, gpu.half_rate))), items=gpu.items * slots * scaled(-0.5, 0.5),
        memory=gpu.memory * memory, launch_seconds=gpu.launch_seconds * scaled(-1.5, 1), host=gpu.host * memory * host,
        last=ByMode({mode: rate * memory * host for mode, rate in gpu.last.items()}),
        contention=ByMode({mode: min(1.0, share * scaled(-1, 1)) for mode, share in gpu.contention.items()}),
    )  # fmt: skip
