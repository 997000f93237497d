"""What a session does between two runs: the next run's first loads, and its steady kernels (NNV12, MobiSys '23, section 3.5).

The kernels of a first answer are those that are cheapest cold. Those of later answers are loaded or built, and bound, in a
thread of their own beside whatever runs meanwhile, until the next run finds them ready and is played by them.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Mapping
from contextlib import suppress

from flashmem.errors import FlashmemWarning, RunError
from flashmem.runtime.cores import prefer_little
from flashmem.runtime.device_in_use import DeviceInUse
from flashmem.runtime.executor import Executor
from flashmem.runtime.kernel_list import Wanted, wanted_kernels
from flashmem.runtime.kernel_processes import Builders, build_apart
from flashmem.runtime.opened import OpenedBundle
from flashmem.runtime.placement import Placement
from flashmem.runtime.program_cache import CachedKernels, ProgramCache
from flashmem.runtime.run import Run
from flashmem.runtime.steady import new_kernels


class Idle:
    """The time between the runs of a placement. `stop` it before the placement closes."""

    def __init__(self, placement: Placement, device: DeviceInUse, *, apart: bool, owner: object) -> None:
        """Nothing begins yet. `apart`: kernels are built in child processes. It stops when `owner` is collected, too."""
        self._placement, self._device, self._apart = placement, device, apart
        self._preparation: Preparation | None = None
        self._ahead: Run | None = None
        self._process = os.getpid()
        weakref.finalize(owner, self._forgotten).atexit = False

    def begin(self) -> None:
        """A run is over: load what the next one begins with, as far as it waits for no layer, and prepare its kernels."""
        placement = self._placement
        if self._preparation is None:
            self._preparation = Preparation(placement, self._device, apart=self._apart)
        self._preparation.played = self._preparation.taken
        schedule = placement.schedule()
        if schedule.loads:
            self._ahead = Run(placement, schedule)

    def take(self) -> tuple[Run, bool]:
        """The next run, which has begun to load, and whether it is played by steady kernels."""
        placement, preparation = self._placement, self._preparation
        if preparation is not None and (executor := preparation.take()) is not None:
            placement.switch(executor)
        run, self._ahead = self._ahead, None
        return run or Run(placement, placement.schedule()), preparation is not None and preparation.taken

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
            preparation.stop()


class Preparation:
    """A thread that gets the steady kernels of a placement ready."""

    def __init__(self, placement: Placement, device: DeviceInUse, *, apart: bool) -> None:
        """Begin at once; the first run is over. `apart`: build what no cache has in child processes."""
        self.taken = self.played = False
        self._placement, self._device, self._apart = placement, device, apart
        self._ready: Executor | None = None
        self._failure: RunError | None = None
        self._kernels: CachedKernels | None = None
        self._builders: Builders | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None
        if placement.opened.program.steady:
            self._thread = threading.Thread(target=self._work, name="flashmem-prepare", daemon=True)
            self._thread.start()

    def take(self) -> Executor | None:
        """The layers of later runs, once, when they are ready. Warns where they cannot be."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            warnings.warn(f"later runs keep the kernels of the first one: {failure}", FlashmemWarning, stacklevel=4)
        ready, self._ready = self._ready, None
        self.taken = self.taken or ready is not None
        return ready

    def wait(self) -> None:
        """Return when it has ended."""
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """End it."""
        self._stopping = True
        if self._builders is not None:
            self._builders.abandon()
        self.wait()
        self._ready = None
        if self._kernels is not None:
            if self.played:
                with suppress(RunError):  # a driver that cannot give its binary costs a compilation next time
                    self._kernels.save()
            self._kernels.close()

    def _work(self) -> None:
        try:
            prefer_little()
            self._prepare(self._placement.opened)
        except RunError as error:
            if not self._stopping:
                self._failure = error

    def _prepare(self, opened: OpenedBundle) -> None:
        """Kernels, then launches that have them. Raises RunError."""
        placement, program, source = self._placement, opened.program, opened.bundle.source
        steady = placement.steady_launches()
        if not steady or self._stopping:
            return
        known, _ = wanted_kernels(program, source, opened.moves(placement.plan), opened.moves(placement.plan.later()))
        cache, device = ProgramCache(), self._device

        def begin(builders: Builders) -> None:
            self._builders = builders
            if self._stopping:
                builders.abandon()

        def build(missing: Mapping[str, Wanted]) -> Mapping[str, bytes]:
            return build_apart(missing, program, device.device, cache, begin)

        self._kernels = CachedKernels(
            cache,
            device.context,
            program.build_options,
            new_kernels(source, steady, known),
            opened.bundle.binaries or b"",
            build if self._apart else None,
            device.programs,
        )
        self._kernels.wait()
        self._ready = placement.bind_steady(steady, self._kernels)
