"""A program bound to a device: its weights, and its kernels with their arguments set to activations and weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from flashmem.base.errors import RunError
from flashmem.program.launches import Launch, SteadyLaunch
from flashmem.runtime.engine.activations import Activations
from flashmem.runtime.engine.device_state import DeviceInUse
from flashmem.runtime.engine.executor import Executor, Resources, Step, make_steps
from flashmem.runtime.engine.executor import Kernels as AnyKernels
from flashmem.runtime.engine.opened import Kernels, OpenedBundle
from flashmem.runtime.kernels.steady import needed_residents, usable_launches
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Kernel, Memory, Queue
from flashmem.runtime.streaming.copied import InterleaveTransfer
from flashmem.runtime.streaming.interleaved import needed_slices
from flashmem.runtime.streaming.loader import LoaderRun
from flashmem.runtime.streaming.transfer import Transfer
from flashmem.runtime.streaming.transfer_modes import make_transfer
from flashmem.schedule.loads import Schedule, scheduled, staying
from flashmem.schedule.plan import OverlapPlan, PoolLayout
from flashmem.schedule.residency import share_places


class WeightStore:
    """Places for the slices of a model, a transfer that loads them there, and the names of those that are resident."""

    def __init__(
        self,
        device: DeviceInUse,
        opened: OpenedBundle,
        ledger: Ledger,
        plan: OverlapPlan,
        layout: PoolLayout,
        *,
        after: Transfer | None = None,
        resident: frozenset[str] = frozenset(),
    ) -> None:
        """Take places for the weights as `layout` has them.

        Args:
            after: the transfer of another shape variant, whose places are taken over (`places_for`).
            resident: the slices that are loaded there already.

        Raises:
            RunError: the device or the budget refuses.
        """
        self._opened, self._ledger = opened, ledger
        self.plan, self.layout, self.resident = plan, layout, resident
        self._last_schedule: tuple[object, Schedule] | None = None
        self._transfer: Transfer | None = make_transfer(
            opened.mode, device.context, ledger, opened.file, opened.program.slices, layout,
            device.shared_slices, opened.bundle.checksums.content_hashes, opened.checksums, opened.together, after,
        )  # fmt: skip

    @property
    def transfer(self) -> Transfer:
        """What loads slices."""
        assert self._transfer is not None
        return self._transfer

    def joined(self, whole: str, parts: Sequence[str]) -> Memory | None:
        """The memory of slices that are parts of the weight `whole`, as one buffer; None where they are apart."""
        opened = self._opened
        return self.transfer.joined(opened.readable[whole], [opened.slices[name] for name in parts])

    def follow(self, plan: OverlapPlan, layout: PoolLayout) -> None:
        """Have the next run follow another plan in the same places. In mode `map`, where no place depends on the plan."""
        self.plan, self.layout, self._last_schedule = plan, layout, None

    def schedule(self, *, kept: Collection[str] | None = None, done: int = 0) -> Schedule:
        """The loads and frees of the next run behind layer `done`, which leaves `kept` resident; None: what the plan keeps."""
        opened, resident = self._opened, self.resident
        key = (resident, None if kept is None else frozenset(kept), done)
        if self._last_schedule is None or self._last_schedule[0] != key:
            made = scheduled(
                self.plan, opened.slices, self.layout, opened.mode,
                resident=resident, kept=kept, done=done, segmented=opened.segmented,
            )  # fmt: skip
            self._last_schedule = key, made
        return self._last_schedule[1]

    def preload(self) -> None:
        """Load the preloaded set W, and wait for it. Raises RunError when a load fails."""
        loads = [load for load in self.schedule().loads if load.preload]
        if not loads:
            return
        with self.guarded():
            loader = LoaderRun(self.transfer, loads, {}, threads=self.layout.threads)
            try:
                for load in loads:
                    loader.wait(load.part.name)
            finally:
                loader.stop()
        self.resident |= {load.part.name for load in loads}

    def drop(self, names: Collection[str]) -> None:
        """Free resident slices, in a mode that can free slices one by one. No run may be loading."""
        for name in names:
            self.transfer.free(self._opened.slices[name])
        self.resident -= frozenset(names)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """While kernels read mapped files: nobody may cut these, as far as the system can promise that."""
        with ExitStack() as held:
            for file in self.transfer.files if self.transfer.in_place else ():
                held.enter_context(file.guarded())
            yield

    def check_files(self) -> None:
        """Raise RunError if somebody is about to change a file that is mapped, or has cut it."""
        for file in self.transfer.files:
            file.check()

    def keep_for(self, plan: OverlapPlan) -> frozenset[str]:
        """The resident slices that stay for another shape variant with `plan`; all others are freed where that is possible."""
        mode = self._opened.mode
        stays = staying(plan) & self.resident
        if mode == "interleave" and stays != staying(plan):  # kernels would move slices that are in their places already
            stays = frozenset()
        if mode == "map":
            self.drop(self._opened.slices.keys() - stays)
        return stays

    def places_for(self, opened: OpenedBundle, layout: PoolLayout) -> Transfer | None:
        """The transfer whose places another shape variant takes over; None, and all are released, if `layout` has others."""
        if not share_places(self.layout, layout, opened.mode, slices=(self._opened.slices, opened.slices)):
            self.release()
            return None
        self.transfer.leave()
        self._ledger.give_back("staging")
        return self.transfer

    def release(self) -> None:
        """Give all places back to the device. No run may be loading, and none can begin."""
        self.close()
        self._ledger.give_back("weights", "staging")

    def close(self) -> None:
        """End the transfer. The ledger still holds the memory."""
        self.resident = frozenset()
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.close()


@dataclass(frozen=True)
class Steady:
    """All layers, with `launches` instead of some of the first run's. They can run while the slices `needs` are resident."""

    launches: tuple[SteadyLaunch, ...]
    needs: frozenset[str]
    executor: Executor


class NamedKernels(AnyKernels, Protocol):
    """Kernels that can be asked for by name."""

    def __contains__(self, name: object) -> bool: ...


class _Either:
    """Kernels of one source, and those of another one for names that the first lacks."""

    def __init__(self, one: NamedKernels, other: AnyKernels) -> None:
        self._one, self._other = one, other

    def kernel(self, name: str, arguments: Sequence[Any]) -> Kernel:
        """A kernel object of its own with its arguments set. Raises RunError."""
        return (self._one if name in self._one else self._other).kernel(name, arguments)


class BoundKernels:
    """The layers of a model with their kernels' arguments set."""

    def __init__(
        self, device: DeviceInUse, opened: OpenedBundle, kernels: Kernels, activations: Activations, weights: WeightStore
    ) -> None:
        """Set the arguments of the first run's kernels.

        Raises:
            RunError: the device refuses.
        """
        self._device, self._opened, self._kernels, self._weights = device, opened, kernels, weights
        transfer = weights.transfer
        staged = transfer.staged if isinstance(transfer, InterleaveTransfer) else {}
        assert activations.arena is not None
        self._resources: Resources | None = Resources(
            device.context, activations.arena, activations.constants, transfer.memories, staged
        )
        self._steady: Steady | None = None
        self._rebinds = True  # the first run has other steps than later ones
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
            self._rebinds = False  # every run has these steps

    def _executor_of(self, steps: Sequence[Step]) -> Executor:
        recorder = self._device.recorder if self._opened.bundle.descriptor.command_buffers else None
        return Executor(self._device.queue, steps, recorder, self._weights.transfer)

    @property
    def executor(self) -> Executor:
        """The layers of the run under way."""
        assert self._executor is not None
        return self._executor if self._steady is None else self._steady.executor

    def ready_executor(self) -> Executor:
        """The layers of the next run: slices that stayed are not moved again. Raises RunError."""
        if self._steady is None and self._rebinds and staying(self._weights.plan) <= self._weights.resident:
            self._bind(self._weights.plan.later())
            self._rebinds = False
        return self.executor

    def steady_launches(self) -> tuple[SteadyLaunch, ...]:
        """The steady launches that the next run can have, which finds what is resident and leaves it there."""
        opened, weights = self._opened, self._weights
        if not self._moves_no_more() <= weights.resident:
            return ()
        return usable_launches(opened.program, weights.resident, opened.moves(weights.plan.later()), weights.joined)

    def _moves_no_more(self) -> frozenset[str]:
        """The slices that kernels bound for later runs do not move."""
        return staying(self._weights.plan) if self._opened.mode == "interleave" else frozenset()

    def bind_steady(self, steady: Sequence[SteadyLaunch], kernels: NamedKernels) -> Steady:
        """The layers of later runs with `steady` among them, whose new kernels are in `kernels`.

        Another thread than that of the runs may call it while they go on; `switch` takes the result. The places of weights must
        stay meanwhile.

        Raises:
            RunError: the device refuses.
        """
        assert self._resources is not None and self._bound is not None
        opened, weights, plan, (bound_for, steps) = self._opened, self._weights, self._weights.plan.later(), self._bound
        moves, before = opened.moves(plan), opened.moves(bound_for)
        parts = {joined.name: joined.parts for joined in opened.program.joined}
        wholes = {str(arg.value) for each in steady for arg in each.launch.args if arg.value in parts}
        found: dict[str, Memory | None] = {name: weights.joined(name, parts[name]) for name in wholes}
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
        """Have the next runs launch what `bind_steady` gave, or the kernels of the first run. Between two runs."""
        assert steady is None or steady.needs <= self._weights.resident
        self._steady = steady

    def forget(self) -> None:
        """Drop all kernel objects and what their arguments refer to."""
        self._executor = self._resources = self._bound = self._steady = None


class BoundProgram:
    """A program bound to a device under one plan, ready for one run after the other."""

    def __init__(
        self,
        device: DeviceInUse,
        opened: OpenedBundle,
        kernels: Kernels,
        plan: OverlapPlan,
        layout: PoolLayout,
        ledger: Ledger,
        queue: Queue,
    ) -> None:
        """Allocate, and set the kernels' arguments. Reads the constants by way of `queue`, no weights.

        Raises:
            RunError: the device or the budget refuses; nothing is held then.
        """
        self.opened, self.ledger, self._device, self._compiled = opened, ledger, device, kernels
        self.has_run = False
        try:
            self.activations = Activations(device, opened, ledger, queue)
            self.weights = WeightStore(device, opened, ledger, plan, layout)
            try:
                self.kernels = BoundKernels(device, opened, kernels, self.activations, self.weights)
            except BaseException:
                self.weights.close()
                raise
        except BaseException:
            kernels.close()
            ledger.close()
            raise

    def change_variant(self, opened: OpenedBundle, kernels: Kernels, plan: OverlapPlan, layout: PoolLayout) -> None:
        """Run another shape variant of the bundle from now on: its activations and constants replace those that are here.

        Weights stay resident if `layout` has them in the same places. No run may be loading.

        Raises:
            RunError: the device or the budget refuses; the bound program can only be closed then.
        """
        self._save_kernels()
        stays = self.weights.keep_for(plan)
        self.kernels.forget()
        self.activations.give_back()
        after = self.weights.places_for(opened, layout)
        self.opened, self._compiled, self.has_run = opened, kernels, False
        device, ledger = self._device, self.ledger
        self.activations = Activations(device, opened, ledger, device.queue)
        resident = frozenset[str]() if after is None else stays
        self.weights = WeightStore(device, opened, ledger, plan, layout, after=after, resident=resident)
        self.kernels = BoundKernels(device, opened, kernels, self.activations, self.weights)

    def release_weights(self) -> None:
        """Give the places of all weights back; activations stay. No run may be loading, and none can begin."""
        self.kernels.forget()
        self.weights.release()

    def rebind_weights(self, plan: OverlapPlan, layout: PoolLayout, kernels: Kernels) -> None:
        """After `release_weights`: take the places that another plan has for weights.

        Raises:
            RunError: the device or the budget refuses; the bound program can only be closed then.
        """
        self._compiled = kernels
        self.weights = WeightStore(self._device, self.opened, self.ledger, plan, layout)
        self.kernels = BoundKernels(self._device, self.opened, kernels, self.activations, self.weights)

    def ran(self, resident: frozenset[str]) -> None:
        """A run is over; it leaves these slices resident."""
        self.has_run, self.weights.resident = True, resident

    def _save_kernels(self) -> None:
        """Put kernels that were compiled here into the cache, if they have all run."""
        if self.has_run:
            with suppress(RunError):  # a driver that cannot give its binary costs a compilation next time
                self._compiled.save()

    def close(self) -> None:
        """Give everything back."""
        self._save_kernels()
        self._compiled.close()
        with suppress(RunError):  # a lost device has nothing left to wait for
            self._device.queue.finish()
        with suppress(RunError):  # nor to give back
            self.weights.close()
        self.kernels.forget()
        self.activations.forget()
        with suppress(RunError):
            self.ledger.close()
