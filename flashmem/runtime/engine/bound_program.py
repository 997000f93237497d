"""A program bound to a device: its weights, and its kernels with their arguments set to activations and weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from flashmem.base.errors import RunError
from flashmem.base.threads import call_each
from flashmem.program.launches import Launch, SteadyLaunch
from flashmem.runtime.engine.activations import Activations
from flashmem.runtime.engine.device_state import DeviceInUse
from flashmem.runtime.engine.executor import Executor
from flashmem.runtime.engine.opened import Kernels, OpenedBundle
from flashmem.runtime.engine.states import States
from flashmem.runtime.engine.steps import KernelSource, Resources, Step, make_steps
from flashmem.runtime.engine.weight_store import WeightStore
from flashmem.runtime.kernels.steady import needed_residents, usable_launches
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Queue
from flashmem.runtime.opencl.handles import DeviceMemory, KernelObject
from flashmem.runtime.streaming.interleaved import needed_slices
from flashmem.schedule.loads import staying
from flashmem.schedule.plan import OverlapPlan, PoolLayout
from flashmem.schedule.shared_memory import SharedLayout


@dataclass(frozen=True)
class Steady:
    """All launches, with `launches` in place of some of the first run's. They require the slices `needs` to be resident."""

    launches: tuple[SteadyLaunch, ...]
    needs: frozenset[str]
    executor: Executor


class NamedKernels(KernelSource, Protocol):
    """Kernels that can be looked up by name."""

    def __contains__(self, name: object) -> bool: ...


class _Either:
    """Kernels of one source, with a second source for names that the first lacks."""

    def __init__(self, one: NamedKernels, other: KernelSource) -> None:
        self._one = one
        self._other = other

    def kernel(self, name: str, arguments: Sequence[Any]) -> KernelObject:
        """A new kernel object with its arguments set. Raises RunError."""
        return (self._one if name in self._one else self._other).kernel(name, arguments)


class BoundKernels:
    """The launches of a model, with their kernels' arguments set."""

    def __init__(
        self,
        device: DeviceInUse,
        opened: OpenedBundle,
        kernels: Kernels,
        activations: Activations,
        states: States,
        weights: WeightStore,
    ) -> None:
        """Set the arguments of the first run's kernels.

        Raises:
            RunError: the device refuses.
        """
        self._device = device
        self._opened = opened
        self._kernels = kernels
        self._weights = weights
        transfer = weights.transfer
        assert activations.arena is not None
        memories = dict.fromkeys(opened.slices) if transfer.binds_late else transfer.memories
        self._resources: Resources | None = Resources(
            weights.ledger, activations.arena, activations.constants, memories, transfer.staged, states.memory
        )
        self._steady: Steady | None = None
        self._rebinds = True  # the steps of the first run differ from those of later runs
        self._executor: Executor | None
        self._bound: tuple[OverlapPlan, list[Step]] | None
        self._bind(weights.plan)

    def _bind(self, plan: OverlapPlan) -> None:
        assert self._resources is not None
        moves = self._opened.moves(plan)
        needs = needed_slices(plan, moves)
        steps = make_steps(self._opened.program, needs, moves, self._resources, self._kernels.plain, self._kernels.lane)
        self._executor = self._executor_of(steps)
        self._bound = plan, steps
        if not moves or plan.later() is plan:
            self._rebinds = False  # all runs have these steps

    def _executor_of(self, steps: Sequence[Step]) -> Executor:
        descriptor = self._opened.bundle.descriptor
        transfer = self._weights.transfer
        records = descriptor.command_buffers and not transfer.binds_late  # a recording keeps its arguments
        recorder = self._device.recorder(descriptor.probed) if records else None
        return Executor(self._device.queue, steps, recorder, transfer)

    @property
    def executor(self) -> Executor:
        """The executor of the current run."""
        assert self._executor is not None
        return self._executor if self._steady is None else self._steady.executor

    def ready_executor(self) -> Executor:
        """The executor of the next run, which does not copy resident slices again. Raises RunError."""
        if self._steady is None and self._rebinds and staying(self._weights.plan) <= self._weights.resident:
            self._bind(self._weights.plan.later())
            self._rebinds = False
        return self.executor

    def steady_launches(self) -> tuple[SteadyLaunch, ...]:
        """The steady launches that the next run can use with the slices that are resident and stay resident."""
        opened = self._opened
        weights = self._weights
        if not self._moves_no_more() <= weights.resident:
            return ()
        return usable_launches(opened.program, weights.resident, opened.moves(weights.plan.later()), weights.joined)

    def _moves_no_more(self) -> frozenset[str]:
        """The slices that the kernels of later runs do not copy."""
        return staying(self._weights.plan) if self._opened.transfer.by_kernels else frozenset()

    def bind_steady(self, steady: Sequence[SteadyLaunch], kernels: NamedKernels) -> Steady:
        """The launches of later runs: `steady` ones with kernels from `kernels`, the others unchanged.

        Another thread may call it while runs go on; `switch` installs the result. The places of weights must not change
        meanwhile.

        Raises:
            RunError: the device refuses.
        """
        assert self._resources is not None and self._bound is not None
        opened, weights, plan, (bound_for, steps) = self._opened, self._weights, self._weights.plan.later(), self._bound
        moves = opened.moves(plan)
        before = opened.moves(bound_for)
        parts = {joined.name: joined.parts for joined in opened.program.joined}
        wholes = {str(arg.value) for each in steady for arg in each.launch.args if arg.value in parts}
        found: dict[str, DeviceMemory | None] = {name: weights.joined(name, parts[name]) for name in wholes}
        joined = {name: memory for name, memory in found.items() if memory is not None}
        resources = replace(self._resources, weights={**self._resources.weights, **joined})
        instead: dict[int, Launch | None] = {}
        for each in steady:
            instead |= {**dict.fromkeys(range(each.first, each.last)), each.last: each.launch}
        same = {n: step for n, step in enumerate(steps, start=1) if n not in instead and moves.get(n) == before.get(n)}
        either = _Either(kernels, self._kernels.plain)
        needs = needed_slices(plan, moves)
        made = make_steps(opened.program, needs, moves, resources, either, self._kernels.lane, instead, same)
        stays = needed_residents(opened.program, steady) | self._moves_no_more()
        return Steady(tuple(steady), stays, self._executor_of(made))

    def switch(self, steady: Steady | None) -> None:
        """Use the result of `bind_steady` in the next runs, or the kernels of the first run (None). Call between two runs."""
        if steady is not self._steady:
            assert steady is None or steady.needs <= self._weights.resident
            self._steady = steady

    def forget(self) -> None:
        """Drop all kernel objects and the memory of their arguments."""
        self._executor = self._resources = self._bound = self._steady = None


class BoundProgram:
    """A program bound to a device under one plan, ready for a sequence of runs."""

    def __init__(
        self,
        device: DeviceInUse,
        opened: OpenedBundle,
        kernels: Kernels,
        plan: OverlapPlan,
        layout: PoolLayout,
        ledger: Ledger,
        queue: Queue,
        beside: BoundProgram | None = None,
    ) -> None:
        """Allocate memory, and set the kernels' arguments. Reads the constants through `queue`, but no weights.

        `beside`: another shape variant, in whose memory this one is bound (`has_room_for`).

        Raises:
            RunError: the device or the budget refuses; nothing is allocated then.
        """
        self.opened = opened
        self.ledger = ledger
        self._device = device
        self._compiled = kernels
        self.has_run = False
        try:
            if beside is None:
                self.states = States(opened.program, ledger, device.queue)
                self.weights = WeightStore(device, opened, ledger, plan, layout)
            else:
                before = beside.weights
                resident = before.keep_for(opened, plan, layout)
                beside.activations.leave()
                self.states = beside.states
                serves = before.serves(opened, layout)
                self.weights = WeightStore(
                    device, opened, ledger, plan, layout,
                    after=None if serves else before.transfer, beside=before.transfer if serves else None, resident=resident,
                )  # fmt: skip
            try:
                of = None if beside is None else beside.activations
                self.activations: Activations = Activations(device, opened, ledger, queue, of)
                self.kernels = BoundKernels(device, opened, kernels, self.activations, self.states, self.weights)
            except BaseException:
                self.weights.close()
                raise
        except BaseException:
            call_each(kernels.end_loading, ledger.close)  # the program may be bound again, with these kernels
            raise

    def has_room_for(self, opened: OpenedBundle, layout: PoolLayout) -> bool:
        """Whether another shape variant can be bound in the same memory, so that a session alternates without binding again.

        Those of a model with states can: they have as much memory as the largest (`compile`).
        """
        here = self.opened.program
        there = opened.program
        same = (here.arena_bytes, here.constants_bytes, here.hands_over) == (
            there.arena_bytes, there.constants_bytes, there.hands_over,
        )  # fmt: skip
        return (
            bool(there.states) and same and (self.weights.serves(opened, layout) or self.weights.has_room_for(opened, layout))
        )

    def take_turn(self, before: BoundProgram) -> None:
        """Continue in the memory that `before` has used since: another shape variant. Raises RunError."""
        weights = self.weights
        resident = before.weights.keep_for(self.opened, weights.plan, weights.layout)
        if isinstance(weights.layout, SharedLayout):  # no other variant loads to the places of slices that stay here
            resident |= weights.resident & staying(weights.plan)
        before.activations.leave()
        self.activations.enter(self._device.queue)
        weights.resident = resident

    def change_variant(self, opened: OpenedBundle, kernels: Kernels, plan: OverlapPlan, layout: PoolLayout) -> None:
        """Change to another shape variant of the bundle: its activations and constants replace the current ones.

        States keep their content. Weights that stay under both plans are not loaded again where `layout` has them in the same
        places. No run may be loading.

        Raises:
            RunError: the device or the budget refuses; the bound program can only be closed then.
        """
        self._save_kernels()
        stays = self.weights.keep_for(opened, plan, layout)
        self.kernels.forget()
        self.activations.give_back()
        after = self.weights.leave()
        self.opened = opened
        self._compiled = kernels
        self.has_run = False
        device = self._device
        ledger = self.ledger
        # First the weights, which frees what this variant has no use for: its activations may be larger.
        self.weights = WeightStore(device, opened, ledger, plan, layout, after=after, resident=stays)
        self.activations = Activations(device, opened, ledger, device.queue)
        self.kernels = BoundKernels(device, opened, kernels, self.activations, self.states, self.weights)

    def release_weights(self) -> None:
        """Free the places of all weights; activations stay. No run may be loading, and none can begin afterwards."""
        self.kernels.forget()
        self.weights.release()

    def rebind_weights(self, plan: OverlapPlan, layout: PoolLayout, kernels: Kernels) -> None:
        """After `release_weights`: allocate the places that another plan has for weights.

        Raises:
            RunError: the device or the budget refuses; the bound program can only be closed then.
        """
        self._compiled = kernels
        self.weights = WeightStore(self._device, self.opened, self.ledger, plan, layout)
        self.kernels = BoundKernels(self._device, self.opened, kernels, self.activations, self.states, self.weights)

    def ran(self, resident: frozenset[str]) -> None:
        """Record that a run is over and leaves these slices resident."""
        self.has_run = True
        self.weights.resident = resident

    def forget(self) -> None:
        """Drop all references to memory that another bound program owns, and save the kernels compiled in this process."""
        self._save_kernels()
        self.kernels.forget()
        self.activations.forget()

    def _save_kernels(self) -> None:
        """Save kernels compiled in this process to the cache, if all of them have run."""
        if self.has_run:
            with suppress(RunError):  # without the driver's binary, the next start compiles again
                self._compiled.save()

    def close(self) -> None:
        """Free everything."""
        tier = self.opened.tier
        with suppress(RunError):  # a lost device runs nothing that needs a wait, and has nothing to free
            call_each(
                self._save_kernels,
                self._compiled.end_loading,
                self._device.queue.finish,
                self.weights.close,
                self.activations.leave,
                None if tier is None else partial(tier.ledger.give_back, "staging"),
                self.kernels.forget,
                self.activations.forget,
                self.states.forget,
                self.ledger.close,
            )
