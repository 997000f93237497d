"""Options of a session, resolved: device, memory path, transfer mode, strategy and budget."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, get_args

from flashmem.base.errors import BudgetError, NoDeviceError, UserError
from flashmem.base.types import MemoryPath, TransferMode
from flashmem.base.units import format_size, parse_size
from flashmem.runtime.memory.pressure import available
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import find_device
from flashmem.schedule.modes import DMA, MODES
from flashmem.schedule.plan import OverlapPlan
from flashmem.schedule.plan import Strategy as PlannedStrategy
from flashmem.schedule.residency import Strategy
from flashmem.target.descriptor import DeviceDescriptor, descriptor_names, load_descriptor


def device_here(name: str = "auto", *, prefer: str | None = None) -> Device:
    """The device to run on; "auto" prefers one with the descriptor `prefer`.

    A descriptor in a file (NAME.toml) is a compile target and names no local device: it means "auto".

    Raises:
        NoDeviceError: no device, or none of that name.
    """
    return find_device("auto" if _is_file(name) else name, prefer)


def device_for(descriptor: str, name: str = "auto") -> Device | None:
    """The local device of `descriptor`, if present; `name` is the device requested for the compilation."""
    try:
        found = device_here(name, prefer=descriptor)
    except NoDeviceError:
        return None
    return found if found.descriptor_name == descriptor else None


def find_descriptor(
    device: str = "auto", memory_path: str = "auto", *, own: DeviceDescriptor | None = None
) -> DeviceDescriptor:
    """The descriptor of a local device, or a stored one: shipped, by name, or from a file.

    Args:
        device: "auto" or a name, as `runtime.opencl.devices.choose` accepts them; a shipped descriptor's name; a TOML file.
        memory_path: moved to the front of the descriptor's paths; "auto" keeps their order.
        own: the meaning of "auto", if known (a bundle's own descriptor).

    Raises:
        UserError: no such device, not a descriptor, or the device lacks the memory path.
    """
    descriptor = own if own is not None and device == "auto" else _find_descriptor(device)
    return descriptor if memory_path == "auto" else descriptor.on_path(memory_path)


def _find_descriptor(device: str) -> DeviceDescriptor:
    if _is_file(device):
        return load_descriptor(device)
    try:
        return descriptor_for(find_device(device))
    except NoDeviceError as error:
        if device in descriptor_names():
            return load_descriptor(device)
        if device == "auto":
            raise
        raise NoDeviceError(f"{error}; or describe one: a TOML file, or one of {', '.join(descriptor_names())}") from error


def _is_file(device: str) -> bool:
    return device.endswith(".toml")


class NoLayoutError(UserError):
    """A bundle has layouts for none of the transfer modes that a device has on its path: `modes`."""

    def __init__(self, message: str, modes: tuple[TransferMode, ...] = ()) -> None:
        super().__init__(message, modes)
        self.modes = modes

    def __str__(self) -> str:
        return str(self.args[0])


def choose_mode(
    descriptor: DeviceDescriptor,
    mode: str = "auto",
    *,
    path: MemoryPath | None = None,
    planned: object = None,
    strategy: Strategy = "stream",
    layouts: Collection[str] | None = None,
) -> TransferMode:
    """The transfer mode for weights on a device.

    Args:
        descriptor: the device.
        mode: "auto" selects `planned`, or the device's first mode on the path; with strategy "preload", `dma`.
        path: the memory path that a bundle was compiled for; None for the device's default.
        planned: the mode that a bundle was planned for, if any.
        strategy: the strategy of the runs.
        layouts: modes that a bundle has layouts for; "auto" selects one of these. None: no layouts exist yet.

    Raises:
        UserError: the device lacks the path, or the mode on it.
        NoLayoutError: "auto" finds no mode on the path that the bundle has a layout for.
    """
    path = path or descriptor.memory_paths[0]
    if path not in descriptor.memory_paths:
        raise UserError(f"device {descriptor.name} has no memory path {path!r}, which the bundle uses; compile for it")
    modes = descriptor.modes[path]
    if mode == "auto" and strategy == "preload":
        return DMA.name
    if mode == "auto":
        laid_out = [known for known in modes if layouts is None or known in layouts]
        if laid_out:
            return next((known for known in laid_out if known == planned), laid_out[0])
        raise NoLayoutError(
            f"the bundle has layouts for transfer modes {', '.join(layouts or ()) or 'none'}, and device {descriptor.name} "
            f"has {', '.join(modes) or 'none'} on the {path} path; compile the model for this device",
            modes,
        )
    return _named_mode(mode, modes, f"device {descriptor.name} cannot do transfer mode {mode!r} on the {path} path")


def _named_mode(mode: str, modes: Sequence[TransferMode], refusal: str) -> TransferMode:
    """The mode of this name, if it is one of `modes`. Raises UserError."""
    if mode not in MODES:
        raise UserError(f"transfer mode {mode!r} is unknown; name one of: auto, {', '.join(MODES)}")
    for known in modes:
        if known == mode:
            return known
    raise UserError(f"{refusal}, only: {', '.join(modes)}")


def choose_strategy(plan: OverlapPlan, wanted: str) -> Strategy:
    """The strategy of a session, given the requested one; "auto" is the plan's own.

    Raises:
        UserError: no such strategy, or the plan is of another one.
    """
    if wanted == "preload":
        return "preload"
    if wanted not in ("auto", *get_args(PlannedStrategy)):
        raise UserError(f"strategy {wanted!r} is unknown; name one of: {', '.join(get_args(PlannedStrategy))}, preload")
    if wanted not in ("auto", plan.strategy):
        raise UserError(
            f"the bundle was not compiled for strategy {wanted!r}; it plays {plan.strategy} and preload: compile the model anew"
        )
    return plan.strategy


def choose_budget(
    asked: int | str | None, planned: int | None, needed: int, *, mode: TransferMode, strategy: Strategy
) -> int | None:
    """The budget of a session in bytes: `asked`, else `planned`; None for no limit, the default of "preload".

    `needed` is the memory of a session in `mode`.

    Raises:
        BudgetError: `needed` exceeds the budget.
        UserError: `asked` is not a size.
    """
    limit = None if strategy == "preload" else planned
    if asked is not None:
        limit = parse_size(asked, what="budget")
    if limit is not None and limit < needed:
        raise BudgetError(
            f"budget {format_size(limit)} is too small: the bundle needs {needed} bytes in transfer mode {mode}; "
            "raise the budget, plan the bundle for this one with flashmem replan, or compile the model anew",
            smallest_bytes=needed,
            binding=f"the layout for transfer mode {mode}",
        )
    return limit


def choose_host_budget(
    asked: int | str | None, staging: int, weights: int, *, mode: TransferMode, shares_memory: bool, here: bool = True
) -> int | None:
    """The host budget of a session in bytes; None if there is none, or no memory of its own for it.

    Args:
        asked: a size; "auto": half of the memory that the system has left, at most what the session can use; None: no budget.
        staging: bytes of host memory that a session needs: staging that loads pass through, and outputs.
        weights: bytes of the weights that later runs load again.
        mode: the transfer mode.
        shares_memory: whether host and device share one memory. "auto" then means None.
        here: whether the session is on this machine; if not, "auto" is all that the session can use.

    Raises:
        BudgetError: the size is below `staging`.
        UserError: not a size, or there is only one memory.
    """
    wanted = read_host_budget(asked, shares_memory=shares_memory)
    if wanted is None or (wanted == "auto" and not MODES[mode].copies):
        return None
    if not MODES[mode].copies:
        raise UserError(f"transfer mode {mode} has no copies of weights in host memory; leave the host budget out")
    if wanted == "auto":
        left = available() if here else None
        spare = staging + weights if left is None else left // 2
        return max(staging, min(spare, staging + weights))
    if wanted < staging:
        raise BudgetError(
            f"host budget {format_size(wanted)} is too small: staging of transfer mode {mode}, and outputs, need {staging} "
            f"bytes of host memory; raise the host budget to {staging} bytes, or leave it out",
            smallest_bytes=staging,
            binding=f"staging of transfer mode {mode}, and outputs",
        )
    return wanted


def read_host_budget(asked: int | str | None, *, shares_memory: bool = False) -> int | Literal["auto"] | None:
    """A host budget as a user writes it: bytes, "auto", or None. Where host and device share memory, "auto" means None.

    Raises:
        UserError: not a size, or there is only one memory.
    """
    if asked is None or asked == "auto":
        return None if asked is None or shares_memory else "auto"
    wanted = parse_size(asked, what="host budget")
    if shares_memory:
        raise UserError("the device shares its memory with the host, and the budget limits both; leave the host budget out")
    return wanted
