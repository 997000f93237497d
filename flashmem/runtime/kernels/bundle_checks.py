"""Checks of all kernels of a bundle on a device."""

from __future__ import annotations

from flashmem.base.errors import UserError
from flashmem.bundle.bundle import Bundle
from flashmem.runtime.kernels.ahead_of_time import kernels_of, requests_of
from flashmem.runtime.kernels.checks import CheckedKernel, ProgramChecks, check_kernels
from flashmem.runtime.opencl.device import Device


def program_checks(bundle: Bundle, device: Device) -> list[ProgramChecks]:
    """The launches of sessions of `bundle` on `device`: of first and later runs, for each shape variant.

    Raises:
        UserError: the device cannot run the bundle.
    """
    checks: list[ProgramChecks] = []
    for request in requests_of(bundle):
        made = kernels_of(request, device, all_chains=True)
        if made is None:
            raise UserError(
                f"{bundle.path} is for {bundle.descriptor.name}, and {device.name} cannot run it as it is; compile the "
                "model for this device"
            )
        program, kernels = made
        checks.append(ProgramChecks(kernels, program, device))
    return checks


def check_bundle_kernels(
    bundle: Bundle, device: Device, *, again: bool = False, seconds: float | None = None
) -> list[CheckedKernel]:
    """Check each kernel that sessions of `bundle` launch on `device`.

    What earlier checks found right is not checked again, unless `again`. No check begins after `seconds`.

    Raises:
        UserError: the device cannot run the bundle.
        RunError: no process that checks can be started.
    """
    return check_kernels(program_checks(bundle, device), device, again=again, seconds=seconds)
