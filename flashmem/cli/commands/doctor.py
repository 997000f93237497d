"""`flashmem doctor`: checks OpenCL from the dynamic linker to a kernel's result, and prints the next commands to run."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flashmem.base.errors import UserError
from flashmem.base.pages import page_size
from flashmem.base.paths import cache_folder
from flashmem.base.units import format_size
from flashmem.base.version import __version__
from flashmem.cli.output.console import emit_json
from flashmem.tools.doctor.advice import CheckedItem, next_lines, steps
from flashmem.tools.doctor.selftest import SelfTestResult, disk, run_apart
from flashmem.tools.doctor.surroundings import Surroundings, look

if TYPE_CHECKING:
    from flashmem.runtime.opencl.device import Device


def examine(*, as_json: bool) -> bool:
    """Print the findings. Returns whether a device passed every test."""
    around = look()
    devices, failure = _devices()
    found = steps(around, [f"{device.platform}: {device.name}" for device in devices])
    folder = cache_folder("bundles")
    tested = {number: run_apart(number, folder) for number in range(len(devices))}
    read = disk(folder)
    if as_json:
        emit_json(_report(around, found, devices, tested, read, failure))
    else:
        _print_surroundings(around, found)
        for number, device in enumerate(devices):
            _print_device(number, device, tested[number])
        print(f"\n{_mark(read.ok)} {read.test:<22} {read.said}")
        _print_next(found, failure)
    return any(all(result.ok is not False for result in each) for each in tested.values())


def _devices() -> tuple[tuple[Device, ...], str]:
    """The devices, and the reason why they or others cannot be listed, or ""."""
    try:
        from flashmem.runtime.opencl.discovery import driver_failures, list_devices

        return list_devices(), "; ".join(driver_failures())
    except UserError as error:  # pyopencl is missing, or finds no loader
        return (), str(error)


def _report(
    around: Surroundings,
    found: Iterable[CheckedItem],
    devices: Iterable[Device],
    tested: dict[int, list[SelfTestResult]],
    read: SelfTestResult,
    failure: str,
) -> dict[str, Any]:
    found = list(found)
    return {
        "flashmem": __version__,
        "python": sys.version.split()[0],
        "surroundings": {**asdict(around), "page_bytes": page_size()},
        "steps": [asdict(step) for step in found],
        "next": list(next_lines(found)),
        "failure": failure,
        "devices": [{**_facts(device), "tests": [asdict(each) for each in tested[i]]} for i, device in enumerate(devices)],
        "disk": asdict(read),
    }


def _facts(device: Device) -> dict[str, Any]:
    """A device's limits, its transfer modes, and the modes that it lacks."""
    from flashmem.runtime.opencl.devices import descriptor_for, why_not
    from flashmem.runtime.opencl.matrix_extensions import unused_of

    values = {name: value for name, value in vars(device).items() if name != "handle"}
    descriptor = descriptor_for(device)
    return {
        **values,
        "extensions": sorted(device.extensions),
        "descriptor": descriptor.name,
        "modes": {path: list(modes) for path, modes in descriptor.modes.items()},
        "not_possible": {path: dict(reasons) for path, reasons in why_not(device).items()},
        "unused_extensions": unused_of(device.extensions),
    }


def _mark(ok: bool | None) -> str:
    return {True: "ok  ", False: "FAIL", None: "  - "}[ok]


def _print_surroundings(around: Surroundings, found: Iterable[CheckedItem]) -> None:
    place = f", Termux in {around.prefix}" if around.prefix else ""
    pages = f"pages of {around.page_bytes // 1024} KiB"
    print(f"flashmem {__version__}, Python {around.python}, {around.system} on {around.machine}, {pages}{place}\n")
    for step in found:
        print(f"{_mark(step.ok)} {step.what:<22} {step.said}")


def _print_device(number: int, device: Device, results: Iterable[SelfTestResult]) -> None:
    from flashmem.runtime.kernels.verdicts import Verdicts
    from flashmem.runtime.opencl.devices import descriptor_for, why_not
    from flashmem.runtime.opencl.matrix_extensions import unused_of
    from flashmem.runtime.opencl.processor import rates_said

    descriptor = descriptor_for(device)
    print(f"\n{number}  {device.platform}: {device.name}, driver {device.driver_version}")
    shared = "shared with the host" if device.unified_memory else "not shared"
    whole = format_size(device.global_memory_bytes)
    most = format_size(device.max_alloc_bytes)
    print(f"     {'memory':<22} {whole} {shared}, {most} at a time")
    if device.has_images:
        over = (
            f"over buffers with rows of {device.image_pitch_alignment} texels"
            if device.has_image_from_buffer
            else "not over buffers"
        )
        print(f"     {'textures':<22} {device.image_max_width} x {device.image_max_height} texels, {over}")
    print(f"     {'descriptor':<22} {descriptor.name} ({rates_said(descriptor, device)})")
    for path in descriptor.memory_paths:
        print(f"     {path + ' path':<22} {', '.join(descriptor.modes[path])}")
    for path, reasons in why_not(device).items():
        for mode, reason in reasons.items():
            print(f"     {'not ' + path:<22} {mode}: {reason}")
    if device.dots:
        print(f"     {'integers':<22} products of 8 bits by {device.dots}")
    for name, reason in unused_of(device.extensions).items():
        print(f"     {'not used':<22} {name}: {reason}")
    for finding in Verdicts(device).wrong.values():
        use = "replaced if possible, else " + ("refused" if finding.options is None else "without optimisation")
        use = "the kernels that it joins are used" if finding.of_chain else use
        print(f"[!!] {'a kernel':<22} {finding.name} is miscompiled here; {use}: {finding.wrong}")
    for result in results:
        print(f"{_mark(result.ok)} {result.test:<22} {result.said}")


def _print_next(found: Iterable[CheckedItem], failure: str) -> None:
    found = list(found)
    lines = next_lines(found)
    if failure:
        print(f"\n{failure}")
    if lines:
        print("\nType next:\n" + "\n".join(f"    {line}" for line in lines))
    elif not failure and any(step.ok is False for step in found):
        print("\nNo known command repairs this; please report the output of flashmem doctor --json.")
