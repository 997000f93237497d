"""Which OpenCL driver has which device, so that a process that uses one device loads one driver.

The OpenCL loader loads every driver at the first call, and a driver that is not used keeps its memory: Intel's for CPUs about
90 MB. So child processes load one driver each and list its devices. The answer is kept in the user's cache folder. It is valid
as long as the `.icd` files, the libraries they name, the environment of the drivers and the device files are the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from flashmem.base.child_processes import module_environment, python_module
from flashmem.base.errors import NoDeviceError
from flashmem.base.files import read_cached, written_whole
from flashmem.base.interrupts import child_environment
from flashmem.base.paths import cache_folder, is_foreign, make_private, why_unusable
from flashmem.base.version import __version__
from flashmem.runtime.opencl.devices import choose
from flashmem.runtime.opencl.icd import VARIABLE, installed_drivers
from flashmem.runtime.opencl.pocl import AFFINITY

_LISTING = "flashmem.runtime.opencl.driver_listing"
"""The module that lists a driver's devices, in a child process."""

_SECONDS = 60
"""The longest that a driver may take to list its devices."""

_SECONDS_MORE = 5
"""The longest that a command waits for the list that it does not need itself, when it is done."""

_FILE_BYTES = 1 << 20  # larger than any table
_VARIABLES = ("CL_", "CUDA_", "GPU_", "LD_LIBRARY_PATH", "LD_PRELOAD", "NVIDIA_", "OCL_", "POCL_", "ROCR_", "ZE_")
_DEVICE_FILES = ("nvidia*", "dri/*", "kfd", "kgsl*", "mali*")


@dataclass(frozen=True)
class ListedDevice:
    """A device of `driver`, a name in `installed_drivers`."""

    driver: str
    platform: str
    name: str
    descriptor_name: str
    kind: Literal["cpu", "gpu", "other"]


def driver_of(name: str, prefer: str | None = None) -> str | None:
    """The driver of the device that `devices.choose` chooses for `name` and `prefer`.

    None if all drivers must be loaded: the device is a number in the list of all, or two drivers have one that fits as well, or
    none has. Or there is one driver only, the user chose drivers, a driver fails, or no cache folder can be used.
    """
    drivers = installed_drivers()
    if len(drivers) < 2 or name.isdecimal() or os.environ.get(VARIABLE):
        return None
    devices = _table(drivers)
    try:
        found = {choose(order, name, prefer).driver for order in (devices, devices[::-1])}
    except NoDeviceError:
        return None
    return found.pop() if len(found) == 1 else None


def known_driver(platform_name: str, device_name: str) -> str | None:
    """The driver of a device with these names, by the table that an earlier command made; None without it, or for several."""
    drivers = installed_drivers()
    if len(drivers) < 2 or os.environ.get(VARIABLE):
        return None
    devices = _read(_state(drivers)) or []
    found = {each.driver for each in devices if (each.platform, each.name) == (platform_name, device_name)}
    return found.pop() if len(found) == 1 else None


@contextmanager
def listed_meanwhile() -> Iterator[None]:
    """Have child processes list the devices of all drivers during the body, unless the table is there: they take two seconds.

    It is for the commands that follow. An error of the body ends the children; a driver that does not answer is left out.
    """
    drivers = installed_drivers()
    state = _state(drivers)
    if len(drivers) < 2 or os.environ.get(VARIABLE) or why_unusable(_file().parent) is not None or _read(state) is not None:
        yield
        return
    with _children(list(drivers)) as children:
        yield
        _keep(state, _answers(children, _SECONDS_MORE))


def forget() -> None:
    """Remove the table, which was wrong about a device."""
    if is_foreign(_file().parent):
        return
    with suppress(OSError):
        _file().unlink()


def _file() -> Path:
    return cache_folder("drivers") / "devices.json"


def _table(drivers: Mapping[str, str]) -> list[ListedDevice]:
    """The devices of all drivers; empty if they are not known."""
    state = _state(drivers)
    if (known := _read(state)) is not None:
        return known
    if why_unusable(_file().parent) is not None:  # without a cache the children's time would be lost in each call
        return []
    devices = _list_apart(list(drivers))
    _keep(state, devices)
    return devices or []


def _keep(state: str, devices: Sequence[ListedDevice] | None) -> None:
    """Write the table, if all drivers have answered and there is room for it."""
    if devices is None:
        return
    with suppress(OSError):
        make_private(_file().parent)
        with written_whole(_file(), private=True) as file:
            file.write(json.dumps({"state": state, "devices": [asdict(each) for each in devices]}).encode())


def _read(state: str) -> list[ListedDevice] | None:
    """The devices in the file, or None if it was not written in `state`."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        known = json.loads(read_cached(_file(), _FILE_BYTES))
        if known["state"] == state:
            return [ListedDevice(**each) for each in known["devices"]]
    return None


def _state(drivers: Mapping[str, str]) -> str:
    """A hash of everything that the table depends on."""
    facts: list[Any] = [__version__, sys.prefix, platform.release()]
    for name, library in sorted(drivers.items()):
        facts += [name, library]
        with suppress(OSError):  # a bare name is found by the dynamic linker
            status = Path(library).stat()
            facts += [status.st_mtime_ns, status.st_size]
    variables = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    variables.pop(AFFINITY, None)  # set when drivers are started
    facts.append(sorted(variables.items()))
    facts.append(sorted(str(path) for pattern in _DEVICE_FILES for path in Path("/dev").glob(pattern)))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _list_apart(drivers: Sequence[str]) -> list[ListedDevice] | None:
    """The devices of each driver, from a child process for each; None if one fails."""
    with _children(drivers) as children:
        return _answers(children, _SECONDS)


@contextmanager
def _children(drivers: Sequence[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Child processes that list the devices of one driver each; they end with the body."""
    environment = module_environment(child_environment())
    children: list[subprocess.Popen[bytes]] = []
    try:
        for driver in drivers:
            child = subprocess.Popen(
                python_module(_LISTING, driver), env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
            children.append(child)
        yield children
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()


def _answers(children: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[ListedDevice] | None:
    """What the children have listed, in so many seconds; None if one fails."""
    end = time.monotonic() + seconds
    try:
        printed = [child.communicate(timeout=max(0.1, end - time.monotonic()))[0] for child in children]
        if any(child.returncode for child in children):
            return None
        return [ListedDevice(**each) for text in printed for each in json.loads(text.splitlines()[-1])]
    except (subprocess.TimeoutExpired, ValueError, TypeError, IndexError):
        return None
