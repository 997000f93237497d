"""Steady kernels, made ready between runs, and a session's first loads of the next run (NNV12, MobiSys '23, section 3.5).

The kernels of a first answer are those that are cheapest cold. Those of later answers are loaded or built, and bound, in a
thread of their own beside whatever runs meanwhile, until a run that begins finds them ready and is played by them.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress

from flashmem.base.errors import FlashmemWarning, RunError
from flashmem.program.launches import SteadyLaunch
from flashmem.runtime.engine.bound_program import Placement
from flashmem.runtime.engine.cores import prefer_little
from flashmem.runtime.engine.device_state import DeviceInUse
from flashmem.runtime.engine.failures import said
from flashmem.runtime.engine.opened import OpenedBundle
from flashmem.runtime.engine.run import Run
from flashmem.runtime.kernels.build_processes import Builders, build_apart
from flashmem.runtime.kernels.cache import CachedKernels
from flashmem.runtime.kernels.cache_files import ProgramCache
from flashmem.runtime.kernels.required import RequiredKernel, required_kernels
from flashmem.runtime.kernels.steady import Steady, new_kernels
from flashmem.schedule.plan import OverlapPlan

_REMEMBERED = 2
"""Ways to play a placement that stay bound: a budget that goes down and up again finds both."""


class Idle:
    """The time between the runs of a session's placement. `stop` it before the placement closes."""

    def __init__(self, placement: Placement, device: DeviceInUse, *, apart: bool, owner: object) -> None:
        """Nothing begins yet. `apart`: kernels are built in child processes. It stops when `owner` is collected, too."""
        self._placement, self._device, self._apart = placement, device, apart
        self._preparation: Preparation | None = None
        self._ahead: Run | None = None
        self._process = os.getpid()
        weakref.finalize(owner, self._forgotten).atexit = False

    def begin(self) -> None:
        """A run is over: load what the next one begins with, as far as it waits for no layer, and prepare its kernels.

        Where that fails it warns, and nothing is loaded ahead: the next run does all of it, and says what it cannot do.
        """
        try:
            self._begin()
        except Exception as error:
            warnings.warn(
                f"the next run could not be prepared, and begins from nothing: {said(error)}", FlashmemWarning, stacklevel=3
            )

    def _begin(self) -> None:
        placement = self._placement
        if self._preparation is None:
            self._preparation = Preparation(placement.opened, self._device, apart=self._apart)
        self._preparation.begin(placement)
        schedule = placement.schedule()
        if schedule.loads:
            self._ahead = Run(placement, schedule)

    def take(self) -> tuple[Run, bool]:
        """The next run, which has begun to load, and whether it is played by steady kernels."""
        steady = self._preparation is not None and self._preparation.choose(self._placement)
        run, self._ahead = self._ahead, None
        return run or Run(self._placement, self._placement.schedule()), steady

    def wait(self) -> None:
        """Return when everything that can be prepared is."""
        if self._preparation is not None:
            self._preparation.wait()

    def _forgotten(self) -> None:
        """Nobody has the session any more. Who finds out may be any thread, with any lock held: another one stops it."""
        if self._ahead is not None or self._preparation is not None:
            with suppress(RuntimeError):  # the interpreter ends
                threading.Thread(target=self.stop, name="flashmem-stop", daemon=True).start()

    def stop(self) -> None:
        """Nothing is loaded or prepared any more. What had failed is nobody's business."""
        if os.getpid() != self._process:  # a forked child has none of the threads
            return
        run, self._ahead = self._ahead, None
        if run is not None:
            with suppress(RunError):
                run.stop()
        preparation, self._preparation = self._preparation, None
        if preparation is not None:
            preparation.close()


class Preparation:
    """The steady kernels of a bundle, and what of them its placement's next run is played by.

    A thread makes them ready. All methods but `wait` are called by one thread at a time, which waits in `leave` for one
    placement to be bound at most, and in `close`. Kernels outlive placements: the next one is bound to them as it comes.
    """

    def __init__(self, opened: OpenedBundle, device: DeviceInUse, *, apart: bool) -> None:
        """Nothing begins yet. `apart`: build what no cache has in child processes."""
        self._opened, self._device, self._apart = opened, device, apart
        self._failure: str | None = None
        self._refused = not opened.program.steady  # nothing is prepared (any more)
        self._kernels: CachedKernels | None = None  # all of them ready
        self._launches: tuple[SteadyLaunch, ...] = ()  # what they are for
        self._plan: OverlapPlan | None = None  # under which the others were known
        self._played: Steady | None = None
        self._whole = False  # whether all that these kernels are for was played
        self._earlier: list[CachedKernels] = []  # that were compiled here and all played, before there were these
        self._builders: Builders | None = None
        self._lock = threading.Lock()  # of what follows
        self._stopping = self._working = False
        self._thread: threading.Thread | None = None
        self._placement: Placement | None = None
        self._seen: frozenset[str] | None = None  # what was resident when it was last asked what can be played
        self._stay = object()  # of the placement in its places
        self._wanted: tuple[Placement, object, tuple[SteadyLaunch, ...]] | None = None
        self._bound: tuple[Steady, ...] = ()  # the latest last
        self._binding = threading.Lock()  # held while the thread uses a placement

    def begin(self, placement: Placement) -> None:
        """A run of `placement` is over: get ready what the next one can play, which finds what is resident now.

        What fails is warned of before the next run, which does without: the answer of this one is there.
        """
        try:
            self._begin(placement)
        except Exception as error:
            self._refuse(error)

    def _begin(self, placement: Placement) -> None:
        with self._lock:
            self._whole |= self._played is not None and _layers(self._played.launches) >= _layers(self._launches)
        if self._refused or (placement is self._placement and placement.resident == self._seen):
            return
        self._seen = placement.resident
        steady = placement.steady_launches()
        with self._lock:
            self._placement = placement
            if not steady or any(each.launches == steady for each in self._bound):
                return
            self._wanted = placement, self._stay, steady
            if not self._working:
                thread = threading.Thread(target=self._work, name="flashmem-prepare", daemon=True)
                thread.start()
                self._working, self._thread = True, thread

    def choose(self, placement: Placement) -> bool:
        """Have the run that is about to begin played by what is ready, as far as what is resident allows; never waits.

        Returns whether it is played by steady kernels. Warns, once, where they cannot be prepared.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            warnings.warn(f"later runs keep the kernels of the first one: {failure}", FlashmemWarning, stacklevel=4)
        if not self._refused and placement is not self._placement:
            self._take_over(placement)
        with self._lock:
            bound = [each for each in self._bound if each.needs <= placement.resident]
        self._played = max(bound, key=lambda each: len(each.launches), default=None)
        placement.switch(self._played)
        return self._played is not None

    def _take_over(self, placement: Placement) -> None:
        """A placement's first run: bind what kernels are ready for and what needs nothing resident."""
        with self._lock:
            self._placement, kernels, covered = placement, self._kernels, self._launches
        if kernels is None or self._opened.mode == "interleave":  # its first run has kernels move what later ones do not
            return
        try:
            steady = placement.steady_launches()
            if steady and _layers(steady) <= _layers(covered):
                self._bound = (placement.bind_steady(steady, kernels),)
        except RunError as error:
            self._refuse(error)

    def wait(self) -> None:
        """Return when everything that was begun is ready."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def leave(self) -> None:
        """The placement gives its places up, or those of its weights: from now on nothing is bound to them."""
        with self._lock:
            self._placement = self._seen = self._wanted = self._played = None
            self._stay, self._bound = object(), ()
        with self._binding:
            pass

    def close(self) -> None:
        """End it."""
        with self._lock:
            self._stopping, self._refused = True, True
        self.leave()
        if self._builders is not None:
            self._builders.abandon()
        self.wait()
        for kernels in (*self._earlier, *([self._kernels] if self._kernels is not None and self._whole else [])):
            with suppress(RunError):  # a driver that cannot give its binary costs a compilation next time
                kernels.save()
        if self._kernels is not None:
            self._kernels.close()

    def _refuse(self, error: Exception) -> None:
        if not self._stopping:
            self._failure, self._refused = said(error), True

    def _work(self) -> None:
        prefer_little()
        while True:
            with self._lock:
                wanted, self._wanted = self._wanted, None
                if wanted is None or self._refused:
                    self._working = False
                    return
            try:
                self._prepare(*wanted)
            except Exception as error:
                self._refuse(error)

    def _prepare(self, placement: Placement, stay: object, steady: tuple[SteadyLaunch, ...]) -> None:
        """Kernels, then layers that have them, if the placement is still there. Raises RunError."""
        kernels = self._ready(placement, steady)
        with self._binding:
            if self._stay is not stay:
                return
            bound = placement.bind_steady(steady, kernels)
            with self._lock:
                if self._stay is stay:
                    self._bound = (*self._bound, bound)[-_REMEMBERED:]

    def _ready(self, placement: Placement, steady: Sequence[SteadyLaunch]) -> CachedKernels:
        """The kernels of `steady`. Raises RunError."""
        opened, program, source = self._opened, self._opened.program, self._opened.bundle.source
        plan = placement.plan
        same = opened.mode != "interleave" or plan is self._plan  # other kernels move weights, and may be there as they are
        if self._kernels is not None and same and _layers(steady) <= _layers(self._launches):
            return self._kernels
        known, _ = required_kernels(program, source, opened.moves(plan), opened.moves(plan.later()))
        cache, device = ProgramCache(), self._device

        def begin(builders: Builders) -> None:
            self._builders = builders
            if self._stopping:
                builders.abandon()

        def build(missing: Mapping[str, RequiredKernel]) -> Mapping[str, bytes]:
            return build_apart(missing, program, device.device, cache, begin)

        kernels = CachedKernels(
            cache,
            device.context,
            program.build_options,
            new_kernels(source, steady, known),
            opened.bundle.binaries or b"",
            build if self._apart else None,
            device.programs,
        )
        kernels.wait()
        with self._lock:
            if self._kernels is not None and self._kernels.compiled and self._whole:
                self._earlier.append(self._kernels)
            self._kernels, self._launches, self._plan, self._whole = kernels, tuple(steady), plan, False
        return kernels


def _layers(steady: Sequence[SteadyLaunch]) -> frozenset[int]:
    """What tells steady launches of a program apart: the first layers that they stand for."""
    return frozenset(each.first for each in steady)
