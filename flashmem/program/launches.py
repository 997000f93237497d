"""Kernel launches of a program, as data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from flashmem.base.types import OperatorClass


@dataclass(frozen=True, slots=True)
class Arg:
    """One kernel argument: a tensor, a slice, a constant (given by its byte offset among the constants), or a number.

    "whole": all of the arena, the states or the constants, for chains (`runtime.kernels.chains`). No bundle has it.
    """

    kind: Literal["tensor", "slice", "constant", "whole", "int", "float"]
    value: str | int | float
    nbytes: int = 0  # of a constant


@dataclass(frozen=True, slots=True)
class KernelShape:
    """The shape of a kernel's work: the features with which a trained predictor distinguishes kernels.

    A kernel writes `rows` x `columns` elements, each from `depth` elements (1 where nothing is summed). Source elements are in
    runs of `run` neighbours. After a run, or between elements if it is 1, the address advances by `stride` elements. A load has
    `vector` elements. Each written element passes `simple_ops` elementwise operators and `special_ops` transcendental ones. Of
    a contraction's config, `tile_rows` x `tile_columns` are the elements of a work-item (0: unknown). `k_block` are the steps
    of depth in local memory at a time (0: none), and `slice_k` the parts of the depth that different work-items sum.
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
    """One kernel launch: a layer of the program. `macs` and `bytes` (activations read and written) are its cost for the
    planner.

    In transfer mode `interleave` the kernel of the same name in the *lane* source has the stream lane's arguments after `args`
    (see kernels/templates/common/lane.cl.j2).
    """

    name: str
    kernel: str
    global_size: tuple[int, ...]
    local_size: tuple[int, ...] | None
    args: tuple[Arg, ...]
    operator_class: OperatorClass
    operators: tuple[str, ...]  # the fused ONNX nodes, for readable plans
    macs: int
    bytes: int
    shape: KernelShape = KernelShape()


@dataclass(frozen=True)
class LaunchOrder:
    """The result of ordering the launches: peak bytes of live activations in the model's order and in the chosen one.

    `bound_bytes` is a lower bound over all orders. Each fused group counts as one launch.
    """

    given_bytes: int
    peak_bytes: int
    bound_bytes: int
    method: str

    @property
    def gap(self) -> float:
        """The largest possible excess of the peak over the best order's, as a fraction."""
        return self.peak_bytes / self.bound_bytes - 1 if self.bound_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Joined:
    """Adjacent slices of one weight in `weights.bin`, none of them an image, joined to one buffer for a launch that reads
    all.
    """

    name: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SteadyLaunch:
    """A launch that later runs use instead of launches `first` to `last`: another kernel, one launch for several, or both.

    It reads and writes what those launches do. A launch for several others runs in place of the last one. Before the first of
    them, all its slices must be resident. `launch` may name an entry of `Program.joined` as a slice.
    """

    first: int
    last: int
    launch: Launch


def first_and_last(launches: Iterable[Launch], kind: Literal["tensor", "slice"]) -> dict[str, tuple[int, int]]:
    """The first and the last layer, counted from 1, with each tensor or slice among its arguments."""
    found: dict[str, tuple[int, int]] = {}
    for layer, launch in enumerate(launches, start=1):
        for arg in launch.args:
            if arg.kind == kind:
                first, _ = found.get(str(arg.value), (layer, layer))
                found[str(arg.value)] = (first, layer)
    return found
