"""Warm-up: a thread prepares the steady kernels of later runs between runs (NNV12, MobiSys '23, section 3.5).

A first answer uses the kernels that are fastest to start cold. The thread loads or builds the kernels of later answers, and
binds them, while runs go on. A run uses them if they are ready when it begins.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from flashmem.base.errors import FlashmemWarning, RunError
from flashmem.base.interrupts import held_back
from flashmem.base.threads import Thread, call_each, started
from flashmem.program.launches import SteadyLaunch
from flashmem.runtime.engine.bound_program import BoundProgram, Steady
from flashmem.runtime.engine.cores import prefer_little
from flashmem.runtime.engine.device_state import DeviceInUse
from flashmem.runtime.engine.failures import said
from flashmem.runtime.engine.opened import OpenedBundle
from flashmem.runtime.kernels.builds import build_apart
from flashmem.runtime.kernels.cache import CachedKernels
from flashmem.runtime.kernels.cache_files import ProgramCache
from flashmem.runtime.kernels.pool import ChildPool
from flashmem.runtime.kernels.required import RequiredKernel, required_kernels
from flashmem.runtime.kernels.steady import new_kernels
from flashmem.runtime.kernels.verdicts import Verdicts
from flashmem.schedule.plan import OverlapPlan

_REMEMBERED = 2
"""Sets of steady launches that stay bound: a budget that falls and rises again finds both."""


class WarmUp:
    """Warm-up of a bundle's steady kernels, and the choice of those that the next run uses.

    A thread prepares them. One thread at a time calls all methods but `wait`. It waits in `close`, and in `leave` for the
    binding of at most one set of launches. Kernels outlive bound programs: the next bound program uses them from its first run
    on.
    """

    def __init__(self, opened: OpenedBundle, device: DeviceInUse, *, apart: bool) -> None:
        """Starts nothing yet. `apart`: build kernels that no cache has in child processes."""
        self._opened = opened
        self._device = device
        self._apart = apart
        self._failure: str | None = None
        self._refused = False  # after a failure: nothing more is prepared
        self._kernels: CachedKernels | None = None  # all of the steady ones, ready
        self._launches: tuple[SteadyLaunch, ...] = ()  # the launches of these kernels
        self._plan: OverlapPlan | None = None  # the plan for which the launches were selected
        self._chosen: Steady | None = None  # used by the last run
        self._choice: tuple[tuple[Steady, ...], frozenset[str]] | None = None  # what it was chosen of, and for
        self._whole = False  # whether a run used all of these launches
        self._earlier: list[CachedKernels] = []  # compiled in this process, all launched, replaced since
        self._pool: ChildPool | None = None
        self._lock = threading.Lock()  # guards the attributes below
        self._stopping = self._working = False
        self._thread: Thread | None = None
        self._program: BoundProgram | None = None
        self._seen: frozenset[str] | None = None  # the resident slices at the last selection of steady launches
        self._stay = object()  # a new object each time the program's memory is freed
        self._wanted: tuple[BoundProgram, object, tuple[SteadyLaunch, ...]] | None = None
        self._ready: tuple[Steady, ...] = ()  # the latest is the last
        self._binding = threading.Lock()  # held while the thread uses a bound program

    def begin(self, bound: BoundProgram) -> None:
        """After a run of `bound`: start preparing the steady kernels that the next run can use with the resident slices.

        After a failure, the next run warns and uses no steady kernels. The answer of this run is complete.
        """
        try:
            self._begin(bound)
        except Exception as error:
            self._refuse(error)

    def _begin(self, bound: BoundProgram) -> None:
        if not self._whole and self._chosen is not None:
            with self._lock:
                self._whole = _layers(self._chosen.launches) >= _layers(self._launches)
        if self._refused or (bound is self._program and bound.weights.resident == self._seen):
            return
        self._seen = bound.weights.resident
        steady = bound.kernels.steady_launches()
        with self._lock:
            self._program = bound
            if not steady or any(each.launches == steady for each in self._ready):
                return
            self._wanted = bound, self._stay, steady
            if not self._working:
                with held_back():
                    self._thread = started(self._work, "flashmem-prepare")
                    self._working = True

    def choose(self, bound: BoundProgram) -> bool:
        """Choose the kernels of the next run among those that are ready, without waiting.

        Returns whether it uses steady ones. Warns once if they cannot be prepared.
        """
        if self._failure is not None:
            failure = self._failure
            self._failure = None
            warnings.warn(f"later runs keep the kernels of the first one: {failure}", FlashmemWarning, stacklevel=6)
        if not self._refused and bound is not self._program:
            self._take_over(bound)
        with self._lock:
            ready = self._ready
        resident = bound.weights.resident
        if self._choice is None or self._choice[0] is not ready or self._choice[1] is not resident:
            able = [each for each in ready if each.needs <= resident]
            self._chosen = max(able, key=lambda each: len(each.launches), default=None)
            self._choice = ready, resident
        bound.kernels.switch(self._chosen)
        return self._chosen is not None

    def _take_over(self, bound: BoundProgram) -> None:
        """For the first run of a bound program: bind the steady launches that have kernels and need no resident slice."""
        with self._lock:
            self._program = bound
            kernels = self._kernels
            covered = self._launches
        if kernels is None or self._opened.transfer.by_kernels:  # first-run kernels copy weights
            return
        try:
            steady = bound.kernels.steady_launches()
            if steady and _layers(steady) <= _layers(covered):
                self._ready = (bound.kernels.bind_steady(steady, kernels),)
        except RunError as error:
            self._refuse(error)

    def wait(self) -> None:
        """Wait until everything that was begun is ready."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def leave(self) -> None:
        """Call before the memory of the program or of its weights is freed: from then on nothing is bound to it."""
        with self._lock:
            self._program = self._seen = self._wanted = self._chosen = self._choice = None
            self._stay = object()
            self._ready = ()
        with self._binding:
            pass

    def close(self) -> None:
        """End the thread, and save the kernels that were compiled in this process and launched."""
        with self._lock:
            self._stopping = True
            self._refused = True
        call_each(self.leave, None if self._pool is None else self._pool.abandon, self.wait)
        launched = [*self._earlier, *([self._kernels] if self._kernels is not None and self._whole else [])]
        call_each(
            *(partial(self._save, kernels) for kernels in launched),
            None if self._kernels is None else self._kernels.close,
        )

    def _save(self, kernels: CachedKernels) -> None:
        with suppress(RunError):  # without the driver's binary, the next start compiles again
            kernels.save()

    def _refuse(self, error: Exception) -> None:
        if not self._stopping:
            self._failure = said(error)
            self._refused = True

    def _work(self) -> None:
        prefer_little()
        while True:
            with self._lock:
                wanted = self._wanted
                self._wanted = None
                if wanted is None or self._refused:
                    self._working = False
                    return
            try:
                self._prepare(*wanted)
            except Exception as error:
                self._refuse(error)

    def _prepare(self, bound: BoundProgram, stay: object, steady: tuple[SteadyLaunch, ...]) -> None:
        """Build or load the kernels of `steady`, then bind them if the program's memory still exists. Raises RunError."""
        kernels = self._kernels_of(bound, steady)
        with self._binding:
            if self._stay is not stay:
                return
            made = bound.kernels.bind_steady(steady, kernels)
            with self._lock:
                if self._stay is stay:
                    self._ready = (*self._ready, made)[-_REMEMBERED:]

    def _kernels_of(self, bound: BoundProgram, steady: Sequence[SteadyLaunch]) -> CachedKernels:
        """The kernels of `steady`. Raises RunError."""
        opened = self._opened
        program = self._opened.program
        source = self._opened.source
        plan = bound.weights.plan
        same = not opened.transfer.by_kernels or plan is self._plan  # under another plan, other kernels copy weights
        if self._kernels is not None and same and _layers(steady) <= _layers(self._launches):
            return self._kernels
        known, _ = required_kernels(program, source, opened.moves(plan), opened.moves(plan.later()))
        cache = ProgramCache()
        device = self._device

        def begin(pool: ChildPool) -> None:
            self._pool = pool
            if self._stopping:
                pool.abandon()

        def build(missing: Mapping[str, RequiredKernel]) -> Mapping[str, bytes]:
            return build_apart(missing, program, device.device, cache, begin)

        kernels = CachedKernels(
            cache,
            device.context,
            program.build_options,
            Verdicts(device.device).applied(new_kernels(source, steady, known), program.build_options),
            opened.bundle.binaries or b"",
            build if self._apart else None,
            device.programs,
        )
        kernels.wait()
        with self._lock:
            if self._kernels is not None and self._kernels.compiled and self._whole:
                self._earlier.append(self._kernels)
            self._kernels = kernels
            self._launches = tuple(steady)
            self._plan = plan
            self._whole = False
        return kernels


def _layers(steady: Sequence[SteadyLaunch]) -> frozenset[int]:
    """The first launches that steady launches replace: they identify the launches of one program."""
    return frozenset(each.first for each in steady)
