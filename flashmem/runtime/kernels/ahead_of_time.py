"""Ahead-of-time kernel builds: during compilation, so that the program cache has the kernels before the first run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from flashmem.base.errors import FlashmemWarning, UserError
from flashmem.base.paths import VARIABLE, why_unusable
from flashmem.base.types import TransferMode
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.replacing import replace_binaries
from flashmem.program.kernel_text import Source
from flashmem.program.lanes import lane_kind
from flashmem.program.program import Program
from flashmem.runtime.kernels.build_processes import Builders
from flashmem.runtime.kernels.cache import kernel_key
from flashmem.runtime.kernels.cache_files import ProgramCache, packed_entries
from flashmem.runtime.kernels.chains import with_chains
from flashmem.runtime.kernels.required import RequiredKernel, required_kernels
from flashmem.runtime.kernels.steady import new_kernels
from flashmem.runtime.kernels.verdicts import Verdicts
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.request.options import choose_mode, device_for
from flashmem.runtime.streaming.interleaved import LayerMoves, layer_moves
from flashmem.schedule.modes import MODES
from flashmem.schedule.plan import OverlapPlan, Strategy
from flashmem.target.descriptor import DeviceDescriptor

Report = Callable[[float], None]


@dataclass(frozen=True)
class BuildResult:
    """The kernels of a bundle for `device`: their cache `keys`, and the number `built` because the cache lacked them."""

    device: Device
    keys: tuple[str, ...]
    built: int


@dataclass(frozen=True)
class BuildRequest:
    """A program whose kernels are to be built, for a session that is opened without options.

    `planned` is the transfer mode of its plan. While `plan` is None, kernels with stream lanes are unknown and not built.
    """

    program: Program
    source: Source
    descriptor: DeviceDescriptor
    strategy: Strategy
    planned: TransferMode | None
    plan: OverlapPlan | None = None


class KernelBuilder:
    """A context manager that fills the program cache in child processes while compilation continues; leaving it ends them."""

    def __init__(self, device: str = "auto", report: Report = lambda fraction: None) -> None:
        """Create a builder without starting anything.

        Args:
            device: the target of compilation, as for `flashmem.compile`.
            report: called with the fraction done, in `begin`, `poll` and `finish`.
        """
        self._asked, self._report, self._cache = device, report, ProgramCache()
        self._builders = Builders(self._cache.write, "compile with --no-build to leave the kernels to the first run")

    def __enter__(self) -> Self:
        return self

    def begin(self, request: BuildRequest) -> None:
        """Start building the missing kernels of a program. A repeated request costs nothing.

        Nothing is built if the device is not on this machine or the cache cannot be written.

        Raises:
            RunError: no process can be started.
        """
        self._begin(request)

    def poll(self) -> None:
        """Report the progress without waiting."""
        while self._builders.step(wait=False):
            self._report(self._builders.fraction)

    def finish(self, bundle: Bundle) -> BuildResult | None:
        """Wait until all kernels of `bundle` are in the program cache.

        Returns:
            None, with nothing built, if the device is not on this machine, or with a warning if the cache cannot be written.

        Raises:
            RunError: the driver refuses a kernel, or ends the process that builds it.
        """
        keys: dict[str, None] = {}
        for request in requests_of(bundle):
            found = self._begin(request)
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
        """Like `begin`. Returns the device, the keys of all kernels, and whether some are missing and cannot be built."""
        device = device_for(request.descriptor.name, self._asked)
        if device is None:
            return None
        found = kernels_of(request, device)
        if found is None:
            return None
        program, kernels = found
        options = program.build_options
        kernels = Verdicts(device).applied(kernels, options)
        wanted = {kernel_key(device, each, options): each for each in kernels}
        missing = [key for key in wanted if key not in self._builders.submitted and self._cache.read(key) is None]
        if missing and why_unusable(self._cache.folder) is not None:
            return device, tuple(wanted), True
        if missing:
            self._builders.submit({key: wanted[key] for key in missing}, program, device, busy=1)  # one processor packs weights
            self._report(self._builders.fraction)
        return device, tuple(wanted), False

    def __exit__(self, *exception: object) -> None:
        self._builders.close()
        if self._builders.submitted:
            self._cache.trim()


def kernels_of(request: BuildRequest, device: Device) -> tuple[Program, tuple[RequiredKernel, ...]] | None:
    """The program as `device` runs it, and the kernels of a session without options: first and later runs, copies, chains.

    None: the device cannot run it, or kernels with stream lanes are not known yet.
    """
    program, source = with_chains(request.program, request.source, request.descriptor, device.compute_units)
    try:
        mode = choose_mode(
            descriptor_for(device, request.descriptor.probed),
            path=program.memory_path,
            planned=request.planned,
            strategy=request.strategy,
        )
    except UserError:  # a descriptor of the same name that is not for this device
        return None
    moves: Mapping[int, LayerMoves] = {}
    again = moves
    if MODES[mode].by_kernels:
        if request.plan is None:
            return None
        slices, kind = {part.name: part for part in program.slices}, lane_kind(program)
        moves = layer_moves(request.plan, slices, kind)
        later = request.plan.later()
        again = moves if later is request.plan else layer_moves(later, slices, kind)
    plain, lane = required_kernels(program, source, moves, again)
    return program, (*plain, *lane, *new_kernels(source, program.steady, plain))


def requests_of(bundle: Bundle) -> list[BuildRequest]:
    """The program of each shape variant of a bundle."""
    planned = bundle.common.get("mode")
    return [
        BuildRequest(each.program, each.source, bundle.descriptor, each.plan.strategy, planned, each.plan)
        for each in bundle.variants
    ]


def with_binaries(bundle: Bundle, built: BuildResult | None) -> Bundle:
    """Store the compiled kernels of `built` in the bundle, and return it opened again.

    Raises:
        UserError: the device is not on this machine, or the bundle cannot be written.
    """
    if built is None:
        raise UserError(
            f"no device {bundle.descriptor.name} is here that kernels could be compiled for; leave --with-binaries out"
        )
    cache = ProgramCache()
    entries = {key: binary for key in built.keys if (binary := cache.read(key)) is not None}
    return replace_binaries(bundle, packed_entries(entries))
