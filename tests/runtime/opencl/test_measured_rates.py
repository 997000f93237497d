"""Rates measured on this machine: kept in the user's cache, and used in place of those of a descriptor."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import flashmem
from flashmem.base.errors import UserError
from flashmem.base.paths import VARIABLE
from flashmem.runtime.opencl import measured_rates
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.opencl.measured_rates import keep_measured_rates, tile_of
from flashmem.runtime.opencl.processor import processor_of, rates_are_of
from flashmem.target.descriptor import Rates
from flashmem.target.instruction_set import INSTRUCTION_SETS, other_tiles
from tests.runtime.opencl.test_compile_target import write_model
from tests.support.caches import rates_as_for_users
from tests.support.command_line import invoke

DEVICES = pytest.mark.parametrize("device", list_devices(), ids=lambda device: device.descriptor_name)
RATES = {"gemm_flops": 3e9, "memory_bandwidth": 2e9, "disk_bandwidth": 1e6, "launch_seconds": 0.5}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rates_as_for_users(monkeypatch)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "rates"


@DEVICES
def test_they_replace_those_of_the_descriptor(device: Device) -> None:
    shipped = descriptor_for(device)
    keep_measured_rates(device, RATES)
    found = descriptor_for(device)
    assert found.rates == replace(shipped.rates, **RATES)  # type: ignore[arg-type]
    assert found.measured and found.measured_on == processor_of(device) and rates_are_of(found, device)
    assert replace(found, rates=shipped.rates, measured=shipped.measured, measured_on=shipped.measured_on) == shipped


@DEVICES
def test_they_are_of_one_driver_processor_and_instruction_set(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = descriptor_for(device).rates
    keep_measured_rates(device, RATES)
    assert descriptor_for(replace(device, driver_version="another")).rates == shipped
    assert descriptor_for(replace(device, instruction_set="sse")).rates.launch_seconds == shipped.launch_seconds
    monkeypatch.setattr(measured_rates, "processor_of", lambda device: "another")
    assert descriptor_for(device).rates == shipped


@DEVICES
@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"rates": 3}', '{"rates": {"gemm_flops": -1}}', '{"rates": {"gemm_flops": "1"}}',
     '{"rates": {"gemm_flops": NaN}}', '{"rates": {"contention": 1}}', '{"rates": {"speed": 1.0}}',
     '{"rates": {"gemm_flops": 1}}', '{"rates": {"gemm_flops": 1}, "tile": "mmx"}', '{"rates": {"gemm_flops": 1}, "tile": 3}'],
)  # fmt: skip
def test_a_damaged_file_is_as_good_as_none(device: Device, text: str, cache: Path) -> None:
    shipped = descriptor_for(device)
    keep_measured_rates(device, RATES)
    [file] = cache.iterdir()
    file.write_text(text)
    assert descriptor_for(device) == shipped


@DEVICES
def test_a_cache_that_cannot_be_written_is_named(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/dev/null/cache")
    with pytest.raises(UserError, match="/dev/null/cache/rates cannot be written; set FLASHMEM_CACHE_DIR"):
        keep_measured_rates(device, RATES)


@pytest.mark.parametrize("device", [device for device in list_devices() if device.instruction_set])
def test_the_tile_that_was_fastest_is_used(device: Device, tmp_path: Path) -> None:
    inputs, expected = write_model(tmp_path / "m.onnx", "Softmax")
    before = flashmem.compile(tmp_path / "m.onnx", tmp_path / "before.flashmem", device=device.descriptor_name, build=False)
    [other] = other_tiles(device.instruction_set)
    assert tile_of(device) == before.descriptor.instruction_set == device.instruction_set
    keep_measured_rates(device, RATES, other)
    assert tile_of(device) == other == descriptor_for(device).instruction_set
    after = flashmem.compile(tmp_path / "m.onnx", tmp_path / "after.flashmem", device=device.descriptor_name, build=False)
    for bundle in (before, after):
        with warnings.catch_warnings(), flashmem.Session(bundle, device=device.descriptor_name) as session:
            warnings.simplefilter("error")
            assert session.bundle.program.launches[0].kernel == after.program.launches[0].kernel
            np.testing.assert_allclose(session.run(None, inputs)[0], expected, rtol=0, atol=1e-5)
    assert before.program.launches[0].kernel != after.program.launches[0].kernel


@DEVICES
def test_what_cannot_be_kept_is_said(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/dev/null/cache")
    done = invoke("devices")
    assert done.code == 0 and device.name in done.out
    if not rates_are_of(descriptor_for(device), device):
        assert "/dev/null/cache" in done.err and "set FLASHMEM_CACHE_DIR" in done.err


@pytest.mark.thorough  # half a minute
def test_the_command_measures_each_device_once(cache: Path) -> None:
    def run(*options: str) -> tuple[str, str]:
        done = invoke("devices", *options)
        assert done.code == 0, done.err
        return done.out, done.err

    here = [device for device in list_devices() if not rates_are_of(descriptor_for(device), device)]
    assert "measuring" not in run("--no-measure")[1]
    first = run()[1]
    assert first.count("measuring ") == len(here) == len(list(cache.glob("*.json")))
    names = {each.name for each in list_devices()}
    assert "measuring" not in run()[1]
    described = json.loads(run("--json")[0])["devices"]
    assert {each["name"] for each in described} == names and all(each["rates_measured_here"] for each in described)
    for file in cache.glob("*.json"):
        found = json.loads(file.read_text())
        assert found["rates"].keys() <= Rates.__dataclass_fields__.keys() and found["tile"] in ("", *INSTRUCTION_SETS)
