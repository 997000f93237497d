"""Checks between the runs of a session: a driver that has not been seen to compile this bundle's kernels is checked once."""

from __future__ import annotations

import threading
import warnings

from flashmem.base.errors import FlashmemWarning, RunError, UserError
from flashmem.base.interrupts import held_back
from flashmem.base.threads import Thread, started
from flashmem.bundle.bundle import Bundle
from flashmem.runtime.kernels.bundle_checks import program_checks
from flashmem.runtime.kernels.pool import ChildPool
from flashmem.runtime.opencl.device import Device


class BackgroundCheck:
    """Checks a sample of each kernel of a bundle of which nothing is known, in children of idle priority.

    A kernel that is wrong is a warning at the next run, and when the session ends. Later sessions use what is right.
    """

    def __init__(self, bundle: Bundle, device: Device) -> None:
        self._bundle = bundle
        self._device = device
        self._lock = threading.Lock()  # guards the following
        self._pool: ChildPool | None = None
        self._stopping = False
        self._thread: Thread | None = None
        self._said = ""

    def begin(self) -> None:
        """Start, the first time."""
        if self._thread is None:
            with held_back():
                self._thread = started(self._work, "flashmem-check")

    def wait(self) -> None:
        """Wait until it has ended, if it has begun."""
        if self._thread is not None:
            self._thread.join()

    def warn(self) -> None:
        """Warn of kernels that are wrong, once."""
        said = self._said
        self._said = ""
        if said:
            warnings.warn(said, FlashmemWarning, stacklevel=6)

    def close(self) -> None:
        """End it now."""
        with self._lock:
            self._stopping = True
            if self._pool is not None:
                self._pool.abandon()
        self.wait()
        self.warn()

    def _work(self) -> None:
        try:
            samples = [job for checks in program_checks(self._bundle, self._device) for job in checks.samples()]
            if not samples:
                return
            with self._lock:
                self._pool = ChildPool(self._device, idle=True)
                if self._stopping:
                    return
            try:
                self._pool.submit(samples)
                while self._pool.step():
                    pass
            finally:
                self._pool.close()
        except (UserError, RunError):  # no temporary folder, no processes: nothing is known then
            return
        wrong = [job.wrong for job in samples if job.wrong]
        if wrong:
            self._said = (
                f"the driver of {self._device.name} miscompiles {len(wrong)} of this bundle's kernels, and answers of this "
                f"session may be wrong: {wrong[0]}; open the session again, which then uses what is right"
            )
