"""`flashmem devices`: the devices of this machine, their memory path and transfer mode, and why other modes do not work."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from flashmem.base.errors import RunError, UserError
from flashmem.base.extras import need
from flashmem.base.paths import cache_folder, make_private, why_unusable
from flashmem.base.streams import say
from flashmem.base.units import format_size
from flashmem.cli.output.console import emit_json, out
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.devices import descriptor_for, why_not
from flashmem.runtime.opencl.discovery import driver_failures, find_device, list_devices
from flashmem.runtime.opencl.matrix_extensions import unused_of
from flashmem.runtime.opencl.measured_rates import keep_measured_rates
from flashmem.runtime.opencl.processor import processor_of, rates_are_of, rates_said


def show_devices(*, as_json: bool) -> None:
    """Print the devices, with a mark at the choice of `auto`.

    Raises:
        NoDeviceError: no device.
    """
    chosen = find_device()
    found = list_devices()
    for failure in driver_failures():
        say(failure)
    described = [_describe(index, device, device is chosen) for index, device in enumerate(found)]
    if as_json:
        emit_json({"devices": described})
        return
    for entry in described:
        _print(entry)


def measure_devices() -> None:
    """Measure the rates of devices whose descriptor has another processor's, and keep them in the user's cache.

    What cannot be measured or kept is said, and the devices are used with the rates that they have.
    """
    try:
        need("measuring", "jinja2", "onnx")
    except UserError:  # a desk without the compiler: rates of another processor are said in the list
        return
    from flashmem.profiler.rates import fastest_tile, measure_main_rates

    for device in list_devices():
        descriptor = descriptor_for(device)
        if rates_are_of(descriptor, device):
            continue
        say(f"measuring {device.name} ({descriptor.name})")
        try:
            with tempfile.TemporaryDirectory(prefix="flashmem-", dir=_on_the_disk_of_bundles()) as folder:
                tile = fastest_tile(device, descriptor, Path(folder))
                if tile:
                    descriptor = descriptor.for_instruction_set(tile)
                keep_measured_rates(device, measure_main_rates(device, descriptor, Path(folder)), tile)
        except (UserError, RunError) as error:
            say(str(error))


def _on_the_disk_of_bundles() -> Path:
    folder = cache_folder("bundles")
    if (reason := why_unusable(folder)) is not None:
        raise UserError(f"loads cannot be measured: {folder} {reason}; set FLASHMEM_CACHE_DIR to a folder that can")
    make_private(folder)
    return folder


def _describe(index: int, device: Device, auto: bool) -> dict[str, Any]:
    descriptor = descriptor_for(device)
    reasons = why_not(device)
    return {
        "number": index,
        "name": device.name,
        "platform": device.platform,
        "driver_version": device.driver_version,
        "kind": device.kind,
        "compute_units": device.compute_units,
        "global_memory_bytes": device.global_memory_bytes,
        "auto": auto,
        "descriptor": device.descriptor_name,
        "rates_measured": descriptor.measured,
        "processor": processor_of(device),
        "rates_measured_on": descriptor.measured_on,
        "rates_measured_here": rates_are_of(descriptor, device),
        "rates": rates_said(descriptor, device),
        "memory_path": descriptor.memory_paths[0],
        "transfer_mode": descriptor.modes[descriptor.memory_paths[0]][0],
        "modes": {path: list(descriptor.modes[path]) for path in descriptor.memory_paths},
        "not_possible": {path: dict(modes) for path, modes in reasons.items()},
        "integer_products": device.dots,
        "unused_extensions": unused_of(device.extensions),
    }


def _print(entry: dict[str, Any]) -> None:
    console = out()
    memory = format_size(entry["global_memory_bytes"])
    units = f"{entry['compute_units']} compute unit{'s' if entry['compute_units'] != 1 else ''}"
    console.print(f"{entry['number']}  {entry['name']}{'  (auto)' if entry['auto'] else ''}", markup=False)
    own = "none of this device's own; " if entry["descriptor"].startswith("generic-") else ""
    for label, text in (
        ("platform", f"{entry['platform']}, driver {entry['driver_version']}, {units}, {memory}"),
        ("descriptor", f"{entry['descriptor']} ({own}{entry['rates']})"),
        ("uses", f"memory path {entry['memory_path']}, transfer mode {entry['transfer_mode']}"),
        *((f"{path}", ", ".join(modes)) for path, modes in entry["modes"].items()),
        *(
            (f"not {path}", f"{mode}: {reason}")
            for path, modes in entry["not_possible"].items()
            for mode, reason in modes.items()
        ),
        *([("integers", f"products of 8 bits by {entry['integer_products']}")] if entry["integer_products"] else []),
        *(("not used", f"{name}: {reason}") for name, reason in entry["unused_extensions"].items()),
    ):
        console.print(f"   {label:<12} {text}", markup=False)
