"""Which processor a device is, and whether the rates of its descriptor were measured on that one."""

from __future__ import annotations

from pathlib import Path

from flashmem.runtime.opencl.devices import Device
from flashmem.target.descriptor import DeviceDescriptor

_CPUINFO = Path("/proc/cpuinfo")


def processor_of(device: Device) -> str:
    """The processor, as exactly as its rates depend on it: a GPU's name; of a CPU the name, family, model and cores.

    Drivers of CPUs give a name that several generations share, so the system's own words are taken where it has some (Linux
    on x86).
    """
    if device.kind != "cpu":
        return device.name
    told = _first_processor()
    name = told.get("model name", device.name)
    generation = [f"{word} {told[key]}" for word, key in (("family", "cpu family"), ("model", "model")) if key in told]
    cores = f"{device.compute_units} core{'s' if device.compute_units != 1 else ''}"
    return ", ".join((name, *([" ".join(generation)] if generation else []), cores))


def rates_said(descriptor: DeviceDescriptor, device: Device | None = None) -> str:
    """Where the descriptor's rates are from, for a report; of a `device` that is here, also whether they are its own."""
    if not descriptor.measured:
        return "rates published or assumed"
    if not descriptor.measured_on:
        return "rates measured, on a processor that the descriptor does not name"
    said = f"rates measured on {descriptor.measured_on}"
    if device is None or rates_are_of(descriptor, device):
        return said
    return f"{said}; this is {processor_of(device)}, another one"


def rates_are_of(descriptor: DeviceDescriptor, device: Device) -> bool:
    """Whether the rates were measured on a processor such as `device`."""
    return descriptor.measured and descriptor.measured_on == processor_of(device)


def _first_processor() -> dict[str, str]:
    """What the system says of its first processor, by the words it uses; nothing where it says nothing."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {
        key.strip(): value.strip() for key, colon, value in (line.partition(":") for line in lines) if colon and value.strip()
    }
