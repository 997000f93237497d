"""The widths of a GPU's pipelines: the published figures that turn counted instructions into seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pipelines:
    """What all cores of a GPU do in a cycle, and its clock.

    `lanes`: instructions of work-items issued; multiply-adds of halves, `half_rate` times as many. `texture_bytes` and
    `load_bytes`: bytes read through textures and from buffers, out of caches. `reached`: the share of these that kernels reach;
    the rest is latency and misses of caches, which no compiler reports.
    """

    lanes: float
    clock: float  # Hz
    texture_bytes: float
    load_bytes: float
    half_rate: float = 2.0
    reached: float = 1.0
