"""The table of drivers: which driver is loaded for a device, when the table is made again, and the memory that it saves."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from flashmem.base.errors import NoDeviceError
from flashmem.runtime.kernels import children
from flashmem.runtime.opencl import discovery, driver_table
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.opencl.driver_table import ListedDevice, driver_of
from flashmem.runtime.opencl.icd import VARIABLE, installed_drivers, vendors_folder
from tests.support.paths import ROOT

DRIVERS = {"00-a.icd": "liba.so", "01-b.icd": "libb.so"}
TABLE = [
    ListedDevice("00-a.icd", "Portable Computing Language", "pthread", "pocl", "cpu"),
    ListedDevice("01-b.icd", "Intel(R) OpenCL", "EPYC", "intel-cpu", "cpu"),
    ListedDevice("01-b.icd", "Intel(R) OpenCL Graphics", "Arc", "generic-gpu", "gpu"),
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """A machine with two drivers and an empty cache. Lists the drivers of each call that starts child processes."""
    calls: list[list[str]] = []

    def listed(drivers: list[str]) -> list[ListedDevice]:
        calls.append(list(drivers))
        return TABLE

    monkeypatch.setattr(driver_table, "installed_drivers", lambda: dict(DRIVERS))
    monkeypatch.setattr(driver_table, "_list_apart", listed)
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    return calls


def test_the_driver_is_that_of_the_chosen_device(asked: list[list[str]]) -> None:
    assert driver_of("pocl") == "00-a.icd" and driver_of("intel-cpu") == "01-b.icd"
    assert driver_of("auto") == "01-b.icd"  # a GPU
    assert driver_of("auto", "pocl") == "00-a.icd"  # the device of a bundle
    assert driver_of("EPYC") == "01-b.icd"
    assert driver_of("o") is None  # part of the names of several
    assert driver_of("0") is None and driver_of("nothing") is None
    assert asked == [list(DRIVERS)]


def test_a_driver_is_known_from_an_earlier_table(asked: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert driver_table.known_driver("Intel(R) OpenCL", "EPYC") is None and not asked
    driver_of("pocl")
    monkeypatch.setenv("POCL_AFFINITY", "0")  # set when drivers were started
    assert driver_table.known_driver("Intel(R) OpenCL", "EPYC") == "01-b.icd"
    assert driver_table.known_driver("Intel(R) OpenCL", "pthread") is None
    monkeypatch.setitem(DRIVERS, "02-c.icd", "libc.so")
    assert driver_table.known_driver("Intel(R) OpenCL", "EPYC") is None and len(asked) == 1


class Listing:
    """A child process that lists a driver's devices."""

    def __init__(self, command: list[str], **options: Any) -> None:
        self.driver, self.stdout, self.killed, self.returncode = command[-1], None, False, 0
        started.append(self)

    def communicate(self, timeout: float) -> tuple[bytes, None]:
        if silent:
            raise subprocess.TimeoutExpired("it", timeout)
        return json.dumps([asdict(each) for each in TABLE if each.driver == self.driver]).encode(), None

    def poll(self) -> int | None:
        return None if silent else 0

    def kill(self) -> None:
        self.killed = True

    def wait(self) -> None:
        assert self.killed


started: list[Listing] = []
silent: list[str] = []


def test_a_command_leaves_the_table_behind(asked: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The drivers are listed while it works, so that the next command need not."""
    monkeypatch.setattr(subprocess, "Popen", Listing)
    started.clear()
    silent[:] = ["all"]
    with driver_table.listed_meanwhile():
        assert [child.driver for child in started] == list(DRIVERS)
    assert all(child.killed for child in started), "drivers that do not answer are not waited for"
    silent.clear()
    with pytest.raises(KeyError), driver_table.listed_meanwhile():
        raise KeyError  # the command failed
    assert not asked and driver_table.known_driver("Intel(R) OpenCL", "EPYC") is None
    with monkeypatch.context() as patch, driver_table.listed_meanwhile():
        patch.setenv("POCL_CACHE_DIR", "/elsewhere")  # as while drivers start
    assert driver_table.known_driver("Intel(R) OpenCL", "EPYC") == driver_of("intel-cpu") == "01-b.icd"
    assert not asked and len(started) == 6
    with driver_table.listed_meanwhile():  # it is there
        assert len(started) == 6
    monkeypatch.setitem(DRIVERS, "02-c.icd", "libc.so")
    with driver_table.listed_meanwhile():
        assert len(started) == 9


def test_the_table_is_made_again_when_something_changes(
    asked: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(b"one")
    monkeypatch.setattr(driver_table, "installed_drivers", lambda: {**DRIVERS, "02-c.icd": str(library)})
    for _ in range(2):
        driver_of("pocl")
    assert len(asked) == 1
    library.write_bytes(b"another")
    driver_of("pocl")
    assert len(asked) == 2
    monkeypatch.setenv("POCL_DEVICES", "basic")
    driver_of("pocl")
    assert len(asked) == 3
    file = tmp_path / "drivers" / "devices.json"
    for wrong in ("", "[]", "{", json.dumps({"state": 1}), json.dumps({**json.loads(file.read_text()), "devices": [{"x": 1}]})):
        file.write_text(wrong)
        assert driver_of("pocl") == "00-a.icd"
    assert len(asked) == 8
    driver_table.forget()
    driver_of("pocl")
    assert len(asked) == 9


def test_all_drivers_are_loaded_where_the_table_cannot_help(asked: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/somewhere")
    assert driver_of("pocl") is None and not asked
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(driver_table, "_list_apart", lambda drivers: None)  # a driver crashes
    assert driver_of("pocl") is None
    monkeypatch.setattr(driver_table, "installed_drivers", lambda: {"00-a.icd": "liba.so"})
    assert driver_of("pocl") is None


def test_a_device_that_is_gone_ends_the_table(asked: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    list_devices()
    monkeypatch.setattr(discovery, "_only", "00-a.icd")
    driver_of("pocl")
    with pytest.raises(NoDeviceError, match="no OpenCL device is called 'unplugged'"):
        discovery.find_device("unplugged")
    driver_of("pocl")
    assert len(asked) == 2


@pytest.mark.skipif(len(installed_drivers()) < 2, reason="one driver is installed")
def test_the_folder_has_one_driver() -> None:
    first = next(iter(installed_drivers()))
    with vendors_folder(first) as folder:
        assert folder is not None and [file.name for file in folder.iterdir()] == [first]


@pytest.mark.skipif(len(installed_drivers()) < 2, reason="one driver is installed")
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not list the libraries of a process")
def test_a_process_that_builds_kernels_loads_one_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This process has loaded all drivers; a table was made."""
    device = list_devices()[-1]
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path))
    driver = driver_of(device.descriptor_name)
    assert driver is not None
    child = children._start("flashmem.runtime.kernels.worker", device, tmp_path, tmp_path / "errors")
    assert child.stdin is not None and child.stdout is not None
    with child:
        child.stdin.write(b'{"build": "none", "text": "", "options": [], "launches": []}\n')
        child.stdin.flush()
        answer = json.loads(child.stdout.readline())
        loaded = Path(f"/proc/{child.pid}/maps").read_text(encoding="utf-8")
        child.stdin.close()
    assert answer["error"] and "device is gone" not in answer["error"]
    libraries = {name: Path(library).name for name, library in installed_drivers().items()}
    assert [name for name, library in libraries.items() if library in loaded] == [driver]


@pytest.mark.skipif(len(installed_drivers()) < 2, reason="one driver is installed")
@pytest.mark.parametrize("device", [device.descriptor_name for device in list_devices()])
def test_a_command_loads_one_driver(device: str, tmp_path: Path) -> None:
    program = (
        "import sys; from flashmem.base import interrupts; interrupts.watch()\n"
        "from flashmem.runtime.opencl.discovery import find_device, list_devices, use_one_device\n"
        "from flashmem.runtime.engine.report import process_peak_rss\n"
        "if len(sys.argv) > 2: use_one_device()\n"
        "find_device(sys.argv[1]); print(len(list_devices()), process_peak_rss())"
    )

    def peak(*words: str) -> tuple[int, int]:
        done = subprocess.run(
            [sys.executable, "-c", program, device, *words], cwd=ROOT, capture_output=True, text=True, check=True
        )
        count, nbytes = map(int, done.stdout.split())
        return count, nbytes

    (every, all_bytes), (one, one_bytes) = peak(), peak("alone")
    assert every == len(list_devices()) and one < every
    assert one_bytes < all_bytes - 30_000_000
