"""Identification of a device's processor, and whether a descriptor's rates were measured on it."""

from __future__ import annotations

from flashmem.runtime.opencl.cpuinfo import processors
from flashmem.runtime.opencl.device import Device
from flashmem.target.descriptor import DeviceDescriptor


def processor_of(device: Device) -> str:
    """The name of a device's processor, precise enough for its rates: for a CPU with family, model and number of cores.

    CPU drivers report one name for several generations, so /proc/cpuinfo is used if it says more (Linux on x86).
    """
    if device.kind != "cpu":
        return device.name
    fields = next(iter(processors()), dict[str, str]())
    name = fields.get("model name", device.name)
    generation = [f"{word} {fields[key]}" for word, key in (("family", "cpu family"), ("model", "model")) if key in fields]
    cores = f"{device.compute_units} core{'s' if device.compute_units != 1 else ''}"
    return ", ".join((name, *([" ".join(generation)] if generation else []), cores))


def rates_said(descriptor: DeviceDescriptor, device: Device | None = None) -> str:
    """The origin of the descriptor's rates, for a report; with `device`, also whether they were measured on it."""
    if not descriptor.measured:
        return "rates published or assumed"
    if not descriptor.measured_on:
        return "rates measured, on a processor that the descriptor does not name"
    said = f"rates measured on {descriptor.measured_on}"
    if device is None or rates_are_of(descriptor, device):
        return said
    return f"{said}; this is {processor_of(device)}, another one"


def rates_are_of(descriptor: DeviceDescriptor, device: Device) -> bool:
    """Whether the rates were measured on a processor like that of `device`."""
    return descriptor.measured and descriptor.measured_on == processor_of(device)
