"""The engine of a session: it follows the session's plans, for the shapes of a run's inputs and within a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from numpy.typing import NDArray

from flashmem.base.errors import BudgetError, RunError
from flashmem.runtime.engine.device_state import DeviceInUse
from flashmem.runtime.engine.engine import Engine
from flashmem.runtime.engine.given_arrays import Input, arrays_by_name
from flashmem.runtime.engine.opened import PlannedVariant
from flashmem.runtime.engine.output_values import OutputValue
from flashmem.runtime.engine.ports import are_exactly, chosen_outputs, fitting_variant
from flashmem.runtime.engine.report import RunReport
from flashmem.runtime.engine.run import BoundMemory
from flashmem.runtime.engine.session_plans import SessionPlans
from flashmem.runtime.engine.states import States
from flashmem.runtime.engine.stopping import RunControl, RunStoppedError
from flashmem.runtime.kernels.background_check import BackgroundCheck
from flashmem.runtime.streaming.host_tier import HostTier

Array = NDArray[Any]
Result = TypeVar("Result")


class PlannedEngine:
    """An engine that runs the shape variant of `plans` that fits a run's inputs. One thread at a time calls its methods.

    They raise RunError if it is closed. A failure of the device closes it.
    """

    def __init__(self, engine: Engine, plans: SessionPlans, *, prefetches: bool, check: BackgroundCheck | None) -> None:
        """`prefetches`: whether a run begins the loads of the next one. `check`: checks its kernels between runs."""
        self.engine = engine
        self.plans = plans
        self.check = check
        self.last_run: RunReport | None = None
        self._memory = BoundMemory(engine)
        self._prefetches = prefetches

    def bind(self, in_use: DeviceInUse) -> None:
        """Bind the program. What needs no context comes first, since that is still being made.

        Raises:
            RunError: the device or the budget refuses.
        """
        plans = self.plans
        engine = self.engine
        plan = plans.ready.plan
        layout = plans.ready.layout
        engine.opened.announce(plan, layout)
        engine.bindings.kernels_for(plan)  # reads those that are compiled
        in_use.open()
        if plans.host is not None:
            engine.opened.tier = HostTier(in_use.context, plans.host.budget, plans.host.slices)
        engine.bindings.bind(plan, layout, in_use.ledger(), in_use.queue)

    def run(
        self,
        output_names: Sequence[str] | None,
        kept_names: Sequence[str],
        inputs: Mapping[str, Any],
        control: RunControl,
        *,
        since: float,
    ) -> tuple[list[Array], list[OutputValue]]:
        """One run: the outputs `output_names` in host memory (None: all), and those that stay on the device.

        Raises:
            ValueError: see `Session.run`.
            RunStoppedError: `control` ended it.
            RunError: it failed.
        """
        if self.engine.failure is not None:
            raise RunError(f"the session is closed ({self.engine.failure}); open a new one")
        if control.stops():
            raise RunStoppedError("the run was stopped before it began")
        program = self.plans.ready.program
        names = [] if kept_names and output_names == [] else chosen_outputs(program.outputs, output_names)
        kept_names = chosen_outputs(program.outputs, kept_names) if kept_names else []
        variant, given = self._fitting(inputs)
        if program.states:
            self.states.check_whole(state.name for state in program.states)
        if self.check is not None:
            self.check.warn()
        try:
            return self._run(variant, given, names, kept_names, control, since)
        except BaseException as error:
            failure = self.engine.failed(error)
            if failure is error:
                raise
            raise failure from failure.__cause__

    def _fitting(self, inputs: Mapping[str, Any]) -> tuple[PlannedVariant, dict[str, Input]]:
        """The shape variant for these inputs, and the inputs as it takes them. Raises ValueError."""
        plans = self.plans
        if are_exactly(plans.ready.takes, inputs):  # as in the last run
            return plans.ready, dict[str, Input](inputs)
        given = arrays_by_name(inputs, plans.ready.program.inputs)
        return plans.variants[fitting_variant([each.program.inputs for each in plans.variants], given)], given

    def _run(
        self,
        variant: PlannedVariant,
        given: dict[str, Input],
        names: Sequence[str],
        kept_names: Sequence[str],
        control: RunControl,
        since: float,
    ) -> tuple[list[Array], list[OutputValue]]:
        """See `run`; any failure of it is one of the engine."""
        engine = self.engine
        plans = self.plans
        if variant is not plans.ready:
            engine.change_variant(engine.opened.variant(variant.bundle), variant.plan, variant.layout)
            plans.ready = variant
        on_device = engine.values_on_device(kept_names, plans.needed) if kept_names else {}
        every = [*names, *(name for name in kept_names if name not in on_device)]
        results, self.last_run = engine.run(every, given, self._memory, control, since=since, kept=on_device)
        if self._prefetches:
            engine.prefetch()
        if self.check is not None:
            self.check.begin()
        if not kept_names:
            return results, []
        in_host = dict(zip(every, results, strict=True))
        values = [on_device.get(name) or OutputValue.in_host_memory(in_host[name]) for name in kept_names]
        return results[: len(names)], values

    def outputs(self, names: Sequence[str]) -> dict[str, Array]:
        """Outputs of the last run that it was not asked for.

        Raises:
            ValueError: see `Session.outputs`.
        """
        self.refuse_closed()
        wanted = chosen_outputs(self.plans.ready.program.outputs, names)
        if lost := [name for name in wanted if name not in self.engine.left]:
            raise ValueError(f"the last run has no output {lost[0]!r} left; name it when you call run")
        return self._closing(lambda: self.engine.later_outputs(wanted))

    @property
    def states(self) -> States:
        """The states of the model."""
        self.refuse_closed()
        assert self.engine.bound is not None
        return self.engine.bound.states

    def prefetch(self) -> None:
        """Begin to load the first weights of the next run."""
        self.refuse_closed()
        if self.engine.current is None:
            self._closing(self.engine.prefetch)  # Ctrl-C; other failures are warnings

    def set_budget(self, limit: int | None) -> None:
        """Plan again for `limit` bytes.

        Raises:
            BudgetError: no plan fits; nothing has changed.
        """
        self.refuse_closed()
        plans = self.plans.with_budget(limit)
        self._closing(lambda: self.engine.follow(plans.ready, limit, plans.needed))
        self.plans = plans

    def refuse_closed(self) -> None:
        """Raise RunError if it is closed."""
        if self.engine.failure is not None or self.engine.bound is None:
            raise RunError(f"the session is closed ({self.engine.failure}); open a new one")

    def _closing(self, act: Callable[[], Result]) -> Result:
        """Call `act`; a failure closes the engine."""
        try:
            return act()
        except BudgetError:
            raise
        except BaseException as error:
            self.engine.failed(error)
            raise
