"""Kernels are built and checked during compilation, so that the program cache has them before the first run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Self

from flashmem.base.errors import FlashmemWarning, UserError
from flashmem.base.paths import VARIABLE, why_unusable
from flashmem.base.types import TransferMode
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.replacing import replace_binaries
from flashmem.program.kernel_text import Source
from flashmem.program.lanes import lane_kind
from flashmem.program.program import Program
from flashmem.runtime.kernels.builds import build_jobs
from flashmem.runtime.kernels.cache import kernel_key
from flashmem.runtime.kernels.cache_files import ProgramCache, packed_entries
from flashmem.runtime.kernels.checks import ProgramChecks
from flashmem.runtime.kernels.device_chains import chained
from flashmem.runtime.kernels.pool import ChildPool
from flashmem.runtime.kernels.required import RequiredKernel, required_kernels
from flashmem.runtime.kernels.steady import new_kernels
from flashmem.runtime.kernels.verdicts import Finding, Verdicts
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.request.options import choose_mode, device_for
from flashmem.runtime.streaming.interleaved import LayerMoves, layer_moves
from flashmem.schedule.modes import MODES
from flashmem.schedule.plan import OverlapPlan, Strategy
from flashmem.target.descriptor import DeviceDescriptor

Report = Callable[[float], None]

SHARE = 0.1
MOST_SECONDS = 20.0
"""Of compilation's time, and at most: for checks of whole launches, after all else."""


@dataclass(frozen=True)
class BuildResult:
    """The kernels of a bundle for `device`: their cache `keys`, and the number `built` because the cache lacked them.

    `wrong`: by name, kernels that were found to be miscompiled now.
    """

    device: Device
    keys: tuple[str, ...]
    built: int
    wrong: Mapping[str, Finding]

    @property
    def of_configs(self) -> dict[str, Finding]:
        """The kernels among `wrong` in whose place another compilation can have others: all but chains, which have parts."""
        return {name: each for name, each in self.wrong.items() if not each.of_chain}


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
    """A context manager that builds kernels for the program cache, and checks them, in child processes while compilation
    continues; leaving it ends them."""

    def __init__(self, device: str = "auto", report: Report = lambda fraction: None) -> None:
        """Create a builder without starting anything.

        Args:
            device: the target of compilation, as for `flashmem.compile`.
            report: called with the fraction done, in `begin`, `poll` and `finish`.
        """
        self._asked = device
        self._report = report
        self._cache = ProgramCache()
        self._pool: ChildPool | None = None
        self._built = set[str]()
        self._sampled = set[str]()  # keys of texts
        self._checked = set[str]()  # keys of trials
        self._begun = monotonic()
        self._wrong: dict[str, Finding] = {}

    def __enter__(self) -> Self:
        return self

    def begin(self, request: BuildRequest) -> None:
        """Start building the missing kernels of a program, and checking those that nothing is known of. A repeated request
        costs nothing.

        Nothing is done if the device is not on this machine or the cache cannot be written.

        Raises:
            RunError: no process can be started.
        """
        self._begin(request)

    def poll(self) -> None:
        """Report the progress without waiting."""
        while self._pool is not None and self._pool.step(wait=False):
            self._report(self._pool.fraction)

    def wrong(self, descriptor: str) -> dict[str, Finding]:
        """What is known of kernels that the driver of a local device miscompiles, by name."""
        device = device_for(descriptor, self._asked)
        return {} if device is None else {each.name: each for each in Verdicts(device).wrong.values()}

    def finish(self, bundle: Bundle, known: Collection[str] | None = None) -> BuildResult | None:
        """Wait until all kernels of `bundle` are in the program cache, and a sample of each is checked.

        Then whole launches are checked, for another tenth of the time since this builder was made. Kernels that are wrong are
        built again with the options that are right; but if one is that is not among those `known`, it returns at once.

        Returns:
            None, with nothing built, if the device is not on this machine, or with a warning if the cache cannot be written.

        Raises:
            RunError: the driver refuses a kernel, or ends the process that builds it, or miscompiles it however it is built.
        """
        requests = requests_of(bundle)
        end: float | None = None
        wrong = -1
        while wrong < len(self._wrong):  # what is found asks for other builds
            wrong = len(self._wrong)
            keys: dict[str, None] = {}
            for request in requests:
                found = self._begin(request)
                if found is None:
                    return None
                device, wanted, missing = found
                keys |= dict.fromkeys(wanted)
                if missing:
                    warnings.warn(
                        f"the program cache {self._cache.folder} cannot be written, so kernels are built when they first run, "
                        f"and are not checked; set {VARIABLE} to a folder that can",
                        FlashmemWarning,
                        stacklevel=3,
                    )
                    return None
            if self._pool is None:
                break
            while self._pool.is_urgent and self._pool.step():
                self._report(self._pool.fraction)
            if end is None:
                end = monotonic() + min(MOST_SECONDS, SHARE * (monotonic() - self._begun))
            while self._pool.step(until=end):
                self._report(self._pool.fraction)
            if known is not None and not {name for name, each in self._wrong.items() if not each.of_chain} <= set(known):
                break
            self._pool.check("compile with --no-build to leave the kernels to the first run")
        return BuildResult(device, tuple(keys), len(self._built), self._wrong)

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
        wanted = {kernel_key(device, each, options): each for each in Verdicts(device).applied(kernels, options)}
        missing = {key: each for key, each in wanted.items() if key not in self._built and self._cache.read(key) is None}
        if missing and why_unusable(self._cache.folder) is not None:
            return device, tuple(wanted), True
        checks = ProgramChecks(kernels, program, device, self._note)
        samples = checks.samples(self._sampled)
        wholes = checks.jobs(leave=self._checked)
        self._built |= missing.keys()
        self._sampled |= set(checks.texts)
        self._checked |= {trial.key for job in wholes for trial in job.trials}
        if missing or samples or wholes:
            self._pool = self._pool or ChildPool(device)
            builds = build_jobs(missing, program, device, self._cache.write)
            self._pool.submit((*builds, *samples, *wholes), busy=1)  # one processor packs weights
            self._report(self._pool.fraction)
        return device, tuple(wanted), False

    def _note(self, finding: Finding) -> None:
        if finding.wrong:
            self._wrong[finding.name] = finding

    def __exit__(self, *exception: object) -> None:
        if self._pool is not None:
            self._pool.close()
        if self._built:
            self._cache.trim()


def kernels_of(
    request: BuildRequest, device: Device, *, all_chains: bool = False
) -> tuple[Program, tuple[RequiredKernel, ...]] | None:
    """The program as `device` runs it, and the kernels of a session without options: first and later runs, copies, chains;
    with `all_chains`, also those that are known to be wrong.

    None: the device cannot run it, or kernels with stream lanes are not known yet.
    """
    program, source = chained(request.program, request.source, request.descriptor, device, all_of_them=all_chains)
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
        slices = {part.name: part for part in program.slices}
        kind = lane_kind(program)
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
