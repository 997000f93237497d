"""Rates measured on this machine, kept in the user's cache: they replace those of a device's descriptor.

A shipped descriptor's rates are of the processor that they were measured on. `flashmem devices` measures the main ones here
(`flashmem.profiler.rates.measure_main_rates`), and which of a CPU's tiles is fastest. They are valid for one driver, processor
and instruction set.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from flashmem.base.errors import UserError
from flashmem.base.files import read_cached, written_whole
from flashmem.base.paths import cache_folder, make_private, why_unusable
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.processor import processor_of
from flashmem.target.descriptor import DeviceDescriptor, Rates
from flashmem.target.instruction_set import INSTRUCTION_SETS

_FILE_BYTES = 1 << 20  # larger than any such file
_NAMES = frozenset(each.name for each in fields(Rates)) - {"contention"}


def with_measured_rates(descriptor: DeviceDescriptor, device: Device) -> DeviceDescriptor:
    """The descriptor of `device` with the rates that were measured here; unchanged if none were."""
    found = _read(_file(device)).rates
    if not found:
        return descriptor
    rates = Rates(**{**vars(descriptor.rates), **found})
    return replace(descriptor, rates=rates, measured=True, measured_on=processor_of(device))


def tile_of(device: Device) -> str:
    """The instruction set whose tile was fastest here; without measurements, that of the device. "" for a GPU."""
    return _read(_file(device)).tile or device.instruction_set if device.instruction_set else ""


def keep_measured_rates(device: Device, rates: Mapping[str, float], tile: str = "") -> None:
    """Keep rates of `device`, by the names of the fields of `Rates`, and the instruction set whose `tile` is fastest.

    Raises:
        UserError: the cache folder cannot be written.
    """
    file = _file(device)
    if (reason := why_unusable(file.parent)) is not None:
        raise UserError(f"measured rates cannot be kept: {file.parent} {reason}; set FLASHMEM_CACHE_DIR to a folder that can")
    try:
        make_private(file.parent)
        with written_whole(file, private=True) as written:
            written.write(
                json.dumps({"processor": processor_of(device), "rates": dict(rates), "tile": tile}, indent=1).encode()
            )
    except OSError as error:
        raise UserError(f"measured rates cannot be kept in {file.parent}: {error.strerror}") from error


def _file(device: Device) -> Path:
    about = "\n".join((device.key, processor_of(device), device.instruction_set))
    return cache_folder("rates") / f"{device.descriptor_name}-{hashlib.blake2b(about.encode(), digest_size=8).hexdigest()}.json"


@dataclass(frozen=True)
class _Measured:
    """What was measured of a device: rates by name, and the instruction set with the fastest tile; empty if nothing was."""

    rates: Mapping[str, float] = field(default_factory=dict)
    tile: str = ""


def _read(file: Path) -> _Measured:
    """What `file` says; nothing if it is missing, damaged, or another user's."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        found = json.loads(read_cached(file, _FILE_BYTES))
        rates = found["rates"]
        tile = found["tile"]
        numbers = rates.keys() <= _NAMES and all(math.isfinite(rate) and rate > 0 for rate in rates.values())
        if numbers and tile in ("", *INSTRUCTION_SETS):
            return _Measured({name: float(rate) for name, rate in rates.items()}, tile)
    return _Measured()
