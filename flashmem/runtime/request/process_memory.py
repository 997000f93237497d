"""A limit on the resident memory of the whole process, and the budget that it leaves for a session."""

from __future__ import annotations

from flashmem.base.errors import BudgetError, UserError
from flashmem.base.units import format_size
from flashmem.runtime.opencl.device import Device

SLACK = 32 << 20
"""Bytes above a session's budget that a process may hold at its peak: kernels, stacks of threads, Python's objects. Up to 19
MiB were measured (docs/research/memory.md).
"""


def budget_within(limit: int, held: int | None, device: Device) -> int:
    """The budget of a session on `device` in a process that may hold `limit` bytes, and holds `held` without the session.

    If nothing is left, it is one byte, so that planning says how much is needed.

    Raises:
        UserError: the device has memory of its own, or the system does not report what a process holds.
    """
    if not device.unified_memory:
        raise UserError(f"{device.name} has memory of its own, which no process memory limits; give a budget and a host budget")
    if held is None:
        raise UserError("this system does not report the memory of a process; give a budget instead of the process memory")
    return max(1, limit - held - SLACK)


def too_small(limit: int, held: int, error: BudgetError) -> BudgetError:
    """The error for a limit on a process that holds `held` bytes without the session; `error`: that for its budget."""
    smallest = held + SLACK + error.smallest_bytes
    rounded = -(-smallest // 1_000_000)
    return BudgetError(
        f"process memory {format_size(limit)} is too small: the process holds {format_size(held)} without the model, the model "
        f"needs {format_size(error.smallest_bytes)}, and {format_size(SLACK)} are for what no budget counts; give {rounded}MB "
        "or more",
        smallest_bytes=smallest,
        binding=error.binding,
    )
