"""Energy readings from folders as Linux has them, and the reasons where there are none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.energy import Battery, Rapl, integral, meter
from flashmem.base.errors import UserError


def write(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n", encoding="ascii")
    return folder


def test_packages_are_added_and_counters_begin_anew(tmp_path: Path) -> None:
    zones = tmp_path / "powercap"
    first = write(zones / "intel-rapl:0", name="package-0", energy_uj=900, max_energy_range_uj=1000)
    second = write(zones / "intel-rapl:1", name="package-1", energy_uj=5_000_000, max_energy_range_uj=10**9)
    part = write(zones / "intel-rapl:0:0", name="core", energy_uj=1, max_energy_range_uj=1000)
    whole = write(zones / "intel-rapl:2", name="psys", energy_uj=1, max_energy_range_uj=1000)
    found = meter(tmp_path)
    assert isinstance(found, Rapl)
    found.start()
    for folder, counted in ((first, 200), (second, 7_000_000), (part, 500), (whole, 700)):
        write(folder, energy_uj=counted)
    assert found.stop() == pytest.approx(2.0003)


def test_a_battery_is_sampled(tmp_path: Path) -> None:
    battery = write(tmp_path / "power_supply" / "battery", current_now=-500_000, voltage_now=4_000_000, status="Discharging")
    found = meter(tmp_path)
    assert isinstance(found, Battery)
    found.start()
    joules = found.stop()
    (begin, watts), *_, (end, _) = found._samples
    assert watts == pytest.approx(2.0) and joules == pytest.approx(2.0 * (end - begin))
    write(battery, status="Charging")
    with pytest.raises(UserError, match="no package of intel-rapl; the battery is charged meanwhile, unplug it"):
        meter(tmp_path)


def test_power_is_integrated_as_by_numpy() -> None:
    generator = np.random.default_rng(4)
    times, watts = np.cumsum(generator.uniform(0.01, 0.3, 40)), generator.uniform(1, 9, 40)
    samples = list(zip(times.tolist(), watts.tolist(), strict=True))
    assert integral(samples) == pytest.approx(float(np.trapezoid(watts, times)))


def test_a_system_without_readings_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"energy cannot be read here: .* has no package of intel-rapl; battery: .*No such file"
    ):
        meter(tmp_path)
    write(tmp_path / "powercap" / "intel-rapl:0", name="package-0", max_energy_range_uj=1000)  # energy_uj is root's
    with pytest.raises(UserError, match=r"RAPL: .*energy_uj"):
        meter(tmp_path)
