"""Kernel launches of a program, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from flashmem.base.types import OperatorClass


@dataclass(frozen=True, slots=True)
class Arg:
    """One kernel argument: a tensor, a slice, a constant (byte `offset` in the constants region), or a number."""

    kind: Literal["tensor", "slice", "constant", "int", "float"]
    value: str | int | float
    nbytes: int = 0  # of a constant


@dataclass(frozen=True, slots=True)
class KernelShape:
    """What a kernel does, beyond its arithmetic and its bytes: what a measured predictor tells kernels apart by.

    `rows` x `columns` elements are written, each from `depth` elements (1 where nothing is summed). Source elements lie in
    runs of `run` neighbours; after a run, or between elements if it is 1, the address jumps by `stride` elements. A load
    takes `vector` elements. Each written element passes `simple_ops` elementwise operators and `special_ops` transcendental
    ones. Of the kernel config: `tile_rows` x `tile_columns` elements of a work-item (0: not said), `k_block` steps of depth
    in local memory at a time, `slice_k` parts of the depth.
    """

    family: str = ""  # the template: matmul, conv, elementwise ...
    rows: int = 1
    columns: int = 1
    depth: int = 1
    run: int = 1
    stride: int = 1
    vector: int = 1
    simple_ops: int = 0
    special_ops: int = 0
    tile_rows: int = 0
    tile_columns: int = 0
    k_block: int = 0
    slice_k: int = 1


@dataclass(frozen=True, slots=True)
class Launch:
    """Layer ℓ: one kernel launch. `macs` and `bytes` (activations read and written) describe its cost to the planner.

    With transfer mode `interleave` the kernel named `kernel` in the *lane* source takes, after `args`, the stream lane's
    arguments (see kernels/templates/common/lane.cl.j2).
    """

    name: str
    kernel: str
    global_size: tuple[int, ...]
    local_size: tuple[int, ...] | None
    args: tuple[Arg, ...]
    operator_class: OperatorClass
    operators: tuple[str, ...]  # the ONNX nodes fused into it, for plans a person reads
    macs: int
    bytes: int
    shape: KernelShape = KernelShape()


@dataclass(frozen=True)
class LaunchOrder:
    """How launches were ordered: the most bytes of activations alive at once in the order of the model and in the one taken,
    and a bound that no order is below. Each fused group counts as one launch.
    """

    given_bytes: int
    peak_bytes: int
    bound_bytes: int
    method: str

    @property
    def gap(self) -> float:
        """By what part the peak may be above the best one."""
        return self.peak_bytes / self.bound_bytes - 1 if self.bound_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Joined:
    """Slices of one weight, side by side in `weights.bin`, none of them an image: one buffer, for a launch that reads all."""

    name: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SteadyLaunch:
    """What later runs play instead of layers `first` to `last`: another kernel, one launch instead of several, or both.

    It reads what they read and writes what they write. One that stands for several layers takes the place of the last, and
    needs all its slices to be there before the first: they must be resident. `launch` may name one of `Program.joined` where
    others name a slice.
    """

    first: int
    last: int
    launch: Launch


def first_and_last(launches: Iterable[Launch], kind: Literal["tensor", "slice"]) -> dict[str, tuple[int, int]]:
    """The first and the last layer, from 1, that has each tensor, or slice, among its arguments."""
    found: dict[str, tuple[int, int]] = {}
    for layer, launch in enumerate(launches, start=1):
        for arg in launch.args:
            if arg.kind == kind:
                first, _ = found.get(str(arg.value), (layer, layer))
                found[str(arg.value)] = (first, layer)
    return found
