"""Rates measured on this machine, kept in the user's cache: they replace those of a device's descriptor.

A shipped descriptor's rates are of the processor that they were measured on. `flashmem devices --measure` measures the main
ones here (`flashmem.profiler.rates.measure_main_rates`). They are valid for one driver, processor and instruction set.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flashmem.base.errors import UserError
from flashmem.base.files import written_whole
from flashmem.base.paths import cache_folder, make_private, why_unusable
from flashmem.runtime.opencl.processor import processor_of
from flashmem.target.descriptor import DeviceDescriptor, Rates

if TYPE_CHECKING:
    from flashmem.runtime.opencl.devices import Device

_NAMES = frozenset(each.name for each in fields(Rates)) - {"contention"}


def with_measured_rates(descriptor: DeviceDescriptor, device: Device) -> DeviceDescriptor:
    """The descriptor of `device` with the rates that were measured here; unchanged if none were."""
    found = _read(_file(device))
    if not found:
        return descriptor
    rates = Rates(**{**vars(descriptor.rates), **found})
    return replace(descriptor, rates=rates, measured=True, measured_on=processor_of(device))


def keep_measured_rates(device: Device, rates: Mapping[str, float]) -> None:
    """Keep rates of `device`, by the names of the fields of `Rates`.

    Raises:
        UserError: the cache folder cannot be written.
    """
    file = _file(device)
    if (reason := why_unusable(file.parent)) is not None:
        raise UserError(f"measured rates cannot be kept: {file.parent} {reason}; set FLASHMEM_CACHE_DIR to a folder that can")
    try:
        make_private(file.parent)
        with written_whole(file, private=True) as written:
            written.write(json.dumps({"processor": processor_of(device), "rates": dict(rates)}, indent=1).encode())
    except OSError as error:
        raise UserError(f"measured rates cannot be kept in {file.parent}: {error.strerror}") from error


def _file(device: Device) -> Path:
    about = "\n".join((device.key, processor_of(device), device.instruction_set))
    return cache_folder("rates") / f"{device.descriptor_name}-{hashlib.blake2b(about.encode(), digest_size=8).hexdigest()}.json"


def _read(file: Path) -> dict[str, float]:
    """The rates in `file`; none if it is missing, damaged, or another user's."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        if why_unusable(file.parent) is None:
            found = json.loads(file.read_text(encoding="utf-8"))["rates"]
            if found.keys() <= _NAMES and all(math.isfinite(rate) and rate > 0 for rate in found.values()):
                return {name: float(rate) for name, rate in found.items()}
    return {}
