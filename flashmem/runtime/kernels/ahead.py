"""Kernels built ahead of the first run: the program cache is full before anything runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from flashmem.base.errors import FlashmemWarning, UserError
from flashmem.base.paths import VARIABLE, why_unusable
from flashmem.base.types import TransferMode
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.writer import replace_binaries
from flashmem.program.kernel_text import Source
from flashmem.program.lanes import lane_kind
from flashmem.program.program import Program
from flashmem.runtime.kernels.build_processes import Builders
from flashmem.runtime.kernels.cache import kernel_key
from flashmem.runtime.kernels.cache_files import ProgramCache, packed_entries
from flashmem.runtime.kernels.required import required_kernels
from flashmem.runtime.kernels.steady import new_kernels
from flashmem.runtime.opencl.devices import Device, descriptor_for
from flashmem.runtime.options import choose_mode, device_for
from flashmem.runtime.streaming.interleaved import LayerMoves, layer_moves
from flashmem.schedule.plan import OverlapPlan, Strategy
from flashmem.target.descriptor import DeviceDescriptor

Report = Callable[[float], None]


@dataclass(frozen=True)
class BuildResult:
    """What a bundle's sessions on `device` ask the cache for: `keys`; `built` of them were missing, and are there now."""

    device: Device
    keys: tuple[str, ...]
    built: int


@dataclass(frozen=True)
class BuildRequest:
    """A program whose kernels are wanted, as a session plays it that is opened without options. `planned`: the transfer mode
    that it is planned for. `plan`: None as long as there is none; nothing is known then of kernels that stream.
    """

    program: Program
    source: Source
    descriptor: DeviceDescriptor
    strategy: Strategy
    planned: TransferMode | None
    plan: OverlapPlan | None = None


class KernelBuilder:
    """Fills the program cache while its owner goes on. Used in a `with`: to leave it ends the child processes."""

    def __init__(self, device: str = "auto", report: Report = lambda fraction: None) -> None:
        """Nothing starts yet.

        Args:
            device: what is compiled for, as `flashmem.compile` takes it.
            report: called with the fraction done, in `begin`, `poll` and `finish`.
        """
        self._asked, self._report, self._cache = device, report, ProgramCache()
        self._builders = Builders(self._cache.write, "compile with --no-build to leave the kernels to the first run")

    def __enter__(self) -> Self:
        return self

    def begin(self, request: BuildRequest) -> None:
        """Start to build what is missing of the kernels of a program; to ask again costs nothing.

        Nothing is built if the device is not here, or the cache cannot be written.

        Raises:
            RunError: no process can be started.
        """
        self._begin(request)

    def poll(self) -> None:
        """Report how far it is. Does not wait."""
        while self._builders.step(wait=False):
            self._report(self._builders.fraction)

    def finish(self, bundle: Bundle) -> BuildResult | None:
        """Wait until all kernels of `bundle` are in the program cache.

        Returns:
            None where its device is not here, or the cache cannot be written, with a warning: nothing is built then.

        Raises:
            RunError: the driver refuses a kernel, or ends the process that builds it.
        """
        keys: dict[str, None] = {}
        planned = bundle.common.get("mode")
        for each in bundle.variants:
            found = self._begin(
                BuildRequest(each.program, each.source, bundle.descriptor, each.plan.strategy, planned, each.plan)
            )
            if found is None:
                return None
            device, wanted, missing = found
            keys |= dict.fromkeys(wanted)
            if not missing:
                continue
            warnings.warn(
                f"the program cache {self._cache.folder} cannot be written, so kernels are built when they first run; set "
                f"{VARIABLE} to a folder that can",
                FlashmemWarning,
                stacklevel=3,
            )
            return None
        while self._builders.step():
            self._report(self._builders.fraction)
        self._builders.check()
        return BuildResult(device, tuple(keys), len(self._builders.submitted))

    def _begin(self, request: BuildRequest) -> tuple[Device, tuple[str, ...], bool] | None:
        """As `begin`: the device, the keys of all kernels, and whether some are missing that cannot be built."""
        device = device_for(request.descriptor.name, self._asked)
        if device is None:
            return None
        program = request.program
        try:
            mode = choose_mode(
                descriptor_for(device), path=program.memory_path, planned=request.planned, strategy=request.strategy
            )
        except UserError:  # a descriptor of that name, but not of this device
            return None
        moves: Mapping[int, LayerMoves] = {}
        again = moves
        if mode == "interleave":
            if request.plan is None:
                return None
            slices, kind = {part.name: part for part in program.slices}, lane_kind(program)
            moves = layer_moves(request.plan, slices, kind)
            later = request.plan.later()
            again = moves if later is request.plan else layer_moves(later, slices, kind)
        plain, lane = required_kernels(program, request.source, moves, again)
        options, steady = program.build_options, new_kernels(request.source, program.steady, plain)
        wanted = {kernel_key(device, each, options): each for each in (*plain, *lane, *steady)}
        missing = [key for key in wanted if key not in self._builders.submitted and self._cache.read(key) is None]
        if missing and why_unusable(self._cache.folder) is not None:
            return device, tuple(wanted), True
        if missing:
            self._builders.submit({key: wanted[key] for key in missing}, program, device, busy=1)  # with the weights
            self._report(self._builders.fraction)
        return device, tuple(wanted), False

    def __exit__(self, *exception: object) -> None:
        self._builders.close()
        if self._builders.submitted:
            self._cache.trim()


def with_binaries(bundle: Bundle, built: BuildResult | None) -> Bundle:
    """The same bundle, carrying what the cache has of the kernels that were `built`.

    Raises:
        UserError: their device is not here, or the bundle cannot be written.
    """
    if built is None:
        raise UserError(
            f"no device {bundle.descriptor.name} is here that kernels could be compiled for; leave --with-binaries out"
        )
    cache = ProgramCache()
    entries = {key: binary for key in built.keys if (binary := cache.read(key)) is not None}
    return replace_binaries(bundle, packed_entries(entries))
