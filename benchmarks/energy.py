"""Energy of the machine over a time, where the system reports it: RAPL's counters, or the battery of a phone.

RAPL counts the joules of each processor package in /sys/class/powercap/intel-rapl:N; Linux lets only root read them. A phone
reports current and voltage in /sys/class/power_supply/battery; they are sampled. Both include all that runs meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from flashmem.base.errors import UserError

SYS = Path("/sys/class")
_EVERY = 0.02
"""Seconds between two samples of a battery."""


class Meter(Protocol):
    """A source of energy readings. `start`, then `stop` once."""

    def start(self) -> None:
        """Begin to count."""

    def stop(self) -> float:
        """The joules since `start`."""


class Rapl:
    """The counters of processor packages, added up."""

    def __init__(self, packages: Sequence[Path]) -> None:
        self._packages, self._before = packages, list[int]()

    def start(self) -> None:
        """Begin to count."""
        self._before = [_number(package / "energy_uj") for package in self._packages]

    def stop(self) -> float:
        """The joules since `start`. A counter that begins anew once is right; they do so after some minutes or more."""
        joules = 0.0
        for package, before in zip(self._packages, self._before, strict=True):
            after, most = _number(package / "energy_uj"), _number(package / "max_energy_range_uj")
            joules += ((after - before) if after >= before else after + most - before) * 1e-6
        return joules


class Battery:
    """Current times voltage of a battery, sampled by a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._samples, self._end = folder, list[tuple[float, float]](), threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def start(self) -> None:
        """Begin to count."""
        self._add()
        self._thread.start()

    def stop(self) -> float:
        """The joules since `start`."""
        self._end.set()
        self._thread.join()
        self._add()
        return integral(self._samples)

    def _sample(self) -> None:
        while not self._end.wait(_EVERY):
            self._add()

    def _add(self) -> None:
        watts = abs(_number(self._folder / "current_now")) * 1e-6 * _number(self._folder / "voltage_now") * 1e-6
        self._samples.append((time.perf_counter(), watts))


def integral(samples: Sequence[tuple[float, float]]) -> float:
    """Joules of (seconds, watts), linear between samples."""
    return sum((late[0] - early[0]) * (early[1] + late[1]) / 2 for early, late in pairwise(samples))


def meter(root: Path = SYS) -> Meter:
    """What counts energy here.

    Raises:
        UserError: nothing does, or it cannot be read; with the reason of each source.
    """
    packages = [
        zone for zone in sorted(root.glob("powercap/intel-rapl:*")) if _text(zone / "name").startswith("package")
    ]  # zones of parts, and of the whole platform, count the same energy again
    battery = root / "power_supply" / "battery"
    try:
        for package in packages:
            _number(package / "energy_uj")
        if packages:
            return Rapl(packages)
        rapl = f"{root / 'powercap'} has no package of intel-rapl"
    except (OSError, ValueError) as error:
        rapl = f"RAPL: {error}"
    if _text(battery / "status") in ("Charging", "Full"):
        raise UserError(f"energy cannot be read here: {rapl}; the battery is charged meanwhile, unplug it")
    try:
        _number(battery / "current_now"), _number(battery / "voltage_now")
    except (OSError, ValueError) as error:
        raise UserError(f"energy cannot be read here: {rapl}; battery: {error}") from error
    return Battery(battery)


def _number(file: Path) -> int:
    return int(file.read_text(encoding="ascii"))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""
