"""What a plan is played on: which descriptor, in which transfer mode."""

from __future__ import annotations

from pathlib import Path

from flashmem.bundle import Bundle
from flashmem.device import TRANSFER_MODES, DeviceDescriptor, TransferMode, descriptor_names, load_descriptor
from flashmem.errors import NoDeviceError, UserError
from flashmem.program import Program
from flashmem.runtime.devices import descriptor_for
from flashmem.runtime.opencl import find_device
from flashmem.runtime.residence import Strategy


def described_device(bundle: Bundle, device: str | None) -> DeviceDescriptor:
    """The bundle's own descriptor, or the one that `device` names: shipped, a file, or of a device that is here."""
    if device is None or device == "auto":
        return bundle.descriptor
    if device.endswith(".toml") or device in descriptor_names():
        return load_descriptor(device)
    try:
        return descriptor_for(find_device(device))
    except NoDeviceError as error:
        known = ", ".join(descriptor_names())
        raise UserError(f"no device is called {device!r}; name one that is here, a TOML file, or one of: {known}") from error


def mode_for(
    program: Program, descriptor: DeviceDescriptor, mode: str, *, planned: object = None, strategy: Strategy = "stream"
) -> TransferMode:
    """The mode that a session of `program` would take on such a device. `planned` is the one that its plan was made for.

    Raises:
        UserError: the device cannot run the program, or not in this mode.
    """
    path = program.memory_path
    if path not in descriptor.memory_paths:
        raise UserError(f"device {descriptor.name} has no memory path {path!r}, which the bundle uses; compile for it")
    modes = descriptor.modes[path]
    if mode == "auto":
        if strategy == "preload":
            return "dma"
        return next((m for m in modes if m == planned), modes[0])
    for known in TRANSFER_MODES:
        if known == mode and known in modes:
            return known
    raise UserError(f"device {descriptor.name} cannot do transfer mode {mode!r} on the {path} path, only: {', '.join(modes)}")


def model_name(path: Path) -> str:
    """What a reader calls the model: its file's name, or its folder's where the file is just `model.onnx`."""
    return path.parent.name if path.stem == "model" and path.parent.name else path.stem
