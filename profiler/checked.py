"""Kernels are checked before their times count: a wrong one may be fast because it is wrong."""

from __future__ import annotations

from dataclasses import replace

from flashmem.base.errors import RunError
from flashmem.program.kernel_text import Source
from flashmem.program.program import Program
from flashmem.runtime.kernels.checks import ProgramChecks
from flashmem.runtime.kernels.pool import ChildPool
from flashmem.runtime.kernels.required import required_kernels
from flashmem.runtime.opencl.device import Device


class CheckedKernels:
    """Checks a sample of each kernel that nothing is known of on a device, in a child, while nothing is measured."""

    def __init__(self, device: Device) -> None:
        """Starts nothing."""
        self._device = device
        self._pool: ChildPool | None = None

    def refuse_wrong(self, program: Program, source: Source, kernel: str | None = None) -> None:
        """Raise RunError if the driver miscompiles a kernel of the program; `kernel`: look at this one only.

        The measured kernel is the optimised one, so that one is refused which is right without optimisation too.
        """
        launches = tuple(each for each in program.launches if kernel is None or each.kernel == kernel)
        kernels, _ = required_kernels(replace(program, launches=launches), source, {})
        checks = ProgramChecks(kernels, program, self._device)
        samples = checks.samples()
        if samples:
            self._pool = self._pool or ChildPool(self._device)
            self._pool.submit(samples)
            while self._pool.step():
                pass
            self._pool.check("kernels that are not checked are not measured; free memory and try again")
        if wrong := checks.wrong:
            raise RunError(f"the driver miscompiles it: {wrong}")

    def close(self) -> None:
        """End the child."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
