"""The shape variants of a bundle on a device: which one is bound, with which kernels, and the warm-up of its later runs."""

from __future__ import annotations

from flashmem.base.threads import call_each
from flashmem.runtime.engine.bound_program import BoundProgram
from flashmem.runtime.engine.device_state import DeviceInUse
from flashmem.runtime.engine.opened import Kernels, OpenedBundle
from flashmem.runtime.engine.warm_up import WarmUp
from flashmem.runtime.memory.ledger import Ledger
from flashmem.runtime.opencl.context import Queue
from flashmem.schedule.plan import OverlapPlan, PoolLayout


class Bindings:
    """One shape variant is `opened`, and `bound` unless that is None. Others may be bound in the same memory, and wait.

    No loads may be under way where a method changes what is bound.
    """

    def __init__(self, opened: OpenedBundle, device: DeviceInUse, *, apart: bool, warms_up: bool) -> None:
        """Allocates nothing yet. `apart`, `warms_up`: see `Engine`."""
        self.opened = opened
        self.device = device
        self.bound: BoundProgram | None = None
        self._apart = apart
        self._warms_up = warms_up
        self.warm_up = self._new_warm_up()
        self._kernels: dict[int, tuple[OverlapPlan, Kernels]] = {}  # by shape variant
        self._waiting: dict[int, tuple[BoundProgram, WarmUp | None]] = {}  # by shape variant

    def _new_warm_up(self) -> WarmUp | None:
        if not self._warms_up or not self.opened.program.steady:
            return None
        return WarmUp(self.opened, self.device, apart=self._apart)

    def kernels_for(self, plan: OverlapPlan) -> Kernels:
        """The kernels for runs of `plan`. They depend on the plan where they copy weights.

        Raises:
            UserError: the kernels compute in half precision, and the device does not.
            RunError: the driver refuses them.
        """
        index = self.opened.bundle.index
        if index in self._kernels:
            planned, kernels = self._kernels[index]
            if not self.opened.transfer.by_kernels or planned is plan:
                return kernels
            kernels.close()  # a thread may still be loading kernels that only later runs use
        kernels = Kernels(self.opened, self.device, plan, apart=self._apart)
        self._kernels[index] = plan, kernels
        return kernels

    def bind(self, plan: OverlapPlan, layout: PoolLayout, ledger: Ledger, queue: Queue) -> None:
        """Bind the program: allocate its memory under `plan`, and read the constants through `queue`.

        Raises:
            RunError: the device or the budget refuses; nothing is allocated then.
        """
        self.bound = BoundProgram(self.device, self.opened, self.kernels_for(plan), plan, layout, ledger, queue)

    def change_variant(self, opened: OpenedBundle, plan: OverlapPlan, layout: PoolLayout) -> None:
        """Change to another shape variant of the bundle, in the memory of this one; weights of both stay resident.

        Where their memory is alike, both stay bound.

        Raises:
            RunError: the device or the budget refuses; all can only be closed then.
        """
        bound = self.bound
        assert bound is not None
        if bound.has_room_for(opened, layout):
            self._alternate(bound, opened, plan, layout)
            return
        self.close_warm_ups()
        self._end_waiting()
        self.opened = opened
        self.warm_up = self._new_warm_up()
        bound.change_variant(opened, self.kernels_for(plan), plan, layout)

    def _alternate(self, before: BoundProgram, opened: OpenedBundle, plan: OverlapPlan, layout: PoolLayout) -> None:
        """Change to another shape variant that is, or will be, bound in the same memory as `before`."""
        self._waiting[self.opened.bundle.index] = before, self.warm_up
        self.opened = opened
        after, warm_up = self._waiting.pop(opened.bundle.index, (None, None))
        if after is None:
            warm_up = self._new_warm_up()
            kernels = self.kernels_for(plan)
            after = BoundProgram(self.device, opened, kernels, plan, layout, before.ledger, self.device.queue, before)
        else:
            after.take_turn(before)
        self.bound = after
        self.warm_up = warm_up

    def _end_waiting(self) -> None:
        """Drop the other shape variants that are bound."""
        waiting = self._waiting
        self._waiting = {}
        for bound, warm_up in waiting.values():
            call_each(None if warm_up is None else warm_up.close, bound.forget)

    def rebind_weights(self, plan: OverlapPlan, layout: PoolLayout) -> None:
        """Free the memory of all weights, and bind the program under `plan`; activations and states stay.

        Raises:
            RunError: the device or the budget refuses; all can only be closed then.
        """
        assert self.bound is not None
        self._end_waiting()
        self.release_weights()
        self.bound.rebind_weights(plan, layout, self.kernels_for(plan))

    def release_weights(self) -> None:
        """Free the memory of all weights; activations stay."""
        assert self.bound is not None
        if self.warm_up is not None:
            self.warm_up.leave()
        self.bound.release_weights()

    def unbind(self) -> None:
        """Free all memory. The model can be bound again."""
        call_each(self._end_waiting, self._leave_bound)

    def _leave_bound(self) -> None:
        bound = self.bound
        self.bound = None
        if bound is not None:
            call_each(None if self.warm_up is None else self.warm_up.leave, bound.close)

    def close_warm_ups(self) -> None:
        """End the warm-ups of all variants."""
        warm_ups = [self.warm_up, *(warm_up for _, warm_up in self._waiting.values())]
        self.warm_up = None
        call_each(*(warm_up.close for warm_up in warm_ups if warm_up is not None))

    def close_kernels(self) -> None:
        """Let go of the kernels."""
        call_each(*(kernels.close for _, kernels in self._kernels.values()))
