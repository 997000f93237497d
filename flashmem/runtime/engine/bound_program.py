"""What lives with a placement: where activations, constants and weights lie under one plan, and the kernels bound to them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import RunError
from flashmem.bundle.checksums import checksum
from flashmem.program.launches import Launch, SteadyLaunch
from flashmem.program.program import output_bytes, scratch_bytes
from flashmem.program.tensors import Port, array_bytes
from flashmem.runtime.engine.device_state import DeviceInUse
from flashmem.runtime.engine.executor import Executor, Resources, Step, make_steps
from flashmem.runtime.engine.opened import Kernels, OpenedBundle
from flashmem.runtime.kernels.steady import Either, NamedKernels, Steady, needed_residents, playable
from flashmem.runtime.memory.arena import Bytes, move_out, new_pages
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Event, Memory, Queue
from flashmem.runtime.streaming.copied import InterleaveTransfer
from flashmem.runtime.streaming.interleaved import needed_slices
from flashmem.runtime.streaming.loader import LoaderRun
from flashmem.runtime.streaming.transfer import Transfer
from flashmem.runtime.streaming.transfer_modes import make_transfer
from flashmem.schedule.loads import Schedule, scheduled, staying
from flashmem.schedule.plan import OverlapPlan, PoolLayout
from flashmem.schedule.residency import share_places

Array = NDArray[Any]


class Placement:
    """A bundle on a device, ready for one run after the other."""

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
        """Allocate and set the kernels' arguments. Reads the constants by way of `queue`, no weights.

        Raises:
            RunError: the device or the budget refuses; nothing is held then.
        """
        self.opened, self.ledger, self._device, self._kernels = opened, ledger, device, kernels
        self.resident: frozenset[str] = frozenset()  # slices that the next run finds
        self.has_run = False
        self._host: Bytes | None = None
        self._arena: Memory | None = None
        self._places: tuple[Memory | None, Memory | None] = None, None
        self._ports: dict[str, Memory] = {}
        self._transfer: Transfer | None = None
        self._resources: Resources | None = None
        self._executor: Executor | None = None
        self._bound: tuple[OverlapPlan, list[Step]] | None = None
        self._steady: Steady | None = None
        try:
            self._make_room(queue)
            self._lay_out(plan, layout)
        except BaseException:
            kernels.close()
            if self._transfer is not None:
                self._transfer.close()
            self.ledger.close()
            raise

    def _make_room(self, queue: Queue) -> None:
        """All that is there whatever the plan."""
        opened, program, context = self.opened, self.opened.program, self._device.context
        arena = self._make_arena()
        constants = self._load_constants(queue)
        self.ledger.reserve("outputs", output_bytes(program), "the arrays that outputs are copied to")
        self.ledger.reserve("staging", scratch_bytes(program), "conversion of inputs and outputs")
        self._places = arena, constants
        ports = (
            {port.tensor for port in (*program.inputs, *program.outputs)}
            | {g.tensor for g in program.host_embeddings}
            | {program.status}
        )
        self._ports = {
            name: context.sub_buffer(arena, tensor.offset, tensor.nbytes)
            for name, tensor in opened.tensors.items()
            if name in ports
        }

    def become(self, opened: OpenedBundle, kernels: Kernels, plan: OverlapPlan, layout: PoolLayout) -> None:
        """Play another shape variant of the bundle from now on: its activations and constants take the place of those that are
        here. Weights stay that are resident, if they lie where `layout` has them. No run may be loading.

        Raises:
            RunError: the device or the budget refuses; the placement can only be closed then.
        """
        if self.has_run:
            with suppress(RunError):  # as in `close`
                self._kernels.save()
        left, before = self.opened, self.transfer
        mode = opened.mode
        stays = staying(plan) & self.resident
        if mode == "interleave" and stays != staying(plan):  # kernels would move what is at home already
            stays = frozenset()
        if mode == "map":
            self.drop(left.slices.keys() - stays)
        self._executor = self._resources = self._bound = self._steady = None
        self._ports.clear()
        self._arena = self._host = None
        self._places = None, None
        self.ledger.give_back("arena", "constants")
        self.ledger.release("outputs", output_bytes(left.program))
        self.ledger.release("staging", scratch_bytes(left.program))
        if share_places(self.layout, layout, mode, slices=(left.slices, opened.slices)):
            before.leave()
            self.ledger.give_back("staging")
            after: Transfer | None = before
        else:
            before.close()
            self._transfer = None
            self.ledger.give_back("weights", "staging")
            after, stays = None, frozenset()
        self.resident = stays
        self.opened, self._kernels, self.has_run = opened, kernels, False
        self._make_room(self._device.queue)
        self._lay_out(plan, layout, after)

    def _make_arena(self) -> Memory:
        """The arena; in `_host`, where it is host memory, as the host sees it."""
        program, what = self.opened.program, "the activation arena"
        if not program.hands_over:
            self._arena = self.ledger.buffer("arena", program.arena_bytes, what)
        else:
            self._host = new_pages(program.arena_bytes)[: program.arena_bytes]
            self._arena = self.ledger.wrapped("arena", self._host, what)
        return self._arena

    def _load_constants(self, queue: Queue) -> Memory | None:
        program, file = self.opened.program, self.opened.file
        if not program.constants_bytes:
            return None
        constants = self.ledger.buffer("constants", program.constants_bytes, "the constants", host_visible=True)
        view = queue.map(constants, program.constants_bytes, invalidate=True)
        try:
            file.read_into(view, program.constants_offset)
            file.compare_checksum("the part with the constants", checksum(view.data), self.opened.bundle.checksums.constants)
        finally:  # memory that is mapped must not be released
            written = queue.unmap(view)
        if queue is not self._device.queue:
            self._device.queue.follow([written])  # kernels read them there
        return constants

    def _lay_out(self, plan: OverlapPlan, layout: PoolLayout, after: Transfer | None = None) -> None:
        """Places for the weights under `plan`, those of `after` if it is given, and kernels bound to them."""
        opened, context = self.opened, self._device.context
        self.plan, self.layout = plan, layout
        self._last_schedule: tuple[object, Schedule] | None = None
        self._rebinds = True  # the first run has other steps than later ones
        self._transfer = make_transfer(
            opened.mode, context, self.ledger, opened.file, opened.program.slices, layout,
            self._device.places, opened.bundle.checksums.content_hashes, opened.checksums, opened.together, after,
        )  # fmt: skip
        staged = self.transfer.staged if isinstance(self.transfer, InterleaveTransfer) else {}
        arena, constants = self._places
        assert arena is not None
        self._resources = Resources(context, arena, constants, self.transfer.memories, staged)
        self._bind(plan)

    def _bind(self, plan: OverlapPlan) -> None:
        assert self._resources is not None
        moves = self.opened.moves(plan)
        needs = needed_slices(plan, moves)
        steps = make_steps(self.opened.program, needs, moves, self._resources, self._kernels.plain, self._kernels.lane)
        self._executor = self._played(steps)
        self._bound = plan, steps
        if not moves or plan.later() is plan:
            self._rebinds = False  # every run has these steps

    def _played(self, steps: Sequence[Step]) -> Executor:
        recorder = self._device.recorder if self.opened.bundle.descriptor.command_buffers else None
        return Executor(self._device.queue, steps, recorder, self.transfer)

    def steady_launches(self) -> tuple[SteadyLaunch, ...]:
        """What the next run can play instead of some layers, which finds what is resident and leaves it there."""
        opened = self.opened
        if not self._moves_no_more() <= self.resident:
            return ()
        return playable(opened.program, self.resident, opened.moves(self.plan.later()), self._joined)

    def _moves_no_more(self) -> frozenset[str]:
        """What kernels that are bound for later runs do not move."""
        return staying(self.plan) if self.opened.mode == "interleave" else frozenset()

    def _joined(self, whole: str, parts: Sequence[str]) -> Memory | None:
        opened = self.opened
        return self.transfer.joined(opened.readable[whole], [opened.slices[name] for name in parts])

    def bind_steady(self, steady: Sequence[SteadyLaunch], kernels: NamedKernels) -> Steady:
        """The layers of later runs with `steady` among them, whose new kernels are in `kernels`.

        For another thread than that of the runs, which may go on; `switch` takes it. The places of weights must stay meanwhile.

        Raises:
            RunError: the device refuses.
        """
        assert self._resources is not None and self._bound is not None
        opened, plan, (bound_for, steps) = self.opened, self.plan.later(), self._bound
        moves, before = opened.moves(plan), opened.moves(bound_for)
        parts = {joined.name: joined.parts for joined in opened.program.joined}
        wholes = {str(arg.value) for each in steady for arg in each.launch.args if arg.value in parts}
        joined = {name: memory for name in wholes if (memory := self._joined(name, parts[name])) is not None}
        resources = replace(self._resources, weights={**self._resources.weights, **joined})
        instead: dict[int, Launch | None] = {}
        for each in steady:
            instead |= {**dict.fromkeys(range(each.first, each.last)), each.last: each.launch}
        same = {n: step for n, step in enumerate(steps, start=1) if n not in instead and moves.get(n) == before.get(n)}
        either = Either(kernels, self._kernels.plain)
        needs = needed_slices(plan, moves)
        made = make_steps(opened.program, needs, moves, resources, either, self._kernels.lane, instead, same)
        stays = needed_residents(opened.program, steady) | self._moves_no_more()
        return Steady(tuple(steady), stays, self._played(made))

    def switch(self, steady: Steady | None) -> None:
        """Play the next runs by what `bind_steady` gave, or by the launches of the first one. Between two runs."""
        assert steady is None or steady.needs <= self.resident
        self._steady = steady

    def let_weights_go(self) -> None:
        """Give the places of all weights back; activations stay. No run may be loading, and none can begin."""
        self.resident = frozenset()
        self._executor = self._resources = self._bound = self._steady = None
        self.transfer.close()
        self._transfer = None
        self.ledger.give_back("weights", "staging")

    def lay_out_again(self, plan: OverlapPlan, layout: PoolLayout, kernels: Kernels) -> None:
        """After `let_weights_go`: take the places that another plan has for weights.

        Raises:
            RunError: the device or the budget refuses; the placement can only be closed then.
        """
        self._kernels = kernels
        self._lay_out(plan, layout)

    def follow(self, plan: OverlapPlan, layout: PoolLayout) -> None:
        """Have the next run follow another plan in the same places, in mode `map`: no place there is the plan's."""
        self.plan, self.layout, self._last_schedule = plan, layout, None

    @property
    def transfer(self) -> Transfer:
        """What brings weights in."""
        assert self._transfer is not None
        return self._transfer

    @property
    def executor(self) -> Executor:
        """The layers, bound to what is here."""
        assert self._executor is not None
        return self._executor if self._steady is None else self._steady.executor

    def ready_executor(self) -> Executor:
        """The layers as the next run plays them: what was kept is not moved again. Raises RunError."""
        if self._steady is None and self._rebinds and staying(self.plan) <= self.resident:
            self._bind(self.plan.later())
            self._rebinds = False
        return self.executor

    def schedule(self, *, kept: Collection[str] | None = None, done: int = 0) -> Schedule:
        """The next run, as `scheduled` has it: with what is resident now."""
        opened, resident = self.opened, self.resident
        key = (resident, None if kept is None else frozenset(kept), done)
        if self._last_schedule is None or self._last_schedule[0] != key:
            made = scheduled(
                self.plan, opened.slices, self.layout, opened.mode,
                resident=resident, kept=kept, done=done, segmented=opened.segmented,
            )  # fmt: skip
            self._last_schedule = key, made
        return self._last_schedule[1]

    def preload(self) -> None:
        """Make W resident. Raises RunError when a load fails."""
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
        """Let resident slices go, in a mode that can let slices go one by one; no run may be loading."""
        for name in names:
            self.transfer.free(self.opened.slices[name])
        self.resident -= frozenset(names)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Held while kernels or checks read mapped files, if they do."""
        with ExitStack() as held:
            for file in self.transfer.files if self.transfer.in_place else ():
                held.enter_context(file.guarded())
            yield

    def check_files(self) -> None:
        """Raise RunError if somebody is about to change a file that is mapped, or has cut it."""
        for file in self.transfer.files:
            file.check()

    def settle(self, resident: frozenset[str]) -> None:
        """A run is over, after which these slices are resident."""
        self.has_run, self.resident = True, resident

    def write(self, tensor: str, data: NDArray[Any]) -> None:
        """Fill a tensor of a port from host memory: no second copy of it is made that the ledger does not count."""
        if not data.nbytes:
            return
        port, queue = self._ports[tensor], self._device.queue
        if data.flags.c_contiguous:
            queue.write(port, data)
        elif self._host is not None:
            view = queue.map(port, data.nbytes, invalidate=True)
            try:
                np.copyto(view.view(data.dtype).reshape(data.shape), data)
            finally:
                queue.unmap(view)
        else:  # in pieces that fit where outputs and conversions have their place, which are not there yet
            program, size = self.opened.program, data.itemsize
            count = max(1, max(scratch_bytes(program), output_bytes(program)) // size)
            for first in range(0, data.size, count):
                queue.write(port, data.flat[first : first + count], offset=first * size)

    def read(self, data: NDArray[Any], tensor: str) -> None:
        """Read a tensor of a port into contiguous host memory."""
        if data.nbytes:
            self._device.queue.read(data, self._ports[tensor])

    def read_later(self, data: NDArray[Any], tensor: str) -> Event:
        """Read a tensor of a port behind the layers that are enqueued; the event completes when it is there."""
        return self._device.queue.read_later(data, self._ports[tensor])

    def hand_over(self, ports: Sequence[Port]) -> dict[str, Array]:
        """Outputs by name, as arrays that were their places in the arena. Nothing can be read from it before the next run."""
        if self._host is None or not ports:
            return {}
        tensors, queue = self.opened.tensors, self._device.queue
        places = [(tensors[str(port.tensor)].offset, array_bytes(port)) for port in ports]
        view = queue.map(self._arena, self._host.nbytes)  # the host may look at it now
        if view.ctypes.data == self._host.ctypes.data:
            taken = move_out(self._host, places)
        else:  # a driver that has the buffer elsewhere, too
            taken = [view[offset : offset + nbytes].copy() for offset, nbytes in places]
        queue.unmap(view)
        return {port.name: data.view(port.dtype).reshape(port.shape) for port, data in zip(ports, taken, strict=True)}

    def close(self) -> None:
        """Give everything back. Kernels that were compiled go into the cache if they have all run."""
        if self.has_run:
            with suppress(RunError):  # a driver that cannot give its binary costs a compilation next time
                self._kernels.save()
        self._kernels.close()
        with suppress(RunError):  # a lost device has nothing left to wait for
            self._device.queue.finish()
        if self._transfer is not None:
            with suppress(RunError):  # nor to give back
                self._transfer.close()
        self._ports.clear()
        self._arena = self._host = self._executor = self._resources = self._bound = self._steady = None
        self._places = None, None
        with suppress(RunError):
            self.ledger.close()
