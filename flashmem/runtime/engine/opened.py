"""A bundle opened to run on a device, before any allocation: its weight file, tables, transfer mode and kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from flashmem.base.errors import RunError
from flashmem.base.threads import call_each
from flashmem.base.types import TransferMode
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.checksums import Checksum, table_blocks
from flashmem.program.lanes import lane_kind
from flashmem.program.program import Program, host_bytes, pinned_output_bytes
from flashmem.program.tensors import Slice
from flashmem.runtime.engine.device_state import DeviceInUse
from flashmem.runtime.engine.ports import ArrayTypes, array_types
from flashmem.runtime.kernels.builds import build_apart
from flashmem.runtime.kernels.cache import CachedKernels
from flashmem.runtime.kernels.cache_files import ProgramCache
from flashmem.runtime.kernels.device_chains import chained
from flashmem.runtime.kernels.required import RequiredKernel, required_kernels
from flashmem.runtime.kernels.verdicts import Verdicts
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.request.options import choose_host_budget
from flashmem.runtime.streaming.checked_table import CheckedTable
from flashmem.runtime.streaming.host_tier import HostTier
from flashmem.runtime.streaming.interleaved import LayerMoves, layer_moves
from flashmem.runtime.streaming.weight_file import Reader, WeightFile
from flashmem.schedule.host_tier import planned_there, reloaded, tier_bytes, tier_slices
from flashmem.schedule.loads import planned_loads, read_while_opening
from flashmem.schedule.modes import MODES
from flashmem.schedule.modes.kind import TransferKind
from flashmem.schedule.plan import OverlapPlan, PoolLayout
from flashmem.schedule.residency import Strategy, preload_all, preloaded_layout, session_bytes, streamed_layout
from flashmem.schedule.shared_memory import PlacedVariant, shared_layouts


def program_on(program: Program, device: Device) -> Program:
    """`program` as `device` runs it: outputs are copied unless kernels use host memory."""
    return program if device.uses_host_memory or not program.hands_over else replace(program, hands_over=False)


class OpenedBundle:
    """One shape variant of a bundle, with its weight file open. `close` closes the file, for all variants.

    `tier`: keeps slices of the file in host memory, for all variants; None: nothing does.
    """

    def __init__(
        self,
        bundle: Bundle,
        device: Device,
        mode: TransferMode,
        *,
        verify_weights: bool,
        lanes: bool = True,
        file: WeightFile | None = None,
        tier: HostTier | None = None,
    ) -> None:
        """Open the weight file.

        Args:
            verify_weights: compare every slice and table row that is read with its checksum.
            lanes: where kernels copy weights, whether they do it while they compute.
            file: the weight file, if another of the bundle's shape variants has opened it.
            tier: that variant's host tier.

        Raises:
            BundleError: the weight file is missing, or its length has changed.
        """
        program, source = chained(program_on(bundle.program, device), bundle.source, bundle.descriptor, device)
        self.bundle = bundle
        self.program = program
        self.source = source
        self.mode = mode
        self.lanes = lanes
        self.transfer: TransferKind = MODES[mode]
        self.tier = tier
        self._device = device
        self._verify_weights = verify_weights
        self.uses_host_memory = device.uses_host_memory
        self.slices = {part.name: part for part in program.slices}
        self.readable = program.readable()
        self.together = {part: self.readable[joined.name] for joined in program.joined for part in joined.parts}
        self.outputs = {port.name: port for port in program.outputs}
        self.tensors = {tensor.name: tensor for tensor in program.tensors}
        self.checksums: Mapping[str, Checksum] | None = bundle.checksums.slices if verify_weights else None
        self.segmented = not verify_weights  # a checksum covers a whole slice
        self.file = file or WeightFile(bundle.weights_path, program.weights_bytes)
        self.tables: list[Reader] = [
            CheckedTable(self.file, table_blocks(gather), values) if verify_weights else self.file
            for gather, values in zip(program.host_embeddings, bundle.checksums.tables, strict=True)
        ]

    def variant(self, bundle: Bundle) -> OpenedBundle:
        """Another shape variant of the bundle, opened with the same file."""
        return OpenedBundle(
            bundle, self._device, self.mode, verify_weights=self._verify_weights, lanes=self.lanes, file=self.file,
            tier=self.tier,
        )  # fmt: skip

    def moves(self, plan: OverlapPlan) -> dict[int, LayerMoves]:
        """The copies that kernels make in a run of `plan`, by launch; none in most modes."""
        if not self.transfer.by_kernels:
            return {}
        return layer_moves(plan, self.slices, lane_kind(self.program), lanes=self.lanes)

    def announce(self, plan: OverlapPlan, layout: PoolLayout) -> None:
        """Announce to the disk what a session reads first: constants, then the loads that wait for no launch."""
        program = self.program
        loads = planned_loads(plan, self.slices, layout, self.mode, preload=True)
        first = read_while_opening(loads, program, self.bundle.descriptor.rates)
        self.file.announce([(program.constants_offset, program.constants_bytes), *(load.place for load in first)])

    def close(self) -> None:
        """Close the weight file, and free the host tier; bound programs must be closed before."""
        tier = self.tier
        self.tier = None
        with suppress(RunError):  # a lost device has nothing to free
            call_each(None if tier is None else tier.close, self.file.close)


@dataclass(frozen=True)
class PlannedVariant:
    """A shape variant with its plan and layout in one transfer mode and strategy. `program` is as the device runs it.

    `shares_memory`: the device does, with the host.
    """

    bundle: Bundle
    program: Program
    plan: OverlapPlan
    layout: PoolLayout
    shares_memory: bool

    @cached_property
    def takes(self) -> ArrayTypes:
        """The arrays that a run takes. Raises ValueError like `numpy_dtype`."""
        return array_types(self.program.inputs)

    def needed(self) -> int:
        """Bytes that the budget of a session of this variant requires."""
        return session_bytes(self.program, self.layout, shares_memory=self.shares_memory)

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory, where the device does not share it: what loads pass through, copied outputs, conversions."""
        return self.layout.ring_bytes + host_bytes(self.program)


def planned_variant(bundle: Bundle, device: Device, mode: TransferMode, strategy: Strategy) -> PlannedVariant:
    """The bundle's own variant (`Bundle.index`), planned.

    Raises:
        UserError: the bundle was not compiled for that mode.
    """
    program = program_on(bundle.program, device)
    plan = bundle.plan
    shares = device.unified_memory
    if strategy == "preload":
        layout = preloaded_layout(program, mode, plan.loader_threads, shares_memory=shares)
        return PlannedVariant(bundle, program, preload_all(plan), layout, shares)
    return PlannedVariant(bundle, program, plan, streamed_layout(program, plan, mode, shares_memory=shares), shares)


def sharing_memory(
    variants: Sequence[PlannedVariant], device: Device, mode: TransferMode, limit: int | None
) -> list[PlannedVariant]:
    """The shape variants of a session with a budget of `limit` bytes, with weights in memory objects that they share.

    In a mode of pages they share those of the file. Without a limit, memory is at most that of the largest.
    """
    if len(variants) == 1 or MODES[mode].by_pages:
        return list(variants)
    room = max(each.layout.home_bytes for each in variants)
    if limit is not None:
        room = limit - max(each.needed() - each.layout.home_bytes for each in variants)
    placed = [PlacedVariant(each.plan, each.layout, each.program.slices) for each in variants]
    layouts = shared_layouts(placed, room, apart=not device.unified_memory)
    return [replace(each, layout=layout) for each, layout in zip(variants, layouts, strict=True)]


@dataclass(frozen=True)
class HostMemory:
    """The host memory of a session: its limit in bytes (None: no limit), and the slices to keep there beside the rest."""

    budget: int | None
    slices: tuple[Slice, ...]


def planned_host_memory(
    asked: int | str | None, variants: Sequence[PlannedVariant], device: Device, mode: TransferMode
) -> HostMemory | None:
    """The host memory of a session for the host budget that a user asked for (`choose_host_budget`).

    None where the budget counts it: device and host share it. Slices of the first of `variants` are kept first.

    Raises:
        UserError: as `choose_host_budget`.
    """
    staging = max(variant.host_bytes for variant in variants)
    again = reloaded((variant.plan, variant.program.slices) for variant in variants)
    outputs = max(pinned_output_bytes(variant.program) for variant in variants)
    weights = sum(map(tier_bytes, again)) + outputs
    budget = choose_host_budget(asked, staging, weights, mode=mode, shares_memory=device.unified_memory)
    if budget is None:
        return None if device.unified_memory else HostMemory(None, ())
    planned = planned_there((variant.plan, variant.program.slices) for variant in variants)
    return HostMemory(budget, tier_slices(again, max(0, budget - staging - outputs), planned))


class Kernels:
    """The kernels of a bundle on a device: `plain` ones, and those with an interleaved copy stream for runs of `plan`."""

    def __init__(self, opened: OpenedBundle, device: DeviceInUse, plan: OverlapPlan, *, apart: bool) -> None:
        """Load kernels from the cache or the bundle, and build the others; `apart`: in child processes.

        Raises:
            UserError: the kernels compute in half precision, and the device does not.
            RunError: the driver refuses the kernels, or is known to miscompile one.
        """
        program = opened.program
        cache = ProgramCache()

        def build(missing: Mapping[str, RequiredKernel]) -> Mapping[str, bytes]:
            return build_apart(missing, program, device.device, cache)

        moves = opened.moves(plan)
        verdicts = Verdicts(device.device)
        later = plan.later()
        later_moves = moves if later is plan or not moves else opened.moves(later)
        self.plain, self.lane = (
            CachedKernels(
                cache,
                device.context,
                program.build_options,
                verdicts.applied(wanted, program.build_options),
                opened.bundle.binaries or b"",
                build if apart else None,
                device.programs,
            )
            for wanted in required_kernels(program, opened.source, moves, later_moves)
        )

    def end_loading(self) -> None:
        """Wait until no thread loads kernels."""
        call_each(self.plain.end_loading, self.lane.end_loading)

    def close(self) -> None:
        """End loading, and let go of the kernels."""
        call_each(self.plain.close, self.lane.close)

    def save(self) -> None:
        """Save to the cache what this process has compiled; its kernels must all have run. Raises RunError."""
        for kernels in (self.plain, self.lane):
            kernels.save()
