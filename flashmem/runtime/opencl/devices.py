"""The choice of a device by its name, of a descriptor for it, and of transfer modes that it has."""

from __future__ import annotations

import platform
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Protocol, TypeVar

from flashmem.base.errors import NoDeviceError
from flashmem.base.pages import page_size
from flashmem.base.types import MemoryPath, TransferMode
from flashmem.runtime.opencl.device import GENERIC_GPU, HALF_ARITHMETIC, IMAGE_FROM_BUFFER, Device
from flashmem.runtime.opencl.measured_rates import tile_of, with_measured_rates
from flashmem.schedule.modes import MODES
from flashmem.schedule.modes.kind import TransferKind
from flashmem.target.descriptor import IMPORT_HOST_MEMORY, CodeStyle, DeviceDescriptor, Feature, load_descriptor


def no_device(machine: str | None = None, *, android: bool | None = None) -> NoDeviceError:
    """The error for a machine without an OpenCL device; it names the driver to install.

    `machine` is the name from `platform.machine`, `android` whether the system is Android; by default those of this machine.
    """
    machine = machine or platform.machine()
    android = is_android() if android is None else android
    if android:
        advice = "find out what to type with: flashmem doctor"
    elif machine.lower() in ("x86_64", "amd64"):
        advice = "install a driver, for example: pip install intel-opencl-rt"
    else:
        advice = "install a driver, for example: apt-get install pocl-opencl-icd"
    return NoDeviceError(f"no OpenCL device is here; {advice}")


def is_android() -> bool:
    """Whether this system is Android, including Termux."""
    return sys.platform == "android" or hasattr(sys, "getandroidapilevel") or Path("/system/build.prop").exists()


class Named(Protocol):
    """A device that can be chosen by its names."""

    @property
    def platform(self) -> str:
        """The platform's name."""
        ...

    @property
    def name(self) -> str:
        """The device's name."""
        ...

    @property
    def descriptor_name(self) -> str:
        """The name of the shipped descriptor that fits best."""
        ...

    @property
    def kind(self) -> Literal["cpu", "gpu", "other"]:
        """What it is."""
        ...


AnyDevice = TypeVar("AnyDevice", bound=Named)


def choose(devices: Sequence[AnyDevice], name: str, prefer: str | None = None) -> AnyDevice:
    """The device called `name`: a number in the list, a descriptor's name, or part of a platform's or device's name.

    "auto" prefers a device with the descriptor `prefer` (the one a bundle was compiled for), then a GPU, then PoCL.

    Raises:
        NoDeviceError: no device, or none of that name.
    """
    if not devices:
        raise no_device()
    if name == "auto":
        order = {"gpu": 0, "cpu": 1, "other": 2}
        return min(devices, key=lambda d: (d.descriptor_name != prefer, order[d.kind], d.descriptor_name != "pocl"))
    if name.isdecimal() and int(name) < len(devices):
        return devices[int(name)]
    wanted = name.lower()
    for device in devices:
        if wanted == device.descriptor_name:
            return device
    for device in devices:
        if wanted and wanted in f"{device.platform} {device.name} {device.descriptor_name}".lower():
            return device
    here = ", ".join(f"{d.platform}: {d.name}" for d in devices)
    raise NoDeviceError(f"no OpenCL device is called {name!r}; name one of these, or 'auto': {here}")


def passed_probes(device: Device, probed: Mapping[str, str]) -> dict[str, str]:
    """The entries of `DeviceDescriptor.probed` that are valid for `device`: it has the extension, and the same driver."""
    return {name: driver for name, driver in probed.items() if name in device.extensions and driver == device.driver}


def descriptor_for(device: Device, probed: Mapping[str, str] = MappingProxyType({})) -> DeviceDescriptor:
    """The shipped descriptor for `device` with the limits that the driver reports, and with rates that were measured here.

    It keeps the transfer modes that the driver supports, in the descriptor's order, and those that `probed` adds.
    """
    base = load_descriptor(device.descriptor_name).with_probed(passed_probes(device, probed))
    if device.instruction_set:
        base = base.for_instruction_set(tile_of(device))
    reasons = why_not(device, probed)
    paths: tuple[MemoryPath, ...] = tuple(path for path in base.memory_paths if path == "buffer" or device.has_images)
    modes: dict[str, tuple[TransferMode, ...]] = {path: _offered_modes(base, path, reasons[path]) for path in paths}
    return replace(
        with_measured_rates(base.with_cores(device.compute_units), device),
        memory_paths=paths,
        modes=modes,
        shares_memory=device.unified_memory,
        uses_host_memory=device.uses_host_memory,
        image_max_width=device.image_max_width or base.image_max_width,
        image_max_height=device.image_max_height or base.image_max_height,
        image_pitch_alignment=device.image_pitch_alignment,
        max_alloc_bytes=device.max_alloc_bytes,
        page_bytes=max(base.page_bytes, page_size()),
        features=_features(device),
        code=_code(base, device),
        dot_products=base.dot_products if device.kind == "cpu" else bool(device.dots),
    )


def _code(base: DeviceDescriptor, device: Device) -> CodeStyle:
    """The code style of `base`; on a GPU that no descriptor names, `mad` where `fma` is emulated.

    Adreno's `fma` is emulated, also if the driver reports otherwise, and a descriptor of the GPU is more reliable than its
    driver: Mesa's reports no fused multiply-add for a Mali, which has it.
    """
    emulated = not device.fuses or "qualcomm" in device.vendor.lower()
    return replace(base.code, multiply_add="mad") if base.name == GENERIC_GPU and emulated else base.code


def _offered_modes(base: DeviceDescriptor, path: MemoryPath, reasons: Collection[TransferMode]) -> tuple[TransferMode, ...]:
    """The supported transfer modes for `path`: those of the descriptor, in its order, then others with a stated contention.

    `reasons` has the modes that the driver lacks.
    """
    listed = base.modes.get(path, ())
    others = (mode for mode in MODES if mode not in listed and mode in base.rates.contention)
    return tuple(mode for mode in (*listed, *others) if mode not in reasons)


def _features(device: Device) -> tuple[Feature, ...]:
    """What the driver has of the features that kernel configs need."""
    has: dict[Feature, bool] = {
        "half": HALF_ARITHMETIC in device.extensions,
        "shuffle": device.shuffles,
        "mma": device.mma,
    }
    return tuple(name for name, there in has.items() if there)


def why_not(device: Device, probed: Mapping[str, str] = MappingProxyType({})) -> dict[MemoryPath, dict[TransferMode, str]]:
    """By memory path, the transfer modes that `device` does not support, each with the reason.

    `probed`: results of probes (`DeviceDescriptor.probed`).
    """
    reasons = {mode: _why_not_on(device, kind, probed) for mode, kind in MODES.items()}
    everywhere = {mode: reason for mode, reason in reasons.items() if reason}
    if not device.has_images:
        return {"buffer": everywhere, "texture": dict.fromkeys(MODES, "the device has no images")}
    views: dict[TransferMode, str] = {}
    if not device.has_image_from_buffer:
        reason = f"the driver cannot create a texture over a buffer ({IMAGE_FROM_BUFFER})"
        views = {mode: reason for mode, kind in MODES.items() if not kind.copies}
    return {"buffer": everywhere, "texture": {**views, **everywhere}}


def _why_not_on(device: Device, kind: TransferKind, probed: Mapping[str, str]) -> str:
    """Why `device` does not support a transfer mode on any path; "" if it does."""
    if kind.by_pages and device.kind != "cpu":
        if not (IMPORT_HOST_MEMORY in device.extensions and device.unified_memory):
            return f"only a CPU, or a GPU with {IMPORT_HOST_MEMORY}, reads the mapped file in place"
        if IMPORT_HOST_MEMORY not in passed_probes(device, probed):
            return f"no probe has shown that the driver's {IMPORT_HOST_MEMORY} works (docs/how-to/phones.md)"
    elif not (kind.copies or kind.by_pages or device.unified_memory):
        return "the device has memory of its own, into which the host cannot read a file"
    return ""
